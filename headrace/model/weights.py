"""Tensors of a model by name, their checksums, and a second set of them that new weights are filled into."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from headrace.model.arena import Arena, held_tensors
from headrace.types import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    from headrace.types import WeightUpdate


_WORDS_ON_CPU = 1 << 17
"""A part that stays in the cache: 25 times as fast as parts of gigabytes."""
_WORDS_ON_GPU = 1 << 26
_CHECKED_NUMBERS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Dtypes whose numbers must be finite; torch has no arithmetic on a CPU for smaller ones."""


class WeightError(RuntimeError):
    """Weights did not arrive as they were sent; whoever receives them stays on its old version."""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer once, tied ones under their first name."""
    for name, tensor in held_tensors(model):
        yield name, tensor.detach()


def checksum(tensor: Tensor) -> int:
    """Of a tensor's bits: a sum of its 64-bit words, each times an odd number of its own place, modulo 2**64.

    One changed bit, or two equal-sized parts exchanged, changes it.
    """
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
    return int(torch.stack(sums).sum()) & 0x7FFFFFFFFFFFFFFF


def describe(name: str, tensor: Tensor) -> TensorInfo:
    return _info(name, tensor, checksum(tensor))


def _info(name: str, tensor: Tensor, total: int) -> TensorInfo:
    return TensorInfo(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        num_bytes=tensor.numel() * tensor.element_size(),
        checksum=total,
    )


def make_manifest(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorInfo, ...]:
    """What a sender holds."""
    return tuple(describe(name, tensor) for name, tensor in tensors)


def inspect_arena(arena: Arena) -> tuple[tuple[TensorInfo, ...], str | None]:
    """What an arena holds, and the first of its tensors with a number that is not finite; on a GPU one launch per dtype."""
    if arena.device.type != "cuda":
        return make_manifest(arena.views.items()), _first_odd(arena)
    from headrace.model.checksum_kernel import inspect_flat

    totals: dict[str, int] = {}
    is_finite: dict[str, bool] = {}
    for dtype, flat in arena.flat.items():
        slots = {name: slot for name, slot in arena.slots.items() if slot.dtype == dtype}
        found = inspect_flat(flat, [(slot.start, slot.stop) for slot in slots.values()])
        totals.update(zip(slots, found[0], strict=True))
        is_finite.update(zip(slots, found[1], strict=True))
    receipt = tuple(_info(name, tensor, totals[name]) for name, tensor in arena.views.items())
    return receipt, next((name for name in arena.views if not is_finite[name]), None)


def _first_odd(arena: Arena) -> str | None:
    """The first tensor that holds NaN or infinity: they are looked at one by one only where their buffer may have some."""
    suspected = {dtype for dtype, flat in arena.flat.items() if dtype in _CHECKED_NUMBERS and not _is_surely_finite(flat)}
    for name, tensor in arena.views.items():
        if tensor.dtype in suspected and tensor.numel() and not _is_finite(tensor):
            return name
    return None


def _is_surely_finite(flat: Tensor) -> bool:
    """True only where every number of a buffer is finite. Large finite numbers may give False.

    One NaN or infinity makes the whole sum so, and a sum is the fastest pass over memory there is. In float16 the sum of
    ordinary weights overflows, so there the next fastest answers.
    """
    return _is_finite(flat) if flat.dtype == torch.float16 and flat.numel() else bool(flat.sum().isfinite())


def _is_finite(tensor: Tensor) -> bool:
    """Exactly; the extremes of what holds a NaN are NaN."""
    low, high = torch.aminmax(tensor)
    return bool(low.isfinite() & high.isfinite())


class SpareWeights:
    """A second set of a model's tensors: filled and checked beside the running one, then exchanged for it.

    Filling may run in another thread while the model computes; the exchange itself touches no element on CPU. On a GPU the
    running set is overwritten in place, so that whatever holds its addresses stays valid (CUDA graphs do).

    The running set is the model's arena: one it already has, or one that is made here. The second set is made by the first
    `fill`.
    """

    def __init__(self, model: nn.Module, *, arena: Arena | None = None, in_place: bool | None = None) -> None:
        self.arena = Arena.adopt(model) if arena is None else arena
        """What the model runs on, before an exchange and after."""
        self._in_place = self.arena.device.type == "cuda" if in_place is None else in_place
        self._staging: Arena | None = None
        self._is_whole = False
        self._beside = _Beside(self.arena.device)

    @property
    def num_bytes(self) -> int:
        """Memory the second set takes from the first `fill` on."""
        return self.arena.num_bytes

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> tuple[TensorInfo, ...]:
        """Copy an update in and hash what is now held; raises where that is not what was sent. The receipt."""
        self._is_whole = False
        self._check_arena(update)
        expected = self._check_manifest(update)
        with self._beside.working():
            staging = self._staging = self._staging or self.arena.like()
            arrived = set()
            for name, tensor in tensors:
                _check_like(name, tensor, expected, update)
                staging.views[name].copy_(tensor)
                arrived.add(name)
            _check_none_missing(expected.keys() - arrived, update)
            receipt, odd = inspect_arena(staging)
        for info in receipt:
            if info != expected[info.name]:
                raise WeightError(f"version {update.version}: tensor {info.name!r} differs from what was sent")
        if odd is not None:
            raise WeightError(f"version {update.version}: tensor {odd!r} holds NaN or infinity, and was sent so")
        self._is_whole = True
        return receipt

    def exchange(self) -> None:
        """What was filled is what the model runs from now on."""
        if self._staging is None or not self._is_whole:
            raise WeightError("no weights lie ready: the last fill failed, or there was none")
        if self._in_place:
            self.arena.copy_from(self._staging)
            self._beside.follow()
        else:
            self.arena.exchange(self._staging)

    def release(self) -> None:
        """Give the second set's memory back; the next `fill` makes it anew."""
        self._beside.settle()
        self._staging, self._is_whole = None, False

    def _check_arena(self, update: WeightUpdate) -> None:
        strayed = self.arena.strayed() if self._in_place else None
        if strayed is not None:
            raise WeightError(
                f"version {update.version}: the model's tensor {strayed!r} is not in its arena any more, so that new weights "
                f"would not reach it; adopt the model after it is moved, not before"
            )

    def _check_manifest(self, update: WeightUpdate) -> dict[str, TensorInfo]:
        """What is announced must be what this model holds, before anything is copied."""
        expected = {info.name: info for info in update.manifest}
        views = self.arena.views
        for name, info in expected.items():
            if name not in views:
                raise WeightError(f"version {update.version}: tensor {name!r} is not one this model holds")
            own = _info(name, views[name], info.checksum)
            if info != own:
                raise WeightError(
                    f"version {update.version}: tensor {name!r} is {info.dtype} {list(info.shape)} there, "
                    f"and {own.dtype} {list(own.shape)} in this model"
                )
        _check_none_missing(views.keys() - expected.keys(), update)
        return expected


