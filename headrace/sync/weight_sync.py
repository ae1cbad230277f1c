"""A payload over a transport: what a trainer's weights travel as, and how they become an engine's.

The sender reads the weights once, into an image: all tensors in one run of bytes, in the layout of an engine's own arena.
From then on they may change. The image is hashed where it lies, and travels whole, or as its difference from the image that
the engines hold.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace.errors import SyncError
from headrace.model import Arena, Inspector, allocate_bytes, arena_bytes, describe, lay_out
from headrace.records import Payload, WeightUpdate
from headrace.sync import delta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from headrace.model import Incoming, Slot
    from headrace.records import Manifest, Plain
    from headrace.sync.lineage import Lineage
    from headrace.sync.transport import Transport

_MOST_DELTAS = 16
"""Kept for an engine that comes late."""


class WeightSync:
    """Both ends of a sync; a process uses one of them. Calls block, and may come from any thread."""

    def __init__(
        self,
        lineage: Lineage,
        transport: Transport,
        *,
        payload: Payload | str = Payload.FULL,
        policy: str = "policy",
        name: str = "",
    ) -> None:
        self.lineage = lineage
        self._transport, self._payload, self._policy = transport, Payload(payload), policy
        self._name = name
        """Of the receiver, where a transport must tell them apart."""
        self._attempts = itertools.count()
        self._layout: _Layout | None = None
        self._offered: dict[str, WeightUpdate] = {}
        """By key: what is on the transport and not freed."""
        self._held, self._next = _Image(), _Image()
        """For differences: the image that the engines hold, and the one on its way."""
        self._is_held_by_all = True
        """No engine holds something that was given up: a difference from what is held is good for every one of them."""
        self._chain: list[WeightUpdate] = []
        """Differences one on top of the other, the last of them held."""
        self._newest: WeightUpdate | None = None
        """The last that was released; an engine that comes late is brought there."""
        self._caught_up: WeightUpdate | None = None
        """All of it, made for an engine that came late: the next that does gets the same."""
        self._home: Arena | None = None
        """Weights that receivers read where they are."""
        self._when_over: dict[str, Callable[[], None]] = {}
        """By key: what to call when nobody reads them any more."""
        self._lock = threading.RLock()
        self._beside = _Beside()

    @property
    def relay(self) -> str:
        """Where this end hands on what it receives, if it does."""
        return str(getattr(self._transport, "url", ""))

    # The sender's end

    def adopt(self, model: nn.Module) -> Arena:
        """Lay a model's weights into memory that receivers can read themselves, where the transport has such on the model's
        device: offered from there, no byte of them is copied here."""
        is_home = False

        def allocate(num_bytes: int, device: torch.device) -> Tensor:
            nonlocal is_home
            room = self._transport.room(_HOME, num_bytes)
            is_home = room.device == device and getattr(self._transport, "keeps_rooms", True)
            return room if is_home else allocate_bytes(num_bytes, device)

        arena = Arena.adopt(model, allocate)
        if is_home:
            self._home = arena
        else:
            self._transport.free(_HOME)
        return arena

    @torch.no_grad()
    def offer(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]] | Arena,
        *,
        adapter: dict[str, Plain] | None = None,
        whole: bool = False,
        on_read: Callable[[], None] = lambda: None,
    ) -> WeightUpdate:
        """Take the weights as they are now and have them ready to be fetched. `on_read` is called as soon as they may change:
        before this returns, or, where receivers read an adopted arena itself, when the update is released or given up.

        Called by the trainer's side when a version has been trained. An adapter is a shorter iterator, with its
        configuration. `whole`: no difference, whatever the setting; a second attempt is always so.
        """
        key = f"{version}-{next(self._attempts)}"
        weights = tensors if isinstance(tensors, Arena) else dict(tensors)
        try:
            with self._lock, self._beside.working(_device(weights)):
                layout = self._lay_out(weights)
                image, room = self._take(layout, weights, key)
                if image is not weights:
                    self._beside.settle()
                    on_read()
                manifest = layout.hash(image)
                body, base = image.memory, None
                if self._payload is Payload.DELTA and adapter is None:
                    self._next.key = key
                    if not whole:
                        body, base = self._difference(image, version)
                if room is None:
                    room = self._transport.room(key, len(body))
                    room.copy_(body)
                    self._beside.settle()
                    if image is weights:
                        on_read()
                elif image is self._home:
                    self._when_over[key] = on_read
                update = WeightUpdate(
                    policy=self._policy,
                    lineage=self.lineage.id,
                    version=version,
                    base_version=base,
                    payload=Payload.DELTA if base is not None else Payload.FULL if adapter is None else Payload.ADAPTER,
                    adapter=adapter,
                    transport=self._transport.name,
                    manifest=manifest,
                )
                return self._post(update, key, room, layout.slots)
        except BaseException:
            self._free(key)
            raise

    def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        """Move the update to these receivers while they receive it; nothing to do where they come for it."""
        if _key(update) not in self._offered:
            raise SyncError(f"version {update.version} is not on offer any more")
        self._transport.push(_key(update), receivers)

    def release(self, update: WeightUpdate) -> None:
        """Called when the engines hold it. It stays to be had, for those that come late, until a newer one is held."""
        with self._lock:
            key = _key(update)
            if key not in self._offered:
                return
            if self._next.key == key:
                self._held, self._next = self._next, self._held
                self._held.version, self._next.key = update.version, ""
            self._newest, self._is_held_by_all = self._offered[key], True
            self._when_over.pop(key, _nothing)()
            self._chain = [*self._chain, self._newest] if update.payload is Payload.DELTA else []
            self._chain = self._chain[-_MOST_DELTAS:]
            kept = {_key(each) for each in (*self._chain, self._newest)}
            before = itertools.takewhile(lambda other: other != key, list(self._offered))
            for other in [other for other in before if other not in kept]:
                self._free(other)

    def abort(self, update: WeightUpdate) -> None:
        """Called when an update is given up: nobody can fetch it any more, and whoever is at it meets an error. What the
        engines held before is what they hold, but for those that had taken it; so the next travels whole."""
        self._is_held_by_all = False
        self._free(_key(update))  # without the lock: whoever holds it may wait for this

    @torch.no_grad()
    def catch_up(self, version: int | None) -> list[WeightUpdate]:
        """What brings an engine that holds `version` of this life, or nothing of it, to the newest that was released: the
        differences it missed, or all of it."""
        with self._lock:
            newest = self._newest
            if newest is None or version == newest.version:
                return []
            if newest.payload is not Payload.DELTA:
                return [newest]
            missed = [update for update in self._chain if version is not None and update.version > version]
            if missed and missed[0].base_version == version:
                return missed
            made = self._caught_up
            if made is not None and made.version == newest.version and _key(made) in self._offered:
                return [made]
            held = self._held.arena
            assert held is not None
            key = f"{newest.version}-{next(self._attempts)}"
            with self._beside.working(held.device):
                room = self._transport.room(key, held.num_bytes)
                room.copy_(held.memory)
                self._beside.settle()
            update = WeightUpdate(
                policy=self._policy,
                lineage=self.lineage.id,
                version=newest.version,
                transport=self._transport.name,
                manifest=newest.manifest,
            )
            self._caught_up = self._post(update, key, room, held.slots)
            return [self._caught_up]

    def close(self) -> None:
        """Give back what either end holds: memory, files, sockets."""
        self._transport.close()
        self._offered.clear()
        self._held, self._next, self._newest, self._caught_up, self._chain = _Image(), _Image(), None, None, []

    # The receiver's end

    def receive(self, update: WeightUpdate, incoming: Incoming) -> None:
        """Called by an engine's `load`, in a thread of its own: write the update's bytes. Whether they are what was sent is
        for the receipt to say."""
        try:
            if update.transport != self._transport.name:
                raise SyncError(f"this engine receives over {self._transport.name}")
            if update.payload is Payload.DELTA:
                self._receive_difference(update, incoming)
            else:
                self._transport.fetch(update.place, incoming, receiver=self._name)
        except SyncError as error:
            raise SyncError(f"version {update.version} over {update.transport}: {error}") from error

    def _receive_difference(self, update: WeightUpdate, incoming: Incoming) -> None:
        num_bytes = update.place.get("parcel")
        if not isinstance(num_bytes, int) or not 0 <= num_bytes <= incoming.num_bytes:
            raise SyncError(f"{num_bytes} bytes are no difference of {incoming.num_bytes}")
        parcel = _Parcel(num_bytes, incoming.check)
        self._transport.fetch(update.place, parcel, receiver=self._name)
        delta.apply(parcel.buffer, incoming.take_running())

    # Images and parcels

    def _lay_out(self, tensors: Mapping[str, Tensor] | Arena) -> _Layout:
        known = self._layout
        if isinstance(tensors, Arena):
            if known is None or known.slots is not tensors.slots:
                known = _Layout(describe(tensors.views), tensors.slots)
        else:
            manifest = describe(tensors)
            if known is None or not known.manifest.is_like(manifest):
                known = _Layout(manifest, lay_out(manifest))
        if known is not self._layout:
            self._layout = known
            self._held, self._next = _Image(), _Image()  # of another shape: there is nothing to take a difference from
        return known

    def _take(self, layout: _Layout, tensors: Mapping[str, Tensor] | Arena, key: str) -> tuple[Arena, Tensor | None]:
        """The image, and the room if that is where it lies: it does if weights travel whole and the room is on their device.
        An adopted arena is its own image, and so is one whose room is on another device."""
        device = _device(tensors)
        if self._payload is not Payload.DELTA:
            if isinstance(tensors, Arena) and tensors is self._home:
                return tensors, tensors.memory
            room = self._transport.room(key, layout.num_bytes)
            if room.device.type == device.type:
                image = Arena(layout.slots, device=room.device, allocate=lambda *_: room)
                _pack(image, tensors)
                return image, room
            self._transport.free(key)
            if isinstance(tensors, Arena):
                return tensors, None
        if self._next.arena is None or self._next.arena.device != device:
            self._next.arena = Arena(layout.slots, device=device)
        _pack(self._next.arena, tensors)
        return self._next.arena, None

    def _difference(self, image: Arena, version: int) -> tuple[Tensor, int | None]:
        """(the difference from what is held, the version that is), or the image itself where that is smaller or nothing is
        held by all."""
        held, base = self._held.arena, self._held.version
        is_possible = self._is_held_by_all and delta.DTYPES.issuperset(image.flat)
        if held is None or base is None or base >= version or not is_possible:
            return image.memory, None
        blob = delta.encode([(held.flat[dtype], image.flat[dtype]) for dtype in sorted(image.flat, key=str)])
        return (blob, base) if len(blob) < image.num_bytes else (image.memory, None)

    def _post(self, update: WeightUpdate, key: str, room: Tensor, slots: Mapping[str, Slot]) -> WeightUpdate:
        if self._home is not None and room is self._home.memory:
            place = self._transport.post(_HOME, self._home.views)
        elif update.payload is Payload.DELTA:
            place = self._transport.post(key, {_DELTA: room})
        else:
            place = self._transport.post(key, Arena(slots, device=room.device, allocate=lambda *_: room).views)
        update = replace(update, place={**place, "offer": key, "parcel": len(room)})
        self._offered[key] = update
        return update

    def _free(self, key: str) -> None:
        self._offered.pop(key, None)
        self._transport.free(key)
        self._when_over.pop(key, _nothing)()


_HOME = "home"
"""The key of an adopted arena."""
_DELTA = "delta"
"""What a difference is called among named tensors."""


def _nothing() -> None:
    """Nobody waits."""


@dataclass
class _Image:
    """Weights as they travel."""

    arena: Arena | None = None
    key: str = ""
    """Of the update that carries it."""
    version: int | None = None
    """Held by the engines as this."""


class _Layout:
    """Of every image: names, shapes and dtypes do not change."""

    def __init__(self, manifest: Manifest, slots: dict[str, Slot]) -> None:
        self.manifest, self.slots = manifest, slots
        self.num_bytes = arena_bytes(slots)
        self._inspectors: dict[torch.device, Inspector] = {}

    def hash(self, image: Arena) -> Manifest:
        inspector = self._inspectors.get(image.device)
        if inspector is None:
            inspector = self._inspectors[image.device] = Inspector(image)
        sums, odd = inspector.look(image)
        if odd is not None:
            raise SyncError(f"tensor {odd!r} holds NaN or infinity; such weights are not published")
        return self.manifest.with_checksums(sums)


class _Parcel:
    """A `Target` in the host's memory, for bytes that are not weights yet."""

    def __init__(self, num_bytes: int, check: Callable[[], None]) -> None:
        self.buffer = allocate_bytes(num_bytes, torch.device("cpu"))
        self.num_bytes, self.views, self.check = num_bytes, {_DELTA: self.buffer}, check

    def write(self, start: int, piece: Tensor) -> None:
        self.check()
        if not 0 <= start <= start + len(piece) <= self.num_bytes:
            raise SyncError(f"{len(piece)} bytes arrived for place {start} of {self.num_bytes}")
        self.buffer[start : start + len(piece)].copy_(piece)


class _Beside:
    """A stream of one's own on a GPU, so that publishing does not stand in the queue of the next step; nothing on a CPU."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def working(self, device: torch.device) -> Iterator[None]:
        """What is queued within waits for what this thread queued before."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def settle(self) -> None:
        """Wait until what was queued is done."""
        if self._stream is not None:
            self._stream.synchronize()


def _device(tensors: Mapping[str, Tensor] | Arena) -> torch.device:
    if isinstance(tensors, Arena):
        return tensors.device
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def _pack(image: Arena, tensors: Mapping[str, Tensor] | Arena) -> None:
    """Copy into an image, in as few launches as there can be."""
    if isinstance(tensors, Arena):
        image.copy_from(tensors)
    elif image.device.type == "cuda":
        torch._foreach_copy_([image.views[name] for name in tensors], list(tensors.values()))
    else:
        for name, tensor in tensors.items():
            image.views[name].copy_(tensor)


def _key(update: WeightUpdate) -> str:
    return str(update.place.get("offer", ""))
