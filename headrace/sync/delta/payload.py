"""The payload `delta`: what changed since the version that the engines hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.errors import SyncError
from headrace.model import ByteTarget, allocate_bytes
from headrace.sync.delta.codec import CHUNK, DTYPES, apply, encode
from headrace.sync.full import FullPayload
from headrace.sync.ranges import RangesTarget, target_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.model import Arena, StagingBuffer
    from headrace.records import WeightUpdate
    from headrace.sync.full import Fetch

_MOST_KEPT = 16  # deltas that stay available for engines that missed some


class DeltaPayload(FullPayload):
    """The delta between the image that the engines hold and the new one. All weights travel instead if a delta is not smaller,
    if engines may hold different versions, or for unsupported dtypes."""

    name = "delta"
    sends_image = False

    def __init__(self) -> None:
        super().__init__()
        self._next_key = ""  # of the update made from `_image`
        self._is_held_by_all = True  # no engine holds an aborted update, so a delta from `_held` fits all of them
        self._has_deltas = self._is_share = False
        self.reset()

    def lay_out(self, dtypes: set[torch.dtype], *, is_share: bool) -> None:
        super().lay_out(dtypes, is_share=is_share)
        self._has_deltas, self._is_share = DTYPES.issuperset(dtypes), is_share

    def reset(self) -> None:
        super().reset()
        self._held: Arena | None = None
        self._held_version: int | None = None
        self._chain: list[WeightUpdate] = []  # consecutive deltas; the engines hold the last

    def encode(self, image: Arena, *, version: int, key: str, whole: bool) -> tuple[Tensor, int | None]:
        self._next_key = key
        held, base = self._held, self._held_version
        is_possible = not whole and self._is_held_by_all and self._has_deltas
        if held is None or base is None or base >= version or not is_possible:
            return image.memory, None
        blob = encode(list(zip(held.flats, image.flats, strict=True)))
        is_smaller = len(blob) < image.num_bytes or self._is_share  # a share hardly exceeds its image, and all ranks agree
        return (blob, base) if is_smaller else (image.memory, None)

    def released(self, update: WeightUpdate, key: str) -> None:
        if self._next_key == key:
            self._held, self._image = self._image, self._held
            self._held_version, self._next_key = update.version, ""
        self._is_held_by_all = True
        self._chain = [*self._chain, update][-_MOST_KEPT:] if update.base_version is not None else []

    def aborted(self) -> None:
        self._is_held_by_all = False

    def kept(self) -> list[WeightUpdate]:
        return self._chain

    def missed(self, version: int | None, newest: WeightUpdate) -> list[WeightUpdate] | Arena:
        if newest.base_version is None:
            return [newest]
        missed = [update for update in self._chain if version is not None and update.version > version]
        if missed and missed[0].base_version == version:
            return missed
        assert self._held is not None, "a difference was released"
        return self._held

    @staticmethod
    def receive(update: WeightUpdate, incoming: StagingBuffer, fetch: Fetch) -> None:
        if update.base_version is None or not update.parts:
            raise SyncError("a difference has a base version, and parts")
        targets = [target_of(part, update, incoming) for part in update.parts]
        for part, target in zip(update.parts, targets, strict=True):
            most = target.num_bytes + (_header_bytes(target.num_bytes) if part.ranges else 0)
            if part.num_bytes > most:
                raise SyncError(f"{part.num_bytes} bytes are no difference of {target.num_bytes}")
        flats = incoming.take_running()
        for part, target in zip(update.parts, targets, strict=True):
            blob = allocate_bytes(part.num_bytes, torch.device("cpu"))
            views = {DeltaPayload.name: blob}
            fetch(part, ByteTarget([(0, blob)], num_bytes=part.num_bytes, views=views, check=incoming.check))
            if isinstance(target, RangesTarget):
                image = target.image()
                apply(blob, image.flats)
                target.take(image)
            else:
                apply(blob, flats)


def _header_bytes(num_bytes: int) -> int:
    """The most by which a delta can exceed the image of a share."""
    return 64 + num_bytes // CHUNK
