"""The transport over HTTP to engines on other hosts: resumable, and relayed from engine to engine.

The sender serves a buffer from host memory. A relay serves what it has received while the rest still arrives. `relay_places`
decides who reads from whom, so that no link carries more than a few copies:

    trainer ──► engine 0 ──► engine 2        sources of engine 2: engine 0, then the trainer
       │            └──────► engine 3
       └──────► engine 1 ──► engine 4 …

Each receiver checks every piece against the checksums in its place before writing or relaying it. When a source fails, falls
silent or sends wrong bytes, the receiver requests the rest from the next one in its list.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.sync.buffers import Spare, TorchBuffer
from headrace.sync.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.http.client import Fetch, Place
    from headrace.sync.http.served import ServedBuffer
    from headrace.sync.http.server import BufferServer
    from headrace.sync.transport import Target, TransportConfig

PIECE_BYTES = 4 << 20


def relay_places(place: Mapping[str, Plain], urls: Sequence[str], *, fan_out: int = 2) -> list[dict[str, Plain]]:
    """Return a place for each receiver, given their relay URLs: a tree in which no node serves more than `fan_out` others.

    >>> [p["sources"] for p in relay_places({"key": "k", "bytes": 0, "sources": ["http://t:1"]}, ["a", "b", "c"])]
    [['http://t:1'], ['http://t:1'], ['a', 'http://t:1']]
    """
    if fan_out < 1:
        raise ValueError(f"fan_out = {fan_out}: must be at least 1")
    origin = place["sources"]
    assert isinstance(origin, list), "as `post` gave it"
    lines: list[list[Plain]] = []
    for index in range(len(urls)):
        parent = index // fan_out - 1
        lines.append(origin if parent < 0 else [urls[parent], *lines[parent]])
    deepest = len(lines[-1]) if lines else 1
    return [{**place, "sources": list(line), "share": len(line) / (deepest + 1)} for line in lines]


class HttpTransport(Transport):
    """The sender serves from its first post on; a receiver serves if it is a relay."""

    name = "http"
    crosses_hosts = True
    listens = True

    def __init__(
        self,
        *,
        token: str,
        host: str = "127.0.0.1",
        deadline: float = 60.0,
        is_relay: bool = False,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`host` is the address at which this end listens and others reach it."""
        from headrace.sync.http.served import ServedBuffers

        if not token:
            raise ValueError("token is empty: weights are only served to peers that know the run's token")
        self._token, self._host, self._deadline = token, host, deadline
        self._is_relay, self._piece_bytes = is_relay, piece_bytes
        self._buffers = ServedBuffers()
        self._pieces = Spare(TorchBuffer)
        self._fetching: set[Fetch] = set()
        self._relaying: set[str] = set()  # keys that are arriving and being relayed
        self._changed = threading.Condition()
        self._is_closed = False
        self._server: BufferServer | None = None
        if is_relay:
            self._serve()

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> HttpTransport:
        return cls(token=config.token, host=config.host, deadline=config.deadline, is_relay=not is_sender)

    @classmethod
    def routes(cls, place: Mapping[str, Plain], relays: Sequence[str]) -> list[Mapping[str, Plain]]:
        return list(relay_places(place, relays))

    @property
    def relay_url(self) -> str:
        return "" if self._server is None else self._server.url

    @property
    def bytes_served(self) -> int:
        """Total over all peers."""
        return 0 if self._server is None else self._server.bytes_served

    # The sender's end

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        return self._buffers.add(key, num_bytes, is_offered=False).bytes

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        from headrace.sync.http.served import piece_sum

        url = self._serve().url
        buffer = self._buffers.offer(key)
        with buffer.in_use():
            sums = [piece_sum(piece) for piece in buffer.bytes.split(self._piece_bytes) if len(piece)]
        place: dict[str, Plain] = {"key": key, "bytes": buffer.num_bytes, "sources": [url], "share": 0.5}
        return place | {"piece_bytes": self._piece_bytes, "sums": list(sums)}

    def free(self, key: str) -> None:
        """At either end: disconnect peers that are reading the buffer, and fail this end's fetch of it."""
        with self._changed:
            for fetch in self._fetching:
                if fetch.place.key == key:
                    fetch.give_up()
        self._buffers.drop(key)

    def close(self) -> None:
        """Return when no thread, socket or buffer is left."""
        with self._changed:
            self._is_closed = True
            for fetch in self._fetching:
                fetch.give_up()
        self._buffers.close()
        if self._server is not None:
            self._server.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._fetching, self._deadline)
        self._pieces.clear()

    def _serve(self) -> BufferServer:
        from headrace.sync.http.server import BufferServer

        with self._changed:
            if self._is_closed:
                raise SyncError("the transport is closed")
            if self._server is None:
                self._server = BufferServer(self._buffers, token=self._token, host=self._host, deadline=self._deadline)
            return self._server

    # The receiver's end

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        from headrace.sync.http.client import Place

        there = Place.read(place)
        if there.bytes != target.num_bytes:
            raise SyncError(f"{receiver}: {there.key!r} has {there.bytes:,} bytes, and {target.num_bytes:,} are expected")
        with self._changed:
            coming = set(self._relaying)
            is_relayed = self._is_relay and there.key not in coming  # else another engine here relays it already
            if is_relayed:
                self._relaying.add(there.key)
        if not is_relayed:
            return self._run(there, target, receiver, into=None)
        try:
            self._relay(there, target, receiver, coming=coming)
        finally:
            with self._changed:
                self._relaying.discard(there.key)

    def _relay(self, place: Place, target: Target, receiver: str, *, coming: set[str]) -> None:
        for key in self._buffers.held():
            if key not in coming:
                self._buffers.drop(key)
        buffer = self._buffers.add(place.key, place.bytes, is_offered=True)
        try:
            with buffer.in_use():
                self._run(place, target, receiver, into=buffer)
        except BaseException:
            self._buffers.drop(place.key, only=buffer)
            raise

    def _run(self, place: Place, target: Target, receiver: str, *, into: ServedBuffer | None) -> None:
        from headrace.sync.http.client import Fetch

        piece = self._pieces.take(min(place.piece_bytes, place.bytes)) if into is None else into.buffer
        memory = piece.tensor if into is None else into.bytes
        fetch = Fetch(place, target, receiver, self._token, self._deadline, into=into, memory=memory)
        with self._changed:
            if self._is_closed:
                raise SyncError("the transport is closed")
            self._fetching.add(fetch)
        try:
            fetch.run()
        finally:
            if into is None:
                self._pieces.give(piece)
            with self._changed:
                self._fetching.discard(fetch)
                self._changed.notify_all()
