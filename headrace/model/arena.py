"""All tensors of a model in one piece of memory, grouped by dtype; each parameter is a view into it.

Loading new weights is then one copy, and their checksums are one kernel per dtype. Projections that read the same input (query,
key and value) are adjacent, so that one matrix product can read them as one matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from headrace.records import Manifest

    Allocate = Callable[[int, torch.device], Tensor]
    """From a number of bytes and a device to that many bytes there, as uint8, beginning at a multiple of `ALIGNMENT`."""

ALIGNMENT = 256  # bytes; every tensor starts at a multiple of it, as a GPU allocation would: kernels rely on that


class ArenaError(ValueError):
    """A model's tensors do not fit one arena; the message says which and why."""


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer (the object itself), once, under its first name."""
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in the flat buffer of its dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in elements

    @property
    def stop(self) -> int:
        """One past its last element; padding follows up to the next tensor."""
        return self.start + math.prod(self.shape)


class Arena:
    """The memory of a model's tensors, or of a second set of them with the same layout.

    Matrices come first, in module order, then everything with fewer dimensions, so that weights of neighbouring linear layers
    are adjacent, and so are their biases. Padding is zero and stays zero. `flat` holds all tensors and padding of one dtype in
    one dimension, `views` each tensor by name. `exchange` replaces them, and what `joined` returns; `copy_from` does not.
    """

    def __init__(self, slots: Mapping[str, Slot], *, device: torch.device, allocate: Allocate | None = None) -> None:
        self.slots = dict(slots)  # by name, in the order of `named_tensors`; tensors that share memory share a slot
        self.device = device
        self._allocate = allocate
        self._holders: dict[str, Tensor] = {}
        self._places: list[int] | None = None
        regions, num_bytes = _regions(self.slots.values())
        self.memory = self._buffer(num_bytes)  # equal slots give equal layouts: weights are also sent in this form
        self.flat = {dtype: self.memory[start:stop].view(dtype) for dtype, (start, stop) in regions.items()}
        self._clear_padding()
        self.views = {name: self.flat[slot.dtype][slot.start : slot.stop].view(slot.shape) for name, slot in slots.items()}

    @classmethod
    @torch.no_grad()
    def adopt(cls, model: nn.Module, allocate: Allocate | None = None) -> Arena:
        """Copy a model's tensors into an arena and make every parameter a view into it, freeing the old memory one by one. Call
        it last: moving the model to another device or dtype takes its tensors out again."""
        holders = dict(held_tensors(model))
        devices = {tensor.device for tensor in holders.values()}
        if len(devices) > 1 or any(device.type == "meta" for device in devices):
            raise ArenaError(f"an arena is on one device and holds real tensors; this model's are on {_listed(devices)}")
        arena = cls(_lay_out_held(holders), device=devices.pop() if devices else torch.device("cpu"), allocate=allocate)
        arena._holders = holders
        for name, holder in holders.items():
            arena.views[name].copy_(holder)
            holder.data = arena.views[name]
        return arena

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.views.items())

    def like(self) -> Arena:
        """A second arena of the same layout and device, uninitialised, in torch's memory, which is freed with the object."""
        return Arena(self.slots, device=self.device)

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    def joined(self, names: Sequence[str]) -> Tensor | None:
        """One view over adjacent tensors, stacked along dimension 0; None if there are gaps or they do not stack."""
        slots = [self.slots[name] for name in names]
        first = slots[0]
        stop = first.start
        for slot in slots:
            if not slot.shape or (slot.dtype, slot.start, slot.shape[1:]) != (first.dtype, stop, first.shape[1:]):
                return None
            stop = slot.stop
        rows = sum(slot.shape[0] for slot in slots)
        return self.flat[first.dtype][first.start : stop].view(rows, *first.shape[1:])

    def exchange(self, other: Arena) -> None:
        """Swap memory with the other arena, copying nothing; the model then runs on what the other held."""
        self.memory, other.memory = other.memory, self.memory
        self._places = other._places = None
        self.flat, other.flat = other.flat, self.flat
        self.views, other.views = other.views, self.views
        for name, holder in self._holders.items():
            holder.data = self.views[name]

    @torch.no_grad()
    def copy_from(self, other: Arena) -> None:
        """Copy the other's content, in one copy; every address stays valid."""
        self.memory.copy_(other.memory)

    def strayed(self) -> str | None:
        """The first tensor no longer in the arena, because the model was moved after it was adopted."""
        places = self._places
        if places is None:
            places = self._places = [view.data_ptr() for view in self.views.values()]
        if [holder.data_ptr() for holder in self._holders.values()] == places:
            return None
        return next(name for name, holder in self._holders.items() if holder.data_ptr() != self.views[name].data_ptr())

    def _buffer(self, num_bytes: int) -> Tensor:
        buffer = (self._allocate or allocate_bytes)(num_bytes, self.device)
        if buffer.dtype != torch.uint8 or buffer.shape != (num_bytes,) or buffer.data_ptr() % ALIGNMENT:
            raise ArenaError(
                f"allocate({num_bytes}, {self.device}) gave {buffer.dtype} of shape {tuple(buffer.shape)} at address "
                f"{buffer.data_ptr():#x}; an arena needs that many contiguous bytes of uint8 at a multiple of {ALIGNMENT}"
            )
        return buffer

    def _clear_padding(self) -> None:
        for dtype, stop in {(slot.dtype, slot.stop) for slot in self.slots.values()}:
            end = _aligned(stop, dtype)
            if end > stop:
                self.flat[dtype][stop:end].zero_()


