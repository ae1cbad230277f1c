"""A model's tensors split evenly over ranks: each rank keeps a slice of every unit (a decoder layer, or what is outside of
them), and a unit is whole only while it is in use.

A unit's tensors of one dtype, trained or frozen, are a group: one flat buffer with the layout of an arena, cut into as many
equal slices as there are ranks. Slices start at multiples of `ALIGNMENT`, so that blocks of 8-bit state and words of checksums
are never split. A rank's slices of all groups are one arena, whose tensors are one-dimensional: the optimizer and the weight
sync read it like any other.

While a group is not gathered, the storage behind its parameters has no bytes. It is the same storage when it is gathered again,
so that what autograd saved, also of views such as a transposed weight, is valid in the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.model.arena import ALIGNMENT, Arena, Layout, ShardedWeights, Slot, _lay_out, _memory, held_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor, nn

    Collective = Callable[[Tensor, Tensor], Any]
    """Starts an all-gather or a reduce-scatter from the second tensor into the first; returns what to wait for."""


@dataclass(frozen=True)
class Group:
    """Tensors that are gathered together."""

    slots: Mapping[str, Slot]  # in the whole buffer
    dtype: torch.dtype
    is_trained: bool
    size: int  # of the whole buffer, in elements
    start: int  # of this rank's slice, in the flat memory of its dtype
    stop: int
    whole: Tensor
    gradient: Tensor | None  # of the whole, in float32; with no bytes while not in use

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[slot.start : slot.stop].view(slot.shape) for name, slot in self.slots.items()}


class ShardedArena(Arena):
    """One rank's slices. `slots` and `views` are of pieces of tensors, in one dimension; a rank may have none of a tensor."""

    def __init__(self, slots: Mapping[str, Slot], *, device: torch.device, first: Mapping[str, int], whole: Layout) -> None:
        super().__init__(slots, device=device)
        self.first, self.whole_slots = first, whole  # of each piece: its first element; of each tensor: its place in one arena
        self.units: list[list[Group]] = []
        self.gradients: dict[torch.dtype, Tensor] = {}
        self._gradient_views: dict[str, Tensor] = {}

    @classmethod
    @torch.no_grad()
    def split(
        cls, model: nn.Module, units: Sequence[Collection[int]], *, rank: int, count: int, device: torch.device
    ) -> ShardedArena:
        """Take this rank's slices of a model's tensors, which are freed one by one; slices of tensors without
        bytes are left to be filled. `units`: ids of each one's tensors; a tensor that shares its memory with an earlier one
        goes with that."""
        holders = dict(held_tensors(model))
        keys = {name: _memory(tensor) if _has_bytes(tensor) else name for name, tensor in holders.items()}
        whole = _lay_out((name, tensor.dtype, tuple(tensor.shape), keys[name]) for name, tensor in holders.items())
        place_of = {each: place for place, unit in enumerate(units) for each in unit}
        homes: dict[Any, tuple[bool, torch.dtype, int]] = {}
        for name, tensor in holders.items():
            homes.setdefault(keys[name], (not tensor.requires_grad, tensor.dtype, place_of[id(tensor)]))
        slots: dict[str, Slot] = {}
        first: dict[str, int] = {}
        plans, reached = [], dict[torch.dtype, int]()
        for home in sorted(set(homes.values()), key=lambda home: (home[0], str(home[1]), home[2])):  # trained ones first
            dtype = home[1]
            names = [name for name in holders if homes[keys[name]] == home]
            laid_out = _lay_out((name, dtype, tuple(holders[name].shape), keys[name]) for name in names)
            laid_out = Layout(sorted(laid_out.items(), key=lambda item: item[1].start))
            unit = ALIGNMENT // dtype.itemsize
            size = -(-max(slot.end for slot in laid_out.values()) // (unit * count)) * unit
            start = reached.setdefault(dtype, 0)
            for name, slot in laid_out.items():
                low, high = (min(max(each - rank * size, 0), size) for each in (slot.start, slot.stop))
                slots[name] = Slot(dtype, (high - low,), start + low)
                first[name] = rank * size + low - slot.start if high > low else 0
            last = list(laid_out)[-1]
            slots[last] = Slot(dtype, slots[last].shape, slots[last].start, start + size - slots[last].stop)
            reached[dtype] = start + size
            plans.append((home, laid_out, size * count, start, start + size))
        arena = cls({name: slots[name] for name in holders}, device=device, first=first, whole=whole)
        arena.units = [[] for _ in units]
        for (is_frozen, dtype, place), laid_out, size, start, stop in plans:
            buffer, gradient = (torch.empty(size, dtype=each, device=device) for each in (dtype, torch.float32))
            group = Group(laid_out, dtype, not is_frozen, size, start, stop, buffer, None if is_frozen else gradient)
            arena.units[place].append(group)
            for name, view in group.views(buffer).items():
                if _has_bytes(holders[name]):
                    arena.views[name].copy_(arena.piece(name, holders[name]))
                holders[name].data = view
            if group.gradient is not None:
                arena._gradient_views |= group.views(group.gradient)
            for each in (buffer, gradient):
                _release(each)
        trained = {dtype: max([g.stop for unit in arena.units for g in unit if g.dtype == dtype and g.is_trained], default=0)
                   for dtype in arena.flat}  # fmt: skip
        arena.gradients = {
            dtype: torch.zeros(size, dtype=torch.float32, device=device) for dtype, size in trained.items() if size
        }
        return arena

    def piece(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[self.first[name] :][: math.prod(self.slots[name].shape)]

    def whole_gradient(self, name: str) -> Tensor | None:
        """Where the gradient of a tensor is added up while its unit's is; it has no bytes at other times."""
        return self._gradient_views.get(name)

    def weights(self, *, is_offered: bool = True) -> ShardedWeights:
        """What this rank publishes; nothing if another replica does."""
        ranges = [
            (name, self.first[name], self.first[name] + view.numel(), view)
            for name, view in self.views.items()
            if view.numel() and is_offered
        ]
        return ShardedWeights(self.whole_slots, ranges)

    def gather(self, place: int, collective: Collective) -> list[Any]:
        """Start to make a unit whole; return what to wait for."""
        started = []
        for group in self.units[place]:
            _fill(group.whole)
            started.append(collective(group.whole, self.flat[group.dtype][group.start : group.stop]))
        return started

    def free(self, place: int) -> None:
        for group in self.units[place]:
            _release(group.whole)

    def open_gradient(self, place: int) -> None:
        """Zero the whole gradient of a unit, unless it is in use already."""
        for group in self.units[place]:
            if group.gradient is not None and not _has_bytes(group.gradient):
                _fill(group.gradient)
                group.gradient.zero_()

    def reduce(self, place: int, collective: Collective) -> list[tuple[Any, Group, Tensor]]:
        """Start to add up a unit's gradient over ranks; `settle` takes what this returns, after the wait."""
        self.open_gradient(place)
        started = []
        for group in self.units[place]:
            if group.gradient is not None:
                received = torch.empty(group.stop - group.start, dtype=torch.float32, device=self.device)
                started.append((collective(received, group.gradient), group, received))
        return started

    def settle(self, group: Group, received: Tensor) -> None:
        """Add what a reduction received to this rank's gradient, and free the whole one."""
        self.gradients[group.dtype][group.start : group.stop].add_(received)
        assert group.gradient is not None
        _release(group.gradient)

    def holds(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        groups = (group for unit in self.units for group in unit)
        return storage != 0 and any(group.whole.untyped_storage().data_ptr() == storage for group in groups)


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def _fill(buffer: Tensor) -> None:
    if not _has_bytes(buffer):
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())


def _release(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(0)
