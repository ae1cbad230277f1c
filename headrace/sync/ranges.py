"""A part of an update: ranges of its tensors, which one rank of a trainer sends.

A part travels as an image of its ranges, laid out like an arena: a range that covers a whole tensor has its shape, others have
one dimension. The checksum of a tensor is a sum over its words, each weighted by its place, so the sums of its ranges add up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.errors import SyncError
from headrace.model import Arena, ByteTarget, describe, lay_out, make_inspector
from headrace.records import Manifest, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.model import Layout, ShardedWeights, StagingBuffer
    from headrace.records import Array, Part, WeightUpdate

    Ranges = Sequence[tuple[str, int, int]]

WORD = 8  # bytes that a checksum counts as one number


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
    """What a sender offers of every version: all tensors, or on one of several ranks the same `ranges` of them."""

    def __init__(self, whole: Layout, ranges: tuple[tuple[str, int, int], ...] = ()) -> None:
        """`whole`: every tensor; without ranges, it is the layout of the image."""
        self.whole, self.ranges, self.manifest = whole, ranges, describe(whole)
        self.slots = image_slots(self.manifest, ranges) if ranges else whole
        self._first_words: dict[str, int] = {}  # place of the range's first word among its tensor's
        for name, start, _ in ranges:
            self._first_words[name], rest = divmod(start * self.slots[name].dtype.itemsize, WORD)
            if rest:
                raise SyncError(f"tensor {name!r} is cut at element {start}, which is no multiple of {WORD} bytes")
        self._inspects: dict[torch.device, Callable[[Arena], tuple[Array, str | None]]] = {}

    @classmethod
    def of(cls, weights: ShardedWeights) -> Share:
        return cls(weights.slots, _ranges(weights))

    def is_of(self, weights: ShardedWeights) -> bool:
        return self.whole == weights.slots and self.ranges == _ranges(weights)

    def hashed(self, image: Arena) -> Manifest:
        """The manifest with the checksums of an image, which are the ranges' share in those of the whole."""
        if image.device not in self._inspects:
            self._inspects[image.device] = make_inspector(image, first_words=self._first_words)
        sums, odd = self._inspects[image.device](image)
        if odd is not None:
            raise SyncError(f"tensor {odd!r} holds NaN or infinity; such weights are not published")
        if self.ranges:
            found = dict(zip(self.slots, sums, strict=True))
            sums = np.asarray([found.get(name, 0) for name in self.whole], dtype=np.uint64)
        return self.manifest.with_checksums(sums)


def _ranges(weights: ShardedWeights) -> tuple[tuple[str, int, int], ...]:
    return tuple((name, start, stop) for name, start, stop, _ in weights)


class RangesTarget(ByteTarget):
    """Writes the image of a part straight into the tensors that its ranges belong to."""

    def __init__(self, ranges: Ranges, manifest: Manifest, incoming: StagingBuffer) -> None:
        self.slots = slots = image_slots(manifest, ranges)
        views = {name: incoming.views[name].view(-1)[start:stop].view(slots[name].shape) for name, start, stop in ranges}
        runs = [(slots.offsets[name], view.view(-1).view(torch.uint8)) for name, view in views.items()]
        super().__init__(runs, num_bytes=slots.num_bytes, views=views, check=incoming.check)

    def image(self) -> Arena:
        """A copy of what the ranges hold now, as the sender lays it out."""
        image = Arena(self.slots, device=self._runs[0][1].device)
        for name, view in self.views.items():
            image.views[name].copy_(view)
        return image

    def take(self, image: Arena) -> None:
        """Write what an image of these ranges holds."""
        for name, view in self.views.items():
            view.copy_(image.views[name])


def target_of(part: Part, update: WeightUpdate, incoming: StagingBuffer) -> ByteTarget:
    return RangesTarget(part.ranges, update.manifest, incoming) if part.ranges else incoming
