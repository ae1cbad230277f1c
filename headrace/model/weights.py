"""A model's tensors by name, their checksums, and a second set of them that receives new weights."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from functools import cache, partial
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.errors import SyncError
from headrace.model.arena import Arena, held_tensors, lay_out, side_stream
from headrace.records import Manifest, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from headrace.model.arena import Layout, Slot
    from headrace.records import Array, WeightUpdate

    Inspect = Callable[[Arena], tuple[Array, str | None]]
    """An arena's checksums [tensors] in the order of the slots, and the name of its first tensor with NaN or infinity."""

_WORDS = 1 << 17  # stays in a CPU's cache: 25 times as fast as parts of gigabytes
_CHECKED_NUMBERS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # must be finite; narrower have no CPU ops


class WeightError(SyncError):
    """Weights did not arrive as they were sent; the receiver stays on its old version."""


def check_order(update: WeightUpdate, *, lineage: str, version: int) -> None:
    """Raise if the update is older than the version held, or a delta from another version."""
    held = version if update.lineage == lineage else None
    if held is not None and update.version < held:
        raise WeightError(f"version {update.version} came late: version {held} is held already")
    if update.base_version is not None and held != update.base_version:
        has = f"version {version} of life {lineage!r} is held" if lineage else "nothing is held"
        raise WeightError(f"version {update.version} is a difference from version {update.base_version}, and {has}")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer, detached, once, tied ones under their first name."""
    for name, tensor in held_tensors(model):
        yield name, tensor.detach()


def checksum(tensor: Tensor, *, first_word: int = 0) -> int:
    """Σ word · (2 · place + 1) over a tensor's 64-bit words, modulo 2**64. One flipped bit, or two swapped parts, change it.
    `first_word`: the place of the first one, if the tensor is a range of a larger one, whose checksum is the sum of all its
    ranges'. On a CPU: a GPU has no dot product of integers."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    if not flat.numel():
        return 0
    words, total = flat.view(torch.int64), 0
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        factors, before = _factors(_WORDS)[: part.numel()], first_word + start
        total += int(torch.dot(part, factors))  # integers wrap at 2**64
        total += 2 * before * int(part.sum()) if before else 0
    return total & 0xFFFFFFFFFFFFFFFF  # all 64 bits: a flipped sign shows only in the highest


@cache
def _factors(count: int) -> Tensor:
    """2 · place + 1; made for each tensor, it would take longer than the sum."""
    return torch.arange(count) * 2 + 1


def describe(tensors: Mapping[str, Tensor] | Mapping[str, Slot]) -> Manifest:
    """Names, dtypes and shapes, of tensors or of their slots; checksums are left at 0."""
    return Manifest.of(
        TensorInfo(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            num_bytes=math.prod(tensor.shape) * tensor.dtype.itemsize,
        )
        for name, tensor in tensors.items()
    )


def make_inspector(arena: Arena, *, first_words: Mapping[str, int] = MappingProxyType({})) -> Inspect:
    """For arenas of one layout, on one device; on a GPU, it is one launch per dtype. `first_words`: of tensors that are a range
    of a larger one, the place of their first 64-bit word in it."""
    if arena.device.type == "cuda":
        from headrace.model.checksum_kernel import FlatTables

        return FlatTables(arena, first_words).inspect
    return partial(_inspect, first_words=first_words)


def _inspect(arena: Arena, *, first_words: Mapping[str, int]) -> tuple[Array, str | None]:
    found = [checksum(view, first_word=first_words.get(name, 0)) for name, view in arena.views.items()]
    sums = np.asarray(found, dtype=np.uint64)
    # A sum is the fastest pass over memory, and finite only if all numbers are. It may overflow, and in float16 does so with
    # ordinary weights: tensors that may hold NaN or infinity are looked at one by one.
    numbers = {dtype: flat for dtype, flat in arena.flat.items() if dtype in _CHECKED_NUMBERS}
    suspected = {dtype for dtype, flat in numbers.items() if dtype == torch.float16 or not flat.sum().isfinite()}
    for name, tensor in arena.views.items():
        if tensor.dtype in suspected and tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            return sums, name
    return sums, None


class ByteTarget:
    """Where a transport writes an image of tensors: runs of memory, each at its place among the image's bytes."""

    def __init__(
        self, runs: Iterable[tuple[int, Tensor]], *, num_bytes: int, views: Mapping[str, Tensor], check: Callable[[], None]
    ) -> None:
        """`check` raises if the receiver has given up the update."""
        self.num_bytes, self.views, self.check = num_bytes, views, check
        self._runs = sorted(runs, key=itemgetter(0))
        self._stops = [start + len(run) for start, run in self._runs]

    def write(self, start: int, piece: Tensor) -> None:
        """Copy bytes to offset `start`; the caller may then reuse a `piece` in host memory."""
        self.check()
        stop = start + len(piece)
        if not 0 <= start <= stop <= self.num_bytes:
            raise SyncError(f"{len(piece)} bytes arrived for place {start} of {self.num_bytes}")
        for at, run in self._runs[bisect_right(self._stops, start) :]:
            if at >= stop:
                break
            low, high = max(at, start), min(at + len(run), stop)
            run[low - at : high - at].copy_(piece[low - start : high - start])
        device = self._runs[0][1].device
        if device.type == "cuda" and not piece.is_cuda:  # a piece on a GPU is not reused before the receipt
            torch.cuda.current_stream(device).synchronize()


