"""All tensors of a model in one piece of memory, grouped by dtype; each parameter is a view into it.

Loading new weights is then one copy, and their checksums are one kernel per dtype. Projections that read the same input (query,
key and value) are adjacent, so that one matrix product can read them as one matrix.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from torch import nn

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
    room: int = 0  # elements behind it that others may fill

    @property
    def stop(self) -> int:
        """One past its last element; room and padding follow up to the next tensor."""
        return self.start + math.prod(self.shape)

    @property
    def end(self) -> int:
        """Where the next tensor may start."""
        unit = ALIGNMENT // self.dtype.itemsize
        return -(-(self.stop + self.room) // unit) * unit


class Layout(dict[str, Slot]):
    """Slots by name, in the order of `named_tensors`; tensors that share memory share a slot. It does not change, so what
    follows from it is computed once, and not for every version of the weights."""

    @functools.cached_property
    def regions(self) -> dict[torch.dtype, tuple[int, int]]:
        """Start and stop byte of each dtype."""
        ends: dict[torch.dtype, int] = {}
        for slot in self.values():
            ends[slot.dtype] = max(ends.get(slot.dtype, 0), slot.end)
        regions, start = {}, 0
        for dtype in sorted(ends, key=str):
            regions[dtype] = (start, start + ends[dtype] * dtype.itemsize)
            start = regions[dtype][1]
        return regions

    @functools.cached_property
    def num_bytes(self) -> int:
        return max((stop for _, stop in self.regions.values()), default=0)

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """The first byte of each tensor."""
        return {name: self.regions[slot.dtype][0] + slot.start * slot.dtype.itemsize for name, slot in self.items()}

    @functools.cached_property
    def padding(self) -> list[tuple[torch.dtype, int, int]]:
        """Where the flat buffers hold no tensor, in elements."""
        return [(slot.dtype, slot.stop, slot.end) for slot in set(self.values()) if slot.stop < slot.end]


@dataclass(frozen=True, eq=False)
class ShardedWeights:
    """What a rank publishes: ranges of the model's tensors, in the engine's dtypes. The ranges of all ranks of a trainer are
    disjoint and cover every tensor; a replica of other ranks may have none. Each range starts at a multiple of 8 bytes within
    its tensor, so that checksums add up."""

    slots: Layout
    """Every tensor of the whole model, in the order of `named_tensors`; equal on all ranks, and in all versions."""
    ranges: Sequence[tuple[str, int, int, Tensor]]
    """(tensor, first element, one past the last, these elements in one dimension); each tensor at most once."""

    def __iter__(self) -> Iterator[tuple[str, int, int, Tensor]]:
        return iter(self.ranges)


class Views(Mapping[str, Tensor]):
    """An arena's tensors by name. Each is made at its first use: to make hundreds takes longer than to copy an adapter."""

    def __init__(self, flat: Mapping[torch.dtype, Tensor], slots: Layout) -> None:
        self._flat, self._slots = flat, slots
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        found = self._made.get(name)
        if found is None:
            slot = self._slots[name]
            found = self._made[name] = self._flat[slot.dtype][slot.start : slot.stop].view(slot.shape)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


