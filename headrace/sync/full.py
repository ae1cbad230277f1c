"""The payload `full`: all weights, unencoded. It is also the base class of every other payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace.errors import SyncError
from headrace.model import Arena
from headrace.sync.ranges import target_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from headrace.model import Layout, StagingBuffer
    from headrace.records import Part, WeightUpdate
    from headrace.sync.transport import Target

    Fetch = Callable[[Part, Target], None]


class FullPayload:
    """What the sender keeps between updates, and how the receiver turns bytes back into weights. The sender packs its weights
    into an image: all tensors in one block of memory, in the layout of an engine's own arena."""

    name: ClassVar[str] = "full"
    sends_image: ClassVar[bool] = True  # the image itself travels, so it can be packed directly into the transport's memory

    def __init__(self) -> None:
        self._image: Arena | None = None

    # At the sender; `WeightSync` calls these with its lock held

    def reset(self) -> None:
        """Called when the sync closes: drop all state."""
        self._image = None

    def lay_out(self, dtypes: set[torch.dtype], *, is_share: bool) -> None:
        """Called when the layout of the weights is known or has changed: drop all state. `is_share`: they are one rank's share
        of tensors of these dtypes, and the other ranks must come to the same decisions."""
        self.reset()

    def image(self, slots: Layout, device: torch.device) -> Arena:
        """Return where to pack the weights, if not into the transport's memory."""
        if self._image is None or self._image.device != device:
            self._image = Arena(slots, device=device)
        return self._image

    def encode(self, image: Arena, *, version: int, key: str, whole: bool) -> tuple[Tensor, int | None]:
        """Return the bytes to send, and the base version if they are a delta. `whole` forbids a delta."""
        return image.memory, None

    def released(self, update: WeightUpdate, key: str) -> None:
        """Called when the engines hold an update."""

    def aborted(self) -> None:
        """Called when an update was aborted: some engines may hold it, others not."""

    def kept(self) -> list[WeightUpdate]:
        """Return earlier updates that must stay available."""
        return []

    def missed(self, version: int | None, newest: WeightUpdate) -> list[WeightUpdate] | Arena:
        """Return the updates that bring an engine from `version` to `newest`, or the image if it needs all weights."""
        return [newest]

    # At the receiver

    @staticmethod
    def receive(update: WeightUpdate, incoming: StagingBuffer, fetch: Fetch) -> None:
        """Write an update's weights, part by part."""
        if not update.parts:
            raise SyncError("it has no parts: nothing says where its weights are")
        for part in update.parts:
            fetch(part, target_of(part, update, incoming))
