"""The sampling kernels against `plain.draw`, and by hand where they do what it does not: end rollouts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_device import DEVICE, ints

from headrace.engine.native import sampling as plain
from headrace.engine.native.cuda import sampling
from headrace.engine.native.cuda.kernels.sampling import _uniform
from headrace.engine.native.cuda.sampling import restrict, sample
from headrace.engine.native.cuda.slot_state import SlotState
from headrace.model.fused_head import Scaling

PLAIN = Scaling()
STOP, OTHER_STOP = 7, 11
NAN, LOWEST = float("nan"), float("-inf")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small vocabulary has several."""
    monkeypatch.setattr(sampling, "_CHUNK", 16)


def make_state(parameters: list[tuple[float, float, float, float]]) -> SlotState:
    """One slot per (temperature, top-k, top-p, min-p), alive, far from its limit, with a stop token it may draw."""
    slots = len(parameters)
    state = SlotState.make(slots=slots, blocks=2, stops=3, device=DEVICE)
    state.sampling[:slots] = torch.tensor(parameters, dtype=torch.float32)
    state.lengths[:slots] = torch.arange(slots) + 3
    state.limits[:slots] = 1000
    state.stops[:slots, 0] = STOP
    state.alive[:slots] = 1
    state.seeds[:slots] = torch.arange(slots) * 77 + (1 << 40)
    return state


def drawn(
    logits: torch.Tensor, state: SlotState, slots: list[int], *, scaling: Scaling = PLAIN
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, logprobs = ints([-9] * len(slots)), torch.full((len(slots),), 9.0, device=DEVICE)
    sample(logits, ints(slots), state, scaling, tokens, logprobs)
    return tokens, logprobs


def cut_rows(logits: torch.Tensor, state: SlotState, slots: list[int], *, scaling: Scaling = PLAIN) -> torch.Tensor:
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=DEVICE)
    return restrict(logits, ints(slots), state, scaling, allowed)


def by_sampler(logits: torch.Tensor, state: SlotState, slots: list[int], *, is_restricted: bool) -> plain.Sampled:
    lengths = state.lengths[slots].cpu().numpy()
    numbers = torch.from_numpy(plain.uniform(state.seeds[slots].cpu().numpy(), lengths)).to(DEVICE)
    forbidden = [
        (row, int(stop))
        for row, slot in enumerate(slots)
        if state.lengths[slot] < state.floors[slot]
        for stop in state.stops[slot]
        if stop >= 0
    ]
    return plain.sample(logits.float(), state.sampling[slots], numbers, forbidden=forbidden, is_restricted=is_restricted)


# Random numbers


@triton.jit
def number_kernel(seeds, positions, out):
    row = tl.program_id(0)
    tl.store(out + row, _uniform(tl.load(seeds + row), tl.load(positions + row)))


def test_random_numbers_are_the_samplers_to_the_bit() -> None:
    seeds = np.array([0, 1, -1, 1 << 40, (1 << 63) - 1, -(1 << 63), 0x123456789ABCDEF, 42, 42], dtype=np.int64)
    positions = np.array([0, 1, 2, 4095, (1 << 31) - 1, 17, 100_000, 5, 6], dtype=np.int32)
    out = torch.zeros(len(seeds), dtype=torch.float64, device=DEVICE)
    number_kernel[(len(seeds),)](ints(seeds, torch.int64), ints(positions), out)
    assert np.array_equal(out.cpu().numpy(), plain.uniform(seeds, positions))


# Drawing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [5, 16, 61])
def test_a_draw_is_the_samplers(vocabulary: int, dtype: torch.dtype) -> None:
    state = make_state([(1.0, 0, 1, 0), (0.0, 0, 1, 0), (0.3, 0, 1, 0), (2.5, 0, 1, 0)] * 3)
    slots = [4, 0, 9, 2, 3, 5, 1, 8, 10, 7]
    torch.manual_seed(vocabulary)
    wide = (torch.randn(len(slots), vocabulary + 8) * 3).to(device=DEVICE, dtype=dtype)
    logits = wide[:, :vocabulary]  # rows that do not follow each other
    expected = by_sampler(logits, state, slots, is_restricted=False)
    tokens, logprobs = drawn(logits, state, slots)
    assert tokens.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(logprobs, expected.logprobs, atol=2e-6, rtol=0)
    assert all(logprobs[row] == 0 for row, slot in enumerate(slots) if slot % 4 == 1)


