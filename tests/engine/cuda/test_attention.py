"""The attention kernels against a softmax written out for one query row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton.language as tl
from kernel_device import DEVICE, ints
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from headrace.engine.native.cuda.attention import decode_attend, prefill_attend

BLOCK = 8
TABLE_WIDTH = 18
LENGTHS = [141, 1, 17, 8, 33]
"""Of each slot, its new token included: within one tile, at the edge of a block, over several tiles."""
NOBODY = len(LENGTHS)
ROW_SLOTS = [3, NOBODY, 0, 1, 4, 2, NOBODY]


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    splits: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def arguments(self) -> dict[str, object]:
        return {"scale": self.dim**-0.5, "softcap": self.softcap, "window": self.window, "block": BLOCK}


CASES = {
    "plain": Case(),
    "split": Case(splits=3),
    "more splits than tiles": Case(splits=8),
    "window": Case(window=11),
    "window of one": Case(window=1, splits=2),
    "wide window": Case(window=1000),
    "window, split": Case(window=20, splits=3),
    "softcap": Case(softcap=2.0),
    "sinks": Case(has_sinks=True),
    "sinks, window, split": Case(has_sinks=True, window=20, splits=4),
    "one key head, odd dims": Case(heads=3, kv_heads=1, dim=12, value_dim=20),
    "large groups": Case(heads=36, kv_heads=2, dim=24, value_dim=16, splits=2),
    "no groups": Case(heads=3, kv_heads=3),
    "wide heads": Case(heads=2, kv_heads=1, dim=72, value_dim=64),
    "bfloat16 cache": Case(dtype=torch.bfloat16),
    "float16 cache": Case(dtype=torch.float16),
    "bfloat16 cache, all at once": Case(dtype=torch.bfloat16, has_sinks=True, softcap=5.0, window=20, splits=2),
}


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 numbers as their bits, and its matrix product multiplies those; here, what they mean."""
    plain = InterpreterBuilder.create_dot

    def meant(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, left, right, *rest: plain(self, meant(left), meant(right), *rest)
    )


class Paged:
    """A cache whose blocks lie anywhere; whatever belongs to nobody is NaN, so that reading it shows."""

    def __init__(self, case: Case, *, cached: list[int]) -> None:
        torch.manual_seed(0)
        num_blocks = len(LENGTHS) * TABLE_WIDTH + 1
        rows = num_blocks * BLOCK
        self.case = case
        self.keys = torch.full((rows, case.kv_heads, case.dim), float("nan"), dtype=case.dtype, device=DEVICE)
        self.values = torch.full((rows, case.kv_heads, case.value_dim), float("nan"), dtype=case.dtype, device=DEVICE)
        order = torch.randperm(num_blocks - 1) + 1
        self.table = torch.zeros((len(LENGTHS) + 1, TABLE_WIDTH), dtype=torch.int32, device=DEVICE)
        self.table[:NOBODY] = order.view(len(LENGTHS), TABLE_WIDTH).to(self.table)
        self.sinks = torch.randn(case.heads, device=DEVICE) * 2 if case.has_sinks else None
        for slot, length in enumerate(cached):
            places = self.places(slot, 0, length)
            self.keys[places] = torch.randn(length, case.kv_heads, case.dim).to(self.keys)
            self.values[places] = torch.randn(length, case.kv_heads, case.value_dim).to(self.values)

    def places(self, slot: int, start: int, stop: int) -> torch.Tensor:
        at = torch.arange(start, stop, device=DEVICE)
        return self.table[slot, at // BLOCK].long() * BLOCK + at % BLOCK

    def expected(self, query: torch.Tensor, slot: int, position: int) -> torch.Tensor:
        """[heads, value dim] of one token, of the keys and values in the cache up to its own."""
        case = self.case
        first = 0 if case.window is None else max(0, position + 1 - case.window)
        places = self.places(slot, first, position + 1)
        out = torch.empty(case.heads, case.value_dim, device=DEVICE)
        for head in range(case.heads):
            kv_head = head // (case.heads // case.kv_heads)
            scores = self.keys[places, kv_head].float() @ query[head].float() * case.dim**-0.5
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks[head : head + 1]])
            shares = torch.softmax(scores, dim=0)[: len(places)]
            out[head] = shares @ self.values[places, kv_head].float()
        return out


def close(left: torch.Tensor, right: torch.Tensor, case: Case) -> None:
    tolerance = 1e-5 if case.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(left.float(), right, atol=tolerance, rtol=tolerance)