class StagingBuffer(ByteTarget):
    """The second set of tensors, as bytes in the layout of the update's manifest."""

    def __init__(self, arena: Arena, *, running: Arena, check: Callable[[], None]) -> None:
        super().__init__([(0, arena.memory)], num_bytes=arena.num_bytes, views=arena.views, check=check)
        self._arena, self._running = arena, running

    def take_running(self) -> list[Tensor]:
        """Start from the running weights; returns the flat buffers to change, one per dtype, sorted by its name."""
        if self._arena.slots == self._running.slots:
            self._arena.copy_from(self._running)
        else:
            for name, view in self._arena.views.items():
                view.copy_(self._running.views[name])
        return self._arena.flats


class StagedWeights:
    """A second set of a model's tensors: filled and checked beside the running set, then exchanged for it.

    Filling may run in another thread while the model computes. On a CPU the exchange swaps memory and copies nothing; on a GPU
    it overwrites the running set in place, so that CUDA graphs, which hold its addresses, stay valid. The running set is
    `arena`, or one made here; the first update allocates the second set.
    """

    def __init__(self, model: nn.Module, *, arena: Arena | None = None, in_place: bool | None = None) -> None:
        self.arena = Arena.adopt(model) if arena is None else arena  # always what the model runs on
        self._in_place = self.arena.device.type == "cuda" if in_place is None else in_place
        self._own = describe(self.arena.slots)
        self._own_slots = lay_out(self._own)  # as they are sent: unlike the arena's, if tensors share memory there
        if self._own_slots == self.arena.slots:
            self._own_slots = self.arena.slots  # compared quickly with every update
        self._staging: Arena | None = None
        self._inspect: Inspect | None = None
        self._is_whole = self._is_given_up = False
        self._fill_stream: torch.cuda.Stream | None = None
        self._exchanged: torch.cuda.Event | None = None

    @torch.no_grad()
    def receive(self, update: WeightUpdate, bring: Callable[[StagingBuffer], None]) -> Manifest:
        """Call `bring` to write an update's bytes, then check what arrived against the manifest; returns the receipt."""
        self._is_whole = self._is_given_up = False
        slots = self._slots_of(update)
        with self._filling():
            staging = self._staging = self._staging or self.arena.like()
            arena = staging if slots == staging.slots else Arena(slots, device=staging.device)
            bring(StagingBuffer(arena, running=self.arena, check=lambda: self._check_wanted(update)))
            strayed = self.arena.strayed() if self._in_place else None  # on a GPU the copy may still be in flight
            if strayed is not None:
                raise WeightError(
                    f"version {update.version}: the model's tensor {strayed!r} is not in its arena any more, so that new "
                    f"weights would not reach it; adopt the model after it is moved, not before"
                )
            if arena is not staging:
                for name, view in arena.views.items():
                    staging.views[name].copy_(view)
            inspect = self._inspect = self._inspect or make_inspector(staging)
            sums, odd = inspect(staging)
        receipt = self._own.with_checksums(sums)
        if receipt != update.manifest:
            sent = {info.name: info for info in update.manifest}
            for info in receipt:
                if info != sent[info.name]:
                    raise WeightError(f"version {update.version}: tensor {info.name!r} differs from what was sent")
        if odd is not None:
            raise WeightError(f"version {update.version}: tensor {odd!r} holds NaN or infinity, and was sent so")
        self._is_whole = True
        return receipt

    def give_up(self) -> None:
        """Make an update being received in another thread fail at its next piece."""
        self._is_given_up = True

    def exchange(self, *, keep: bool = False) -> Arena | None:
        """Make the model run what was filled. `keep`: returns the set that ran before, which stays as it is from now on."""
        if self._staging is None or not self._is_whole:
            raise WeightError("no weights lie ready: the last fill failed, or there was none")
        if not self._in_place:
            self.arena.exchange(self._staging)
            replaced = self._staging if keep else None
            self._staging = None if keep else self._staging  # the next update allocates another
            return replaced
        replaced = self.arena.like() if keep else None
        if replaced is not None:
            replaced.copy_from(self.arena)
        self.arena.copy_from(self._staging)
        if self.arena.device.type == "cuda":  # the next fill must not overwrite what the copy still reads
            self._exchanged = torch.cuda.current_stream(self.arena.device).record_event()
        return replaced

    def release(self) -> None:
        """Free the second set; the next update allocates it again."""
        if self._exchanged is not None:
            self._exchanged.synchronize()
        self._staging, self._is_whole = None, False

    @contextlib.contextmanager
    def _filling(self) -> Iterator[None]:
        """On a GPU, work queued within has its own stream, so that it and decode steps do not queue behind each other. It waits
        for the last exchange and for this thread's earlier work, and is done at the exit."""
        with side_stream(self.arena.device, self._fill_stream) as stream:
            self._fill_stream = stream
            if stream is not None and self._exchanged is not None:
                stream.wait_event(self._exchanged)
            try:
                yield
            finally:
                if stream is not None:
                    stream.synchronize()

    def _check_wanted(self, update: WeightUpdate) -> None:
        if self._is_given_up:
            raise SyncError(f"version {update.version} was given up here")

    def _slots_of(self, update: WeightUpdate) -> Layout:
        """Where an update's tensors lie in its bytes. Checks before anything is copied that they are this model's."""
        if update.manifest.is_like(self._own):
            return self._own_slots
        held = {info.name: info for info in self._own}
        for info in update.manifest:
            own = held.pop(info.name, None)
            if own is None:
                raise WeightError(f"version {update.version}: tensor {info.name!r} is not one this model holds")
            if (info.shape, info.dtype, info.num_bytes) != (own.shape, own.dtype, own.num_bytes):
                raise WeightError(
                    f"version {update.version}: tensor {info.name!r} is {info.dtype} {list(info.shape)} there, "
                    f"and {own.dtype} {list(own.shape)} in this model"
                )
        if held:
            raise WeightError(f"version {update.version}: {len(held)} tensors are missing, first {min(held)!r}")
        return lay_out(update.manifest)
