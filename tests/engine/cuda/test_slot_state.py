"""The kernels that keep the state of the slots on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_device import DEVICE, ints

from headrace.engine.native.cuda import slot_state
from headrace.engine.native.cuda.slot_state import SLOT_FIELDS, SlotState

SLOTS, BLOCKS, STOPS, BLOCK = 5, 7, 3, 4
NOBODY = SLOTS
PER_SLOT = ("tokens", "lengths", "limits", "floors", "alive", "seeds", "sampling", "stops", "table")


def make_state() -> SlotState:
    """Every number of it a different one, so that what is left alone is known from what was written."""
    state = SlotState.make(slots=SLOTS, blocks=BLOCKS, stops=STOPS, device=DEVICE)
    for place, name in enumerate(PER_SLOT):
        tensor = getattr(state, name)
        tensor[:SLOTS] = (torch.arange(tensor[:SLOTS].numel()).view(tensor[:SLOTS].shape) + 1000 * (place + 1)).to(tensor)
    return state


def copies(state: SlotState) -> dict[str, torch.Tensor]:
    return {name: getattr(state, name).clone() for name in PER_SLOT}


def test_a_slot_without_a_rollout_reads_scratch_and_costs_no_search() -> None:
    state = SlotState.make(slots=SLOTS, blocks=BLOCKS, stops=STOPS, device=DEVICE)
    assert not state.alive.any() and not state.table.any() and not state.sampling.any()
    assert (state.stops == -1).all() and (state.lengths == 1).all()


@pytest.mark.parametrize("width", [2, 256])
def test_new_lines_reach_their_slots_and_no_others(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_state, "_WIDTH", width)
    state = make_state()
    before = copies(state)
    seeds = np.array([-(1 << 62) + 12345, (1 << 40) + (1 << 31) + 7], dtype=np.int64)  # the low half has its highest bit set
    sampling = np.array([[0.7, 20.0, 0.95, 0.01], [0.0, 0.0, 1.0, 0.0]], dtype=np.float32)
    given = np.zeros((2, SLOT_FIELDS + STOPS + 3), dtype=np.int32)
    given[:, :4] = [[3, 11, 20, 13], [1, 5, 64, 0]]
    given[:, 4:6] = seeds.view(np.int32).reshape(2, 2)
    given[:, 6:10] = sampling.view(np.int32)
    given[:, 10:13] = [[2, -1, -1], [8, 9, 10]]
    given[:, 13:] = [[31, 32, 33], [21, 0, 0]]
    state.start(ints(given), num_blocks=3)
    at = [3, 1]
    assert state.lengths[at].tolist() == [11, 5]
    assert state.limits[at].tolist() == [20, 64]
    assert state.floors[at].tolist() == [13, 0]
    assert state.alive[at].tolist() == [1, 1]
    assert state.seeds[at].tolist() == seeds.tolist()
    assert np.array_equal(state.sampling[at].cpu().numpy(), sampling)
    assert state.stops[at].tolist() == [[2, -1, -1], [8, 9, 10]]
    assert state.table[at, :3].tolist() == [[31, 32, 33], [21, 0, 0]]
    assert torch.equal(state.table[at, 3:], before["table"][at, 3:])
    assert torch.equal(state.tokens, before["tokens"])  # the first draw writes it
    others = [0, 2, 4, NOBODY]
    for name, kept in before.items():
        assert torch.equal(getattr(state, name)[others], kept[others]), name


@pytest.mark.parametrize("rows", [2, 128])
def test_only_as_many_blocks_grow_as_are_counted(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_state, "_ROWS", rows)
    state = make_state()
    before = copies(state)
    triples = ints([4, 2, 77, 0, 6, 78, 4, 3, 79, 1, 1, 80])  # the last one is what an earlier step left behind
    state.add_blocks(triples, ints([3]), most=4)
    expected = before["table"]
    expected[4, 2], expected[0, 6], expected[4, 3] = 77, 78, 79
    assert torch.equal(state.table, expected)
    state.add_blocks(triples, ints([0]), most=4)
    assert torch.equal(state.table, expected)


@pytest.mark.parametrize("rows", [2, 128])
def test_a_row_is_fed_its_last_token_and_an_ended_one_is_nobodys(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_state, "_ROWS", rows)
    state = make_state()
    state.lengths[:SLOTS] = ints([1, 4, 5, 28, 9])
    state.alive[:SLOTS] = ints([1, 1, 1, 1, 0])
    slots = [3, 4, NOBODY, 0, 1, 2]
    row_slots, tokens, positions = ints([-5] * 8), ints([-5] * 8), ints([-5] * 8)
    places = ints([-5] * 8, torch.int64)
    state.feed(ints(slots), row_slots, tokens, positions, places, block=BLOCK)
    table = state.table.tolist()
    assert row_slots.tolist() == [3, NOBODY, NOBODY, 0, 1, 2, -5, -5]
    assert tokens.tolist() == [*state.tokens[[3, NOBODY, NOBODY, 0, 1, 2]].tolist(), -5, -5]
    assert positions.tolist() == [27, 0, 0, 0, 3, 4, -5, -5]
    expected = [table[3][6] * 4 + 3, 0, 0, table[0][0] * 4, table[1][0] * 4 + 3, table[2][1] * 4]
    assert places.tolist() == [*expected, -5, -5]


@pytest.mark.parametrize("rows", [2, 128])
def test_tokens_of_prompts_find_their_places(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_state, "_ROWS", rows)
    state = make_state()
    state.table[2, 5] = (1 << 30) + 1  # a place past what 32 bits hold
    owners, positions = [2, 2, 0, NOBODY, 2], [3, 4, 27, 0, 22]
    places = ints([-5] * 6, torch.int64)
    state.find_places(ints(owners), ints(positions), places, block=BLOCK)
    table = state.table.tolist()
    assert places.tolist() == [table[2][0] * 4 + 3, table[2][1] * 4, table[0][6] * 4 + 3, 0, ((1 << 30) + 1) * 4 + 2, -5]
