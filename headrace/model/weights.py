"""A model's tensors by name, their checksums, and a second set of them that receives new weights."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.errors import SyncError
from headrace.model.arena import Arena, held_tensors, lay_out
from headrace.records import Manifest, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from headrace.model.arena import Slot
    from headrace.records import Array, WeightUpdate


_WORDS_ON_CPU = 1 << 17  # stays in the CPU's cache: 25 times as fast as parts of gigabytes
_WORDS_ON_GPU = 1 << 26
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


def checksum(tensor: Tensor) -> int:
    """Σ word · (2 · place + 1) over a tensor's 64-bit words, modulo 2**64. One flipped bit, or two swapped parts, change it."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    if not flat.numel():
        return 0
    words = flat.view(torch.int64)
    size = min(_WORDS_ON_GPU if words.is_cuda else _WORDS_ON_CPU, words.numel())
    places = torch.arange(size, device=words.device) * 2 + 1
    sums = []
    for start in range(0, words.numel(), size):
        part = words[start : start + size]
        sums.append((part * places[: part.numel()]).sum() + 2 * start * part.sum())  # integers wrap at 2**64
    return int(torch.stack(sums).sum()) & 0xFFFFFFFFFFFFFFFF  # all 64 bits: a flipped sign shows only in the highest


def make_manifest(tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """Names, dtypes, shapes and checksums of what a sender holds."""
    named = dict(tensors)
    return describe(named).with_checksums(np.asarray([checksum(tensor) for tensor in named.values()], dtype=np.uint64))


def describe(tensors: Mapping[str, Tensor]) -> Manifest:
    """Names, dtypes and shapes; checksums are left at 0."""
    return Manifest.of(
        TensorInfo(
            name=name,
            shape=tuple(tensor.shape),
            dtype=_name(tensor.dtype),
            num_bytes=tensor.numel() * tensor.element_size(),
            checksum=0,
        )
        for name, tensor in tensors.items()
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Inspector:
    """Checksums of arenas of one layout, and their first tensor with NaN or infinity; on a GPU, one launch per dtype."""

    def __init__(self, arena: Arena) -> None:
        self._slots = arena.slots
        self._look: Callable[[Arena], tuple[Array, str | None]] = self._look_on_cpu
        if arena.device.type == "cuda":
            from headrace.model.checksum_kernel import FlatTables

            self._tables = FlatTables(arena)
            self._look = self._look_on_gpu

    def look(self, arena: Arena) -> tuple[Array, str | None]:
        """(checksums [tensors] in the order of the slots, name of the first tensor with NaN or infinity, or None)."""
        return self._look(arena)

    def _look_on_cpu(self, arena: Arena) -> tuple[Array, str | None]:
        sums = np.asarray([checksum(view) for view in arena.views.values()], dtype=np.uint64)
        return sums, _first_odd(arena)

    def _look_on_gpu(self, arena: Arena) -> tuple[Array, str | None]:
        sums, is_odd = self._tables.inspect(arena)
        first = int(is_odd.argmax()) if is_odd.any() else None
        return sums, None if first is None else list(self._slots)[first]


def inspect_arena(arena: Arena) -> tuple[Manifest, str | None]:
    """An arena's manifest, and the name of the first tensor with NaN or infinity."""
    sums, odd = Inspector(arena).look(arena)
    return describe(arena.views).with_checksums(sums), odd


def _first_odd(arena: Arena) -> str | None:
    """The first tensor with NaN or infinity; checks one by one only if their common buffer may have some."""
    suspected = {dtype for dtype, flat in arena.flat.items() if dtype in _CHECKED_NUMBERS and not _is_surely_finite(flat)}
    for name, tensor in arena.views.items():
        if tensor.dtype in suspected and tensor.numel() and not _is_finite(tensor):
            return name
    return None


def _is_surely_finite(flat: Tensor) -> bool:
    """By the sum, the fastest pass over memory: False if any number is not finite, and perhaps for large finite ones. A float16
    sum overflows with ordinary weights, so float16 takes the exact check."""
    return _is_finite(flat) if flat.dtype == torch.float16 and flat.numel() else bool(flat.sum().isfinite())


def _is_finite(tensor: Tensor) -> bool:
    """Exact: the minimum and maximum of a tensor with a NaN are NaN."""
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() & high.isfinite())


class StagingBuffer:
    """Where a transport writes new weights: the second set of tensors, as bytes in the layout of the update's manifest."""

    def __init__(self, arena: Arena, *, running: Arena, check: Callable[[], None]) -> None:
        self._arena, self._running = arena, running
        self.num_bytes, self.views = arena.num_bytes, arena.views
        self.check = check  # raises if the receiver has given up the update

    def write(self, start: int, piece: Tensor) -> None:
        """Copy bytes to offset `start`; the caller may then reuse a `piece` in host memory."""
        self.check()
        memory = self._arena.memory
        if not 0 <= start <= start + len(piece) <= len(memory):
            raise SyncError(f"{len(piece)} bytes arrived for place {start} of {len(memory)}")
        memory[start : start + len(piece)].copy_(piece)
        if memory.is_cuda and not piece.is_cuda:  # a piece on a GPU is not reused before the receipt
            torch.cuda.current_stream(memory.device).synchronize()

    def take_running(self) -> list[Tensor]:
        """Start from the running weights; returns the flat buffers to change, one per dtype, sorted by its name."""
        if self._arena.slots == self._running.slots:
            self._arena.copy_from(self._running)
        else:
            for name, view in self._arena.views.items():
                view.copy_(self._running.views[name])
        return [self._arena.flat[dtype] for dtype in sorted(self._arena.flat, key=str)]


class StagedWeights:
    """A second set of a model's tensors: filled and checked beside the running set, then exchanged for it.

    Filling may run in another thread while the model computes. On a CPU the exchange swaps memory and copies nothing; on a GPU
    it overwrites the running set in place, so that CUDA graphs, which hold its addresses, stay valid. The running set is
    `arena`, or one made here; the first update allocates the second set.
    """

    def __init__(self, model: nn.Module, *, arena: Arena | None = None, in_place: bool | None = None) -> None:
        self.arena = Arena.adopt(model) if arena is None else arena  # always what the model runs on
        self._in_place = self.arena.device.type == "cuda" if in_place is None else in_place
        self._staging: Arena | None = None
        self._inspector: Inspector | None = None
        self._own = describe(self.arena.views)
        self._laid_out: tuple[Manifest, dict[str, Slot] | None] | None = None  # last manifest, and its slots if unlike ours
        self._is_whole = False
        self._is_given_up = False
        self._fill_stream = _FillStream(self.arena.device)

    @property
    def num_bytes(self) -> int:
        """Memory of the second set, taken from the first update on."""
        return self.arena.num_bytes

    @torch.no_grad()
    def receive(self, update: WeightUpdate, bring: Callable[[StagingBuffer], None]) -> Manifest:
        """Call `bring` to write an update's bytes, then check what arrived against the manifest; returns the receipt."""
        self._is_whole = self._is_given_up = False
        slots = self._slots_of(update)
        with self._fill_stream.working():
            staging = self._staging = self._staging or self.arena.like()
            arena = staging if slots is None else Arena(slots, device=staging.device)
            bring(StagingBuffer(arena, running=self.arena, check=lambda: self._check_wanted(update)))
            self._check_arena(update)  # on a GPU the copy may still be in flight
            if arena is not staging:  # tensors that share memory here are sent separately
                for name, view in arena.views.items():
                    staging.views[name].copy_(view)
            inspector = self._inspector = self._inspector or Inspector(staging)
            sums, odd = inspector.look(staging)
        receipt = self._own.with_checksums(sums)
        self._check_receipt(receipt, update)
        if odd is not None:
            raise WeightError(f"version {update.version}: tensor {odd!r} holds NaN or infinity, and was sent so")
        self._is_whole = True
        return receipt

    def fill(self, tensors: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> Manifest:
        """`receive` from tensors by name."""

        def bring(incoming: StagingBuffer) -> None:
            expected = {info.name: info for info in update.manifest}
            arrived = set()
            for name, tensor in tensors:
                _check_like(name, tensor, expected, update)
                incoming.views[name].copy_(tensor)
                arrived.add(name)
            _check_none_missing(expected.keys() - arrived, update)

        return self.receive(update, bring)

    def give_up(self) -> None:
        """Make an update being received in another thread fail at its next piece."""
        self._is_given_up = True

    def exchange(self) -> None:
        """Make the model run what was filled."""
        if self._staging is None or not self._is_whole:
            raise WeightError("no weights lie ready: the last fill failed, or there was none")
        if self._in_place:
            self.arena.copy_from(self._staging)
            self._fill_stream.follow()
        else:
            self.arena.exchange(self._staging)

    def release(self) -> None:
        """Free the second set; the next update allocates it again."""
        self._fill_stream.settle()
        self._staging, self._is_whole = None, False

    def _slots_of(self, update: WeightUpdate) -> dict[str, Slot] | None:
        """The slots of an update's tensors in its bytes, or None if they equal ours."""
        manifest = update.manifest
        if self._laid_out is None or not self._laid_out[0].is_like(manifest):
            self._check_manifest(update)
            slots = lay_out(manifest)
            self._laid_out = manifest, None if slots == self.arena.slots else slots
        return self._laid_out[1]

    def _check_wanted(self, update: WeightUpdate) -> None:
        if self._is_given_up:
            raise SyncError(f"version {update.version} was given up here")

    def _check_arena(self, update: WeightUpdate) -> None:
        strayed = self.arena.strayed() if self._in_place else None
        if strayed is not None:
            raise WeightError(
                f"version {update.version}: the model's tensor {strayed!r} is not in its arena any more, so that new weights "
                f"would not reach it; adopt the model after it is moved, not before"
            )

    def _check_manifest(self, update: WeightUpdate) -> None:
        """Check before copying that the update's tensors are this model's."""
        if update.manifest.is_like(self._own):
            return
        own = {info.name: info for info in self._own}
        for info in update.manifest:
            if info.name not in own:
                raise WeightError(f"version {update.version}: tensor {info.name!r} is not one this model holds")
            held = own[info.name]
            if (info.shape, info.dtype, info.num_bytes) != (held.shape, held.dtype, held.num_bytes):
                raise WeightError(
                    f"version {update.version}: tensor {info.name!r} is {info.dtype} {list(info.shape)} there, "
                    f"and {held.dtype} {list(held.shape)} in this model"
                )
        _check_none_missing(own.keys() - set(update.manifest.names), update)

    def _check_receipt(self, receipt: Manifest, update: WeightUpdate) -> None:
        if receipt == update.manifest:
            return
        expected = {info.name: info for info in update.manifest}
        for info in receipt:
            if info != expected[info.name]:
                raise WeightError(f"version {update.version}: tensor {info.name!r} differs from what was sent")


def _check_like(name: str, tensor: Tensor, expected: dict[str, TensorInfo], update: WeightUpdate) -> None:
    """Check a tensor against the manifest: a copy would silently convert dtypes and broadcast shapes."""
    info = expected.get(name)
    if info is None:
        raise WeightError(f"version {update.version}: tensor {name!r} arrived and was not announced")
    if (_name(tensor.dtype), tuple(tensor.shape)) != (info.dtype, info.shape):
        raise WeightError(
            f"version {update.version}: tensor {name!r} was announced as {info.dtype} {list(info.shape)} and arrived as "
            f"{_name(tensor.dtype)} {list(tensor.shape)}"
        )


def _check_none_missing(missing: set[str], update: WeightUpdate) -> None:
    if missing:
        raise WeightError(f"version {update.version}: {len(missing)} tensors did not arrive, first {min(missing)!r}")


class _FillStream:
    """Orders filling and exchanging on a GPU; filling and decode steps do not queue behind each other, having a stream each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._exchanged: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work queued within waits for the last exchange and for this thread's earlier work; it is done at the exit."""
        if self._device.type != "cuda":
            yield
            return
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._exchanged is not None:
            stream.wait_event(self._exchanged)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()

    def follow(self) -> None:
        """Called when an exchange is queued: the next fill must not overwrite what it still reads."""
        if self._device.type == "cuda":
            self._exchanged = torch.cuda.current_stream(self._device).record_event()

    def settle(self) -> None:
        """Wait until no exchange reads the second set."""
        if self._exchanged is not None:
            self._exchanged.synchronize()