def _check_like(name: str, tensor: Tensor, expected: dict[str, TensorInfo], update: WeightUpdate) -> None:
    """What arrives must be what was announced: a copy would convert dtypes and repeat what is too small, without a word."""
    info = expected.get(name)
    if info is None:
        raise WeightError(f"version {update.version}: tensor {name!r} arrived and was not announced")
    if _info(name, tensor, info.checksum) != info:
        raise WeightError(
            f"version {update.version}: tensor {name!r} was announced as {info.dtype} {list(info.shape)} and arrived as "
            f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )


def _check_none_missing(missing: set[str], update: WeightUpdate) -> None:
    if missing:
        raise WeightError(f"version {update.version}: {len(missing)} tensors did not arrive, first {min(missing)!r}")


class _Beside:
    """The order of filling and exchanging on a GPU; on a CPU there is nothing to order.

    Filling has a stream of its own, so that it does not stand in the queue of decode steps, nor they in its.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._exchanged: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """What is queued within waits for the last exchange and for what this thread queued before; it is done at the end."""
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
        """Called when an exchange is queued: the next fill must not write what it still reads."""
        if self._device.type == "cuda":
            self._exchanged = torch.cuda.current_stream(self._device).record_event()

    def settle(self) -> None:
        """Wait until no exchange reads the second set."""
        if self._exchanged is not None:
            self._exchanged.synchronize()