def new_rows(case: Case, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value in float32, as views whose heads are not next to each other: that is how a model gives them.

    Keys and values can be cached without rounding: the interpreter rounds in a way of its own.
    """
    sizes = [(case.heads, case.dim), (case.kv_heads, case.dim), (case.kv_heads, case.value_dim)]
    query, key, value = (torch.randn(heads, rows, dim, device=DEVICE).transpose(0, 1) for heads, dim in sizes)
    return query, key.to(case.dtype).float(), value.to(case.dtype).float()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_decode_step_reads_what_is_cached_and_writes_what_is_new(case: Case) -> None:
    paged = Paged(case, cached=[length - 1 for length in LENGTHS])
    keys, values = paged.keys.clone(), paged.values.clone()
    rows = len(ROW_SLOTS)
    query, key, value = new_rows(case, rows)
    positions = [0 if slot == NOBODY else LENGTHS[slot] - 1 for slot in ROW_SLOTS]
    out = decode_attend(
        query, key, value, paged.keys, paged.values, paged.table, ints(ROW_SLOTS), ints(positions), paged.sinks,
        splits=case.splits, tile=16, **case.arguments,
    )  # fmt: skip
    assert out.shape == (rows, case.heads, case.value_dim) and out.dtype == case.dtype
    for row, (slot, position) in enumerate(zip(ROW_SLOTS, positions, strict=True)):
        if slot != NOBODY:
            place = paged.places(slot, position, position + 1)
            keys[place], values[place] = key[row].to(keys), value[row].to(values)
            close(out[row], paged.expected(query[row], slot, position), case)
    assert torch.equal(paged.keys[BLOCK:].isnan(), keys[BLOCK:].isnan())  # the first block is everybody's scratch
    assert torch.equal(paged.keys[BLOCK:].nan_to_num(), keys[BLOCK:].nan_to_num())
    assert torch.equal(paged.values[BLOCK:].nan_to_num(), values[BLOCK:].nan_to_num())
    assert paged.keys[1:BLOCK].isnan().all() and paged.values[1:BLOCK].isnan().all()
    assert out[ROW_SLOTS.index(NOBODY)].isfinite().all()


CHUNKS = [(0, 101, 141), (2, 0, 17), (4, 15, 20), (1, 0, 1)]
"""(slot, start, stop): after a cached beginning that all rows see, from the beginning, within a block, one token."""


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.splits == 1],
    ids=[name for name, case in CASES.items() if case.splits == 1],
)
def test_a_prompt_sees_what_is_cached_and_itself(case: Case) -> None:
    tile_rows = 16
    paged = Paged(case, cached=[101, 0, 0, 8, 15])
    rows = sum(stop - start for _, start, stop in CHUNKS) + 2  # two belong to nobody
    query, key, value = new_rows(case, rows)
    owners = [(slot, position) for slot, start, stop in CHUNKS for position in range(start, stop)]
    places = torch.cat([paged.places(slot, start, stop) for slot, start, stop in CHUNKS] + [ints([0, 0], torch.int64)])
    tiles, first = [(0, 0, 0, 0)], 0
    for slot, start, stop in CHUNKS:
        for begin in range(start, stop, tile_rows):
            tiles.append((slot, first + begin - start, min(tile_rows, stop - begin), begin))
        first += stop - start
    tiles.append((0, 0, 0, 0))
    out = prefill_attend(
        query,
        key,
        value,
        paged.keys,
        paged.values,
        paged.table,
        places,
        ints(tiles),
        paged.sinks,
        rows=tile_rows,
        **case.arguments,
    )
    assert torch.equal(paged.keys[places[:-2]], key[:-2].to(case.dtype))
    assert torch.equal(paged.values[places[:-2]], value[:-2].to(case.dtype))
    assert paged.keys[1:BLOCK].isnan().all() and paged.keys[paged.places(1, 1, BLOCK)].isnan().all()
    assert out.dtype == case.dtype
    for row, (slot, position) in enumerate(owners):
        close(out[row], paged.expected(query[row], slot, position), case)
    assert (out[-2:] == 0).all()  # what nobody asked for is finite, and the same every time


def test_a_softcap_holds_for_scores_of_any_size() -> None:
    """Its tanh is made of exponentials, which overflow if made carelessly."""
    case = Case(softcap=5.0)
    paged = Paged(case, cached=[length - 1 for length in LENGTHS])
    query, key, value = (torch.randn(1, heads, 16, device=DEVICE) for heads in (4, 2, 2))
    query *= 1e4
    out = decode_attend(
        query,
        key,
        value,
        paged.keys,
        paged.values,
        paged.table,
        ints([0]),
        ints([140]),
        None,
        splits=1,
        tile=64,
        **case.arguments,
    )
    close(out[0], paged.expected(query[0], 0, 140), case)
