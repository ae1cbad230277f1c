"""Sends a trainer's weights to the engines: a payload over a transport.

The sender copies the weights once into an image: all tensors in one block of memory, in the layout of an engine's own arena.
From then on the weights may change. The image is hashed in place, and travels whole or as a delta from the image that the
engines hold.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import torch

from headrace.errors import SyncError
from headrace.model import Arena, Layout, ShardedWeights, describe, lay_out, side_stream
from headrace.records import Manifest, Part, WeightUpdate
from headrace.sync.full import FullPayload
from headrace.sync.ranges import Share
from headrace.sync.table import payload_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from headrace.model import StagingBuffer
    from headrace.records import Plain
    from headrace.sync.lineage import Lineage
    from headrace.sync.transport import Target, Transport

    Weights = Mapping[str, Tensor] | Arena


class WeightSync:
    """Both ends of a sync; a process uses one of them. Methods block, and may be called from any thread."""

    def __init__(
        self,
        lineage: Lineage,
        transport: Transport,
        *,
        payload: str = "full",
        policy: str = "policy",
        adapter: dict[str, Plain] | None = None,
        name: str = "",
    ) -> None:
        """`adapter`: the settings of the adapter, if the weights are one. `name`: the receiver's name in `send`, or the
        sender's among several ranks."""
        self.lineage = lineage
        self._transport, self._policy, self._adapter, self._name = transport, policy, adapter, name
        self._payload = payload_class(payload)()
        self._attempts = itertools.count()
        self._share = Share(Layout())  # what every image holds: the same in all versions
        self._offered: dict[str, WeightUpdate] = {}  # by key: updates on the transport
        self._newest: WeightUpdate | None = None  # the last one released, which late engines catch up to
        self._caught_up: WeightUpdate | None = None  # all weights, made for a late engine and reused for others
        self._lock = threading.RLock()
        self._stream: torch.cuda.Stream | None = None

    @property
    def relay(self) -> str:
        """The URL at which this end relays what it has received, or an empty string."""
        return self._transport.relay_url

    # The sender's end

    @torch.no_grad()
    def offer(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]] | Arena | ShardedWeights,
        *,
        whole: bool = False,
        on_read: Callable[[], None] = lambda: None,
    ) -> WeightUpdate:
        """Read the current weights and make them ready to be fetched. The trainer calls this when a version is trained. Calls
        `on_read` as soon as the weights may change, before this returns. `whole` forbids a delta, as in every retry. On one of
        several ranks the update is of its share, for `WeightUpdate.join`; it has no parts if the share is empty."""
        if isinstance(tensors, ShardedWeights) and not tensors.ranges:  # other ranks offer the same weights
            on_read()
            manifest = describe(tensors.slots)
            return WeightUpdate(policy=self._policy, lineage=self.lineage.id, version=version, manifest=manifest)
        key = self._key(version, is_share=isinstance(tensors, ShardedWeights))
        try:
            with self._lock:
                weights = self._lay_out(tensors)
                device = _device(weights)
                with side_stream(device, self._stream) as self._stream:  # not behind the next step
                    image, buffer = self._pack(weights, key)
                    if image is not weights:
                        _settle(device)
                        on_read()
                    manifest = self._share.hashed(image)
                    body, base = self._payload.encode(image, version=version, key=key, whole=whole)
                    views: Mapping[str, Tensor] = image.views
                    if buffer is None:
                        buffer = self._copied(key, body)
                        views = _view(buffer, self._share.slots).views if base is None else {self._payload.name: buffer}
                        if image is weights:
                            on_read()
                    return self._post(key, buffer, version=version, base=base, manifest=manifest, views=views)
        except BaseException:
            self._free(key)
            raise

    def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        """Push the update to these receivers while they `receive` it. Returns at once if the transport needs no push."""
        key = self._own_key(update)
        if not key:
            raise SyncError(f"version {update.version} is not on offer any more")
        self._transport.push(key, receivers)

    def release(self, update: WeightUpdate) -> None:
        """Called when the engines hold the update. Late engines can still fetch it until a newer one is released."""
        with self._lock:
            key = self._own_key(update)
            if not key:
                return
            self._newest = self._offered[key]
            self._payload.released(self._newest, key)
            kept = {self._own_key(each) for each in (*self._payload.kept(), self._newest)}
            for earlier in itertools.takewhile(lambda other: other != key, list(self._offered)):
                if earlier not in kept:
                    self._free(earlier)

    def abort(self, update: WeightUpdate) -> None:
        """Called when an update is given up: fetches of it fail. Engines may have loaded it, so the next one travels whole."""
        self._payload.aborted()
        self._free(self._own_key(update))  # without the lock, whose holder may be waiting for this

    @torch.no_grad()
    def catch_up(self, version: int | None) -> list[WeightUpdate]:
        """Return the updates that bring an engine from `version` of this lineage, or None, to the last one released."""
        with self._lock:
            newest = self._newest
            if newest is None or version == newest.version:
                return []
            missed = self._payload.missed(version, newest)
            if not isinstance(missed, Arena):
                return missed
            made = self._caught_up
            if made is None or made.version != newest.version or not self._own_key(made):
                key = self._key(newest.version, is_share=bool(self._share.ranges))
                with side_stream(missed.device, self._stream) as self._stream:
                    buffer = self._copied(key, missed.memory)
                views = _view(buffer, missed.slots).views
                made = self._post(key, buffer, version=newest.version, base=None, manifest=newest.manifest, views=views)
                self._caught_up = made
            return [made]

    def close(self) -> None:
        """Free memory, files and sockets, at either end."""
        self._transport.close()
        self._payload.reset()
        self._offered.clear()
        self._newest = self._caught_up = None

    # The receiver's end

    def receive(self, update: WeightUpdate, incoming: StagingBuffer) -> None:
        """Write the update's weights. An engine's `load` calls this in its own thread, then checks checksums itself."""
        try:
            self._transport.prepare([part.place for part in update.parts])
            payload_class(update.payload).receive(update, incoming, self._fetch)
        except SyncError as error:
            over = ", ".join(dict.fromkeys(part.transport for part in update.parts))
            raise type(error)(f"version {update.version} over {over}: {error}") from error

    def _fetch(self, part: Part, target: Target) -> None:
        if part.transport != self._transport.name:
            raise SyncError(f"this engine receives over {self._transport.name}")
        try:
            self._transport.fetch(part.place, target, receiver=self._name)
        except SyncError as error:
            if not part.sender:
                raise
            raise type(error)(f"from {part.sender}: {error}") from error

    def _key(self, version: int, *, is_share: bool) -> str:
        return f"{self._name}-" * is_share + f"{version}-{next(self._attempts)}"

    def _lay_out(self, tensors: Iterable[tuple[str, Tensor]] | Arena | ShardedWeights) -> Weights:
        """Names, shapes and dtypes as these weights have them; all state is dropped if they have changed."""
        share = self._share
        if isinstance(tensors, ShardedWeights):
            if not share.is_of(tensors):
                self._use(Share.of(tensors))
            return {name: tensor.view(self._share.slots[name].shape) for name, _, _, tensor in tensors}
        weights = tensors if isinstance(tensors, Arena) else dict(tensors)
        if isinstance(weights, Arena):
            if share.slots is not weights.slots:
                self._use(Share(weights.slots))
        elif share.ranges or not share.slots or not share.manifest.is_like(describe(weights)):
            self._use(Share(lay_out(describe(weights))))
        return weights

    def _use(self, share: Share) -> None:
        self._share = share
        self._payload.lay_out({slot.dtype for slot in share.whole.values()}, is_share=bool(share.ranges))

    def _pack(self, weights: Weights, key: str) -> tuple[Arena, Tensor | None]:
        """Return the image, and the transport's buffer if the image is in it: if the image itself travels and the buffer is on
        the weights' device. An arena whose buffer is on another device is its own image."""
        if self._payload.sends_image:
            buffer = self._transport.allocate(key, self._share.slots.num_bytes)
            if buffer.device.type == _device(weights).type:
                image = _view(buffer, self._share.slots)
                _copy(image, weights)
                return image, buffer
            self._transport.free(key)
            if isinstance(weights, Arena):
                return weights, None
        image = self._payload.image(self._share.slots, _device(weights))
        _copy(image, weights)
        return image, None

    def _copied(self, key: str, body: Tensor) -> Tensor:
        buffer = self._transport.allocate(key, len(body))
        buffer.copy_(body)
        for device in (body.device, buffer.device):
            _settle(device)
        return buffer

    def _post(
        self, key: str, buffer: Tensor, *, version: int, base: int | None, manifest: Manifest, views: Mapping[str, Tensor]
    ) -> WeightUpdate:
        """`base` is the base version if the buffer holds a delta."""
        name = FullPayload.name if base is None else self._payload.name
        place, share = self._transport.post(key, views), self._share
        part = Part(
            transport=self._transport.name,
            key=key,
            sender=self._name if share.ranges else "",
            place=place,
            num_bytes=len(buffer),
            ranges=share.ranges,
        )
        update = WeightUpdate(
            policy=self._policy,
            lineage=self.lineage.id,
            version=version,
            base_version=base,
            payload=name,
            adapter=self._adapter,
            manifest=manifest,
            parts=(part,),
        )
        self._offered[key] = update
        return update

    def _own_key(self, update: WeightUpdate) -> str:
        """The key under which this end offers the update; empty if it does not."""
        return next((part.key for part in update.parts if part.key in self._offered), "")

    def _free(self, key: str) -> None:
        self._offered.pop(key, None)
        self._transport.free(key)


def _view(buffer: Tensor, slots: Layout) -> Arena:
    return Arena(slots, device=buffer.device, allocate=lambda *_: buffer)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _device(weights: Weights) -> torch.device:
    if isinstance(weights, Arena):
        return weights.device
    return next((tensor.device for tensor in weights.values()), torch.device("cpu"))


def _copy(image: Arena, weights: Weights) -> None:
    """Copy weights into an image in few kernel launches."""
    if isinstance(weights, Arena):
        image.copy_from(weights)
    elif image.device.type == "cuda":
        torch._foreach_copy_([image.views[name] for name in weights], list(weights.values()))
    else:
        for name, tensor in weights.items():
            image.views[name].copy_(tensor)