@pytest.mark.parametrize(
    "scaling", [{"divisor": 3.0}, {"factor": 0.25}, {"softcap": 2.0}, {"divisor": 0.5, "factor": 2.0, "softcap": 4.0}]
)
def test_logits_are_scaled_as_the_model_says_before_temperature(scaling: dict[str, float]) -> None:
    given = {"divisor": None, "factor": None, "softcap": None, **scaling}
    state = make_state([(1.0, 0, 1, 0), (0.5, 0, 1, 0), (0.0, 0, 1, 0)])
    torch.manual_seed(1)
    logits = torch.randn(3, 40, device=DEVICE) * 6
    scaled = logits / (given["divisor"] or 1.0) * (given["factor"] or 1.0)
    if given["softcap"] is not None:
        scaled = given["softcap"] * torch.tanh(scaled / given["softcap"])
    expected = by_sampler(scaled, state, [0, 1, 2], is_restricted=False)
    tokens, logprobs = drawn(logits, state, [0, 1, 2], scaling=Scaling(**given))
    assert tokens.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(logprobs, expected.logprobs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("is_restricted", [False, True])
@pytest.mark.parametrize("scale", [0.1, 3.0, 300.0])
def test_entropies_are_those_of_what_is_sampled_from(scale: float, is_restricted: bool) -> None:
    state = make_state([(1.0, 0, 1, 0), (0.0, 0, 1, 0), (0.3, 5, 1, 0), (2.5, 0, 0.8, 0.01), (1.0, 0, 1, 0)])
    slots = [2, 0, 1, 3, 4]
    torch.manual_seed(5)
    logits = torch.randn(len(slots), 61, device=DEVICE) * scale
    logits[4, :40] = LOWEST  # chunks in which nothing can be sampled
    expected = by_sampler(logits, state, slots, is_restricted=is_restricted)
    if is_restricted:
        cut_rows(logits, state, slots)
    tokens, found = ints([0] * len(slots)), torch.full((2, len(slots)), -1.0, device=DEVICE)
    sample(logits, ints(slots), state, PLAIN, tokens, found[0], found[1])
    assert tokens.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(found[0], expected.logprobs, atol=2e-5, rtol=0)
    torch.testing.assert_close(found[1], plain.entropies_of(expected, state.sampling[slots, 0]), atol=2e-5, rtol=0)
    assert found[1, 2] == 0 and (scale > 3 or (found[1] > 0).sum() == 4)


def test_tokens_come_as_often_as_they_are_probable() -> None:
    probabilities = torch.zeros(20)
    probabilities[[0, 3, 15, 16, 19]] = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    rows = 160
    state = make_state([(1.0, 0, 1, 0)] * rows)
    logits = probabilities.log().repeat(rows, 1).to(DEVICE)
    tokens, logprobs = drawn(logits, state, list(range(rows)))
    torch.testing.assert_close(logprobs.cpu().exp(), probabilities[tokens.cpu().long()], atol=1e-6, rtol=0)
    counts = torch.bincount(tokens.cpu(), minlength=20).double()
    assert counts[probabilities == 0].sum() == 0
    possible = probabilities > 0
    expected = probabilities[possible].double() * rows
    assert ((counts[possible] - expected) ** 2 / expected).sum() < 18.5  # chi² of 4 degrees: one in a thousand is above


def test_the_only_token_left_is_drawn_wherever_it_is() -> None:
    state = make_state([(1.0, 0, 1, 0), (0.0, 0, 1, 0)] * 3)
    logits = torch.full((6, 40), LOWEST, device=DEVICE)
    only = [0, 15, 16, 33, 39, 39]
    logits[range(6), only] = -5.0
    tokens, logprobs = drawn(logits, state, list(range(6)))
    assert tokens.tolist() == only and logprobs.tolist() == [0.0] * 6


# What follows from a draw


def certain(tokens: list[int]) -> torch.Tensor:
    """Logits that leave no choice."""
    logits = torch.full((len(tokens), 40), -40.0, device=DEVICE)
    logits[range(len(tokens)), tokens] = 40.0
    return logits


def test_a_rollout_ends_with_a_stop_token_or_at_its_limit() -> None:
    state = make_state([(1.0, 0, 1, 0)] * 6)
    state.stops[1, 2] = OTHER_STOP
    state.limits[2] = state.lengths[2] + 1
    state.limits[3] = state.lengths[3] + 2
    before = state.lengths.clone()
    tokens, _ = drawn(certain([STOP, OTHER_STOP, 20, 20, OTHER_STOP, 39]), state, [0, 1, 2, 3, 4, 5])
    assert tokens.tolist() == [STOP, OTHER_STOP, 20, 20, OTHER_STOP, 39]
    assert state.tokens[:6].tolist() == tokens.tolist()
    assert state.alive.tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert (state.lengths - before).tolist() == [1, 1, 1, 1, 1, 1, 0]


def test_a_rollout_that_has_ended_draws_nothing_and_changes_nothing() -> None:
    state = make_state([(1.0, 0, 1, 0)] * 3)
    state.alive[1], state.tokens[1], nobody = 0, 33, 3
    before = {name: getattr(state, name).clone() for name in ("tokens", "lengths", "alive")}
    tokens, _ = drawn(certain([20, 21, 22, 23]), state, [1, nobody, 0, nobody])
    assert tokens.tolist() == [-1, -1, 22, -1]
    for name, kept in before.items():
        assert getattr(state, name)[1:].tolist() == kept[1:].tolist(), name
    assert (state.tokens[0], state.lengths[0]) == (22, before["lengths"][0] + 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("is_restricted", [False, True])
@pytest.mark.parametrize("parameters", [(1.0, 0, 1, 0), (0.0, 0, 1, 0), (0.7, 5, 0.9, 0.1)], ids=["random", "greedy", "cut"])
def test_a_row_that_is_not_a_number_ends_its_rollout(
    parameters: tuple[float, float, float, float], is_restricted: bool
) -> None:
    """All of it, one number among others, in the last chunk, or infinity; and a row that leaves nothing to draw."""
    state = make_state([parameters] * 6)
    torch.manual_seed(0)
    logits = torch.randn(6, 40).to(DEVICE)  # the same numbers everywhere: the last row must not draw a stop token
    logits[0], logits[1, 3], logits[2, 39], logits[3, 20], logits[4] = NAN, NAN, NAN, float("inf"), LOWEST
    if is_restricted:
        cut_rows(logits, state, list(range(6)))
    tokens, logprobs = drawn(logits, state, list(range(6)))
    assert logprobs.isfinite().tolist() == [False] * 5 + [True]
    assert state.alive.tolist() == [0, 0, 0, 0, 0, 1, 0]
    assert (tokens >= 0).all()


def test_the_sampler_reports_a_greedy_row_that_is_not_a_number() -> None:
    state = make_state([(0.0, 0, 1, 0)] * 3)
    logits = torch.randn(3, 40, device=DEVICE)
    logits[0], logits[1, 3] = NAN, NAN
    assert by_sampler(logits, state, [0, 1, 2], is_restricted=False).logprobs.isfinite().tolist() == [False, False, True]


# Cutting


CUTS = [
    (1.0, 5, 1, 0), (0.7, 1, 1, 0), (1.0, 0, 0.6, 0), (1.0, 0, 1e-6, 0), (1.0, 0, 1, 0.2), (1.0, 0, 1, 1.0),
    (1.3, 20, 0.77, 0.05), (1.0, 100, 1, 0), (1.0, 0, 1, 0),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["any", "ties", "all the same"])
def test_a_cut_keeps_what_the_sampler_keeps(kind: str) -> None:
    state = make_state(CUTS)
    slots = list(range(len(CUTS)))
    state.floors[::2] = 50  # every other one may not stop yet
    torch.manual_seed(2)
    logits = torch.randn(len(CUTS), 37, device=DEVICE) * 2
    if kind == "ties":
        logits = logits.round()
    elif kind == "all the same":
        logits = torch.zeros_like(logits)
    logits[:, STOP] = 9.0  # the stop token would come first
    before = logits.clone()
    expected = by_sampler(logits, state, slots, is_restricted=True)
    assert expected.allowed is not None
    allowed = cut_rows(logits, state, slots)
    assert torch.equal(allowed, expected.allowed)
    assert torch.equal(logits, before.masked_fill(~allowed, LOWEST))
    assert allowed[::2, STOP].sum() == 0 and allowed[1::2, STOP].all()
    tokens, logprobs = drawn(logits, state, slots)
    assert tokens.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(logprobs, expected.logprobs, atol=2e-6, rtol=0)


def test_ties_are_cut_by_the_lower_id() -> None:
    state = make_state([(1.0, 3, 1, 0), (1.0, 0, 0.5, 0), (1.0, 20, 0.25, 0), (1.0, 0, 1, 0.9)])
    logits = torch.zeros(4, 40, device=DEVICE)
    allowed = cut_rows(logits, state, [0, 1, 2, 3])
    assert [row.nonzero().flatten().tolist() for row in allowed] == [list(range(n)) for n in (3, 20, 5, 40)]


def test_a_greedy_row_is_only_kept_from_stopping() -> None:
    """Its draw is certain whatever else would be cut, so there is nothing to search for."""
    state = make_state([(0.0, 5, 0.5, 0.5), (0.0, 0, 1, 0)])
    state.floors[0], state.stops[0, 1] = 50, OTHER_STOP
    logits = certain([STOP, STOP])
    logits[0, OTHER_STOP], logits[0, 23] = 39.0, 38.0
    allowed = cut_rows(logits, state, [0, 1])
    assert allowed[0].logical_not().nonzero().flatten().tolist() == [STOP, OTHER_STOP] and allowed[1].all()
    assert drawn(logits, state, [0, 1])[0].tolist() == [23, STOP]


def test_a_stop_token_is_allowed_from_the_floor_on() -> None:
    state = make_state([(1.0, 0, 1, 0)] * 3)
    state.lengths[:3] = 10
    state.floors[:3] = ints([9, 10, 11])
    allowed = cut_rows(torch.zeros(3, 40, device=DEVICE), state, [0, 1, 2])
    assert allowed[:, STOP].tolist() == [True, True, False]


def test_a_stop_token_the_head_does_not_have_forbids_nothing() -> None:
    """Least of all a token of the next row."""
    state = make_state([(1.0, 0, 1, 0)] * 2)
    state.floors[0], state.stops[0, 1] = 50, 40 + OTHER_STOP
    logits = torch.zeros(2, 40, device=DEVICE)
    allowed = cut_rows(logits, state, [0, 1])
    assert allowed.logical_not().nonzero().tolist() == [[0, STOP]] and logits[1].isfinite().all()


def test_what_is_restricted_stays_out_of_reach_of_a_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capped, minus infinity would be minus the cap, which can be drawn."""
    monkeypatch.setattr(sampling, "_CHUNK", 64)
    rows, softcap = 8, 1.0
    state = make_state([(2.0, 2, 1, 0)] * rows)
    logits = torch.arange(40.0, device=DEVICE).repeat(rows, 1) / 40
    scaling = Scaling(divisor=None, factor=None, softcap=softcap)
    allowed = cut_rows(logits, state, list(range(rows)), scaling=scaling)
    tokens, logprobs = drawn(logits, state, list(range(rows)), scaling=scaling)
    assert allowed.sum() == 2 * rows and allowed[:, 38:].all()
    assert set(tokens.tolist()) <= {38, 39}
    capped = [math.tanh(number / 40) / 2 for number in (38, 39)]
    log_total = math.log(sum(map(math.exp, capped)))
    expected = [capped[token - 38] - log_total for token in tokens.tolist()]
    np.testing.assert_allclose(logprobs.cpu().numpy(), expected, atol=2e-6)
