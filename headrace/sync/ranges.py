"""A part of an update: ranges of its tensors, which one rank of a trainer sends.

A part travels as an image of its ranges, laid out like an arena: a range that covers a whole tensor has its shape, others have
one dimension. The checksum of a tensor is a sum over its words, each weighted by its place, so the sums of its ranges add up.
"""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.errors import SyncError
from headrace.model import Arena, StagingBuffer, lay_out
from headrace.records import Manifest, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.model import Layout, ShardedWeights, Slot
    from headrace.records import Array

    Ranges = Sequence[tuple[str, int, int]]

WORD = 8  # bytes that a checksum counts as one number


def whole_manifest(slots: Mapping[str, Slot]) -> Manifest:
    """The tensors of a layout, without checksums."""
    return Manifest.of(
        TensorInfo(
            name=name,
            shape=slot.shape,
            dtype=str(slot.dtype).removeprefix("torch."),
            num_bytes=math.prod(slot.shape) * slot.dtype.itemsize,
        )
        for name, slot in slots.items()
    )


def image_slots(manifest: Manifest, ranges: Ranges) -> Layout:
    """Where each range lies in the image of a part."""
    known = {info.name: info for info in manifest}
    infos = []
    for name, start, stop in ranges:
        info = known.get(name)
        if info is None or stop > (size := math.prod(info.shape)):
            raise SyncError(f"it has no elements {start} to {stop} of tensor {name!r}")
        shape = info.shape if stop - start == size else (stop - start,)
        infos.append(TensorInfo(name=name, shape=shape, dtype=info.dtype, num_bytes=info.num_bytes // size * (stop - start)))
    return lay_out(Manifest.of(infos))


class Share:
    """What one rank offers of every version: the same ranges of the same tensors."""

    def __init__(self, weights: ShardedWeights) -> None:
        self.whole, self.ranges = weights.slots, tuple((name, start, stop) for name, start, stop, _ in weights.ranges)
        self.manifest = whole_manifest(weights.slots)
        self.slots = image_slots(self.manifest, self.ranges)
        self.first_words: dict[str, int] = {}  # place of the range's first word among its tensor's
        for name, start, _ in self.ranges:
            self.first_words[name], rest = divmod(start * self.slots[name].dtype.itemsize, WORD)
            if rest:
                raise SyncError(f"tensor {name!r} is cut at element {start}, which is no multiple of {WORD} bytes")
        places = {name: place for place, name in enumerate(self.whole)}
        self._places = np.asarray([places[name] for name, *_ in self.ranges], dtype=np.int64)

    def is_of(self, weights: ShardedWeights) -> bool:
        return self.whole == weights.slots and self.ranges == tuple((name, start, stop) for name, start, stop, _ in weights)

    def tensors(self, weights: ShardedWeights) -> dict[str, Tensor]:
        return {name: tensor.view(self.slots[name].shape) for name, _, _, tensor in weights}

    def checksums(self, sums: Array) -> Array:
        """The ranges' share in the checksum of each tensor of the whole, from the sums of the ranges."""
        found: Array = np.zeros(len(self.whole), dtype=np.uint64)
        found[self._places] = sums
        return found


class RangesTarget:
    """A `Target` that writes the image of a part straight into the tensors that its ranges belong to."""

    def __init__(self, ranges: Ranges, manifest: Manifest, incoming: StagingBuffer) -> None:
        slots = image_slots(manifest, ranges)
        self.slots, self.num_bytes, self.check = slots, slots.num_bytes, incoming.check
        self.views = {name: incoming.views[name].view(-1)[start:stop].view(slots[name].shape) for name, start, stop in ranges}
        offsets = slots.offsets
        self._places = sorted((offsets[name], view.view(-1).view(torch.uint8)) for name, view in self.views.items())
        self._stops = [start + len(view) for start, view in self._places]

    def write(self, start: int, piece: Tensor) -> None:
        self.check()
        stop = start + len(piece)
        if not 0 <= start <= stop <= self.num_bytes:
            raise SyncError(f"{len(piece)} bytes arrived for place {start} of {self.num_bytes}")
        first = bisect.bisect_right(self._stops, start)
        for at, view in self._places[first:]:
            if at >= stop:
                break
            low, high = max(at, start), min(at + len(view), stop)
            view[low - at : high - at].copy_(piece[low - start : high - start])
        device = self._places[0][1].device
        if device.type == "cuda" and not piece.is_cuda:  # a piece on a GPU is not reused before the receipt
            torch.cuda.current_stream(device).synchronize()

    def image(self) -> Arena:
        """A copy of what the ranges hold now, as the sender lays it out."""
        image = Arena(self.slots, device=self._places[0][1].device)
        for name, view in self.views.items():
            image.views[name].copy_(view)
        return image

    def take(self, image: Arena) -> None:
        """Write what an image of these ranges holds."""
        for name, view in self.views.items():
            view.copy_(image.views[name])