def _regions(slots: Iterable[Slot]) -> tuple[dict[torch.dtype, tuple[int, int]], int]:
    """Start and stop byte of each dtype, and the total number of bytes."""
    ends: dict[torch.dtype, int] = {}
    for slot in slots:
        ends[slot.dtype] = max(ends.get(slot.dtype, 0), _aligned(slot.stop, slot.dtype))
    regions, start = {}, 0
    for dtype in sorted(ends, key=str):
        regions[dtype] = (start, start + ends[dtype] * dtype.itemsize)
        start = regions[dtype][1]
    return regions, start


def arena_bytes(slots: Mapping[str, Slot]) -> int:
    """The size of an arena of this layout."""
    return _regions(slots.values())[1]


def allocate_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Aligned memory from torch, which itself aligns to only 64 bytes on a CPU."""
    buffer = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skipped = -buffer.data_ptr() % ALIGNMENT
    return buffer[skipped : skipped + num_bytes]


def _aligned(element: int, dtype: torch.dtype) -> int:
    """The first element at or after this one where a tensor may start."""
    unit = ALIGNMENT // dtype.itemsize
    return -(-element // unit) * unit


def lay_out(manifest: Manifest) -> dict[str, Slot]:
    """Slots for an update's tensors: those `Arena.adopt` gives a model with the same tensors, if none share memory."""
    return _lay_out((info.name, _dtype(info.dtype), info.shape, info.name) for info in manifest)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ArenaError(f"dtype {name!r} is not one that torch knows")
    return dtype


def _lay_out_held(tensors: Mapping[str, Tensor]) -> dict[str, Slot]:
    """Slots for a model's tensors; tensors that share memory share a slot."""
    _check_overlaps(tensors)
    return _lay_out(
        (name, tensor.dtype, tuple(tensor.shape), _memory(tensor) if tensor.numel() else name)
        for name, tensor in tensors.items()
    )


def _lay_out(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], Hashable]]) -> dict[str, Slot]:
    """From (name, dtype, shape, key); tensors with equal keys share a slot."""
    tensors = list(tensors)
    slots: dict[str, Slot] = {}
    starts: dict[Hashable, int] = {}
    sizes: dict[torch.dtype, int] = {}
    for name, dtype, shape, memory in sorted(tensors, key=lambda tensor: len(tensor[2]) < 2):
        if memory not in starts:
            starts[memory] = sizes.get(dtype, 0)
            sizes[dtype] = _aligned(starts[memory] + math.prod(shape), dtype)
        slots[name] = Slot(dtype, shape, starts[memory])
    return {name: slots[name] for name, *_ in tensors}


def _memory(tensor: Tensor) -> Hashable:
    """Equal for tensors of the same elements in the same order, whatever the shape of a contiguous one."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.dtype, tensor.numel()
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _check_overlaps(tensors: Mapping[str, Tensor]) -> None:
    """Reject tensors that share part of their memory: they would silently be separated."""
    reached, reached_by = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if not tensor.numel():
            continue
        start = tensor.data_ptr()
        if start < reached and _memory(tensor) != _memory(tensors[reached_by]):
            raise ArenaError(
                f"tensors {reached_by!r} and {name!r} share a part of their memory; only whole tensors can be tied"
            )
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if start + span * tensor.element_size() > reached:
            reached, reached_by = start + span * tensor.element_size(), name


def _listed(devices: set[torch.device]) -> str:
    return ", ".join(sorted(str(device) for device in devices))