class Arena:
    """The memory of a model's tensors, or of a second set of them with the same layout.

    Matrices come first, in module order, then everything with fewer dimensions, so that weights of neighbouring linear layers
    are adjacent, and so are their biases. Padding is zero and stays zero. `flat` holds all tensors and padding of one dtype in
    one dimension, `views` each tensor by name. `exchange` replaces them, and what `joined` returns; `copy_from` does not.
    """

    gradients: Mapping[torch.dtype, Tensor] = MappingProxyType({})
    """Of `flat`, in float32, if the arena keeps its tensors' gradients itself."""
    first: Mapping[str, int] = MappingProxyType({})
    """The first element that the arena holds of each tensor, if it holds a part of them."""

    def __init__(self, slots: Mapping[str, Slot], *, device: torch.device, allocate: Allocate | None = None) -> None:
        self.slots = slots if isinstance(slots, Layout) else Layout(slots)
        self.device = device
        self._holders: dict[str, Tensor] = {}
        self._moving = threading.Lock()  # `strayed` is asked in other threads
        self._addresses: list[tuple[str, Tensor, int]] | None = None  # what it compares
        num_bytes = self.slots.num_bytes
        self.memory = (allocate or allocate_bytes)(num_bytes, device)  # equal slots: equal layouts; weights are sent like this
        if (self.memory.dtype, self.memory.shape) != (torch.uint8, (num_bytes,)) or self.memory.data_ptr() % ALIGNMENT:
            raise ArenaError(f"allocate({num_bytes}, {device}) must give so many bytes of uint8 at a multiple of {ALIGNMENT}")
        self.flat = {dtype: self.memory[start:stop].view(dtype) for dtype, (start, stop) in self.slots.regions.items()}
        if self.slots.padding:
            torch._foreach_zero_([self.flat[dtype][start:stop] for dtype, start, stop in self.slots.padding])
        self.views = Views(self.flat, self.slots)

    @classmethod
    @torch.no_grad()
    def adopt(cls, model: nn.Module, allocate: Allocate | None = None, room: Mapping[str, int] | None = None) -> Arena:
        """Copy a model's tensors into an arena and make every parameter a view into it, freeing the old memory one by one. Call
        it last: moving the model to another device or dtype takes its tensors out again. `room`: rows to leave free behind
        matrices, which `joined` shows with them; none behind tensors that have another name too."""
        holders = dict(held_tensors(model))
        devices = {str(tensor.device): tensor.device for tensor in holders.values()} or {"cpu": torch.device("cpu")}
        if len(devices) > 1 or "meta" in devices:
            where = ", ".join(sorted(devices))
            raise ArenaError(f"an arena is on one device and holds real tensors; this model's are on {where}")
        _check_overlaps(holders)
        slots = _lay_out(
            (
                (name, tensor.dtype, tuple(tensor.shape), _memory(tensor) if tensor.numel() else name)
                for name, tensor in holders.items()
            ),
            {name: rows * holders[name].shape[1] for name, rows in (room or {}).items() if name in holders},
        )
        arena = cls(slots, device=next(iter(devices.values())), allocate=allocate)
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

    @property
    def flats(self) -> list[Tensor]:
        """The flat buffers, sorted by the name of their dtype."""
        return [self.flat[dtype] for dtype in sorted(self.flat, key=str)]

    def joined(self, names: Sequence[str]) -> Tensor | None:
        """One view over adjacent tensors, stacked along dimension 0, and the room behind the last; None if there are gaps or
        they do not stack."""
        slots = [self.slots[name] for name in names]
        first = slots[0]
        stop = first.start
        for slot in slots:
            if not slot.shape or (slot.dtype, slot.start, slot.shape[1:]) != (first.dtype, stop, first.shape[1:]):
                return None
            stop = slot.stop
        return self.flat[first.dtype][first.start : stop + slots[-1].room].view(-1, *first.shape[1:])

    def exchange(self, other: Arena) -> None:
        """Swap memory with the other arena, copying nothing; the model then runs on what the other held."""
        with self._moving:
            self.memory, other.memory = other.memory, self.memory
            self.flat, other.flat = other.flat, self.flat
            self.views, other.views = other.views, self.views
            for name, holder in self._holders.items():
                holder.data = self.views[name]
            self._addresses = other._addresses = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of the model's."""
        start = self.memory.data_ptr()
        return start <= tensor.data_ptr() < start + self.num_bytes

    def piece(self, name: str, tensor: Tensor) -> Tensor:
        """What the arena holds of a whole tensor."""
        return tensor

    def whole_gradient(self, name: str) -> Tensor | None:
        """Where autograd adds up a tensor's gradient, if that is not where the arena keeps it."""
        return None

    @torch.no_grad()
    def copy_from(self, other: Arena) -> None:
        """Copy the other's content, in one copy; every address stays valid."""
        self.memory.copy_(other.memory)

    def strayed(self) -> str | None:
        """The first tensor no longer in the arena, because the model was moved after it was adopted."""
        with self._moving:
            if self._addresses is None:
                self._addresses = [(name, held, self.views[name].data_ptr()) for name, held in self._holders.items()]
            return next((name for name, held, address in self._addresses if held.data_ptr() != address), None)


@contextlib.contextmanager
def side_stream(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.Stream | None]:
    """On a GPU, run in `stream`, or a new one, after what this thread has queued: neither it nor later work queues behind the
    other. Yields the stream."""
    if device.type != "cuda":
        yield None
        return
    stream = stream or torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


def allocate_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Aligned memory from torch, which itself aligns to only 64 bytes on a CPU."""
    buffer = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skipped = -buffer.data_ptr() % ALIGNMENT
    return buffer[skipped : skipped + num_bytes]


def lay_out(manifest: Manifest) -> Layout:
    """Slots for an update's tensors: those `Arena.adopt` gives a model with the same tensors, if none share memory."""
    return _lay_out((info.name, _dtype(info.dtype), info.shape, info.name) for info in manifest)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ArenaError(f"dtype {name!r} is not one that torch knows")
    return dtype


def _lay_out(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], Hashable]], room: Mapping[str, int] = MappingProxyType({})
) -> Layout:
    """From (name, dtype, shape, memory); tensors of the same memory share a slot. `room`: elements, by name."""
    tensors = list(tensors)
    slots: dict[str, Slot] = {}
    starts: dict[Hashable, int] = {}
    ends: dict[torch.dtype, int] = {}
    for name, dtype, shape, memory in sorted(tensors, key=lambda tensor: len(tensor[2]) < 2):
        slots[name] = Slot(dtype, shape, starts.setdefault(memory, ends.get(dtype, 0)), room.get(name, 0))
        ends[dtype] = max(ends.get(dtype, 0), slots[name].end)
    return Layout((name, slots[name]) for name, *_ in tensors)


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
            raise ArenaError(f"tensors {reached_by!r} and {name!r} share a part of their memory; only whole ones can be tied")
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        stop = start + span * tensor.element_size()
        if stop > reached:
            reached, reached_by = stop, name
