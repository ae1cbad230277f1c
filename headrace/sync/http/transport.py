"""The transport over HTTP to engines on other hosts: resumable, and relayed from engine to engine.

The sender serves a buffer from host memory. A relay serves what it has received while the rest still arrives. `relay_places`
decides who reads from whom, so that a host gets one copy over the network, and no link carries more than a few:

    trainer ──► engine 0 of host 0 ──► engine 0 of host 2, …     sources: engine 0 of host 0, then the trainer
       │            └──► engine 1 of host 0 ──► engine 3 of host 0, …
       └──────► engine 0 of host 1 …

When a source fails or falls silent, the receiver requests the rest from the next one in its list. Wrong bytes are found as
with every transport: an engine compares the checksums of what it has written with the manifest's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from headrace.errors import SyncError
from headrace.sync.http.client import Fetch, Place
from headrace.sync.http.server import BufferServer, ServedBuffers
from headrace.sync.transport import Transport, read_place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Part, Plain
    from headrace.sync.http.server import ServedBuffer
    from headrace.sync.transport import Target, TransportConfig

PIECE_BYTES = 4 << 20


def relay_places(place: Mapping[str, Plain], urls: Sequence[str], *, fan_out: int = 2) -> list[dict[str, Plain]]:
    """Return a place for each receiver, given their relay URLs. One engine of each host reads from the trainer or from another
    host, in a tree; the others of that host are a tree below it. So each host gets one copy over the network, and no node
    serves more than `fan_out` on its own host and `fan_out` on others.

    >>> [p["sources"] for p in relay_places({"key": "k", "bytes": 0, "sources": ["http://t:1"]}, ["http://a:1", "http://a:2"])]
    [['http://t:1'], ['http://a:1', 'http://t:1']]
    """
    origin = cast("list[Plain]", place["sources"])
    lines: dict[int, list[Plain]] = {}
    hosts: dict[str | None, list[int]] = {(home := urlsplit(str(origin[0])).hostname): []}
    for index, url in enumerate(urls):
        hosts.setdefault(urlsplit(url).hostname, []).append(index)

    def grow(members: Sequence[int], root: list[Plain]) -> None:
        for at, index in enumerate(members):
            parent = members[at // fan_out - 1] if at >= fan_out else None
            lines[index] = root if parent is None else [urls[parent], *lines[parent]]

    grow(hosts.pop(home), origin)
    grow([first for first, *_ in hosts.values()], origin)
    for first, *others in hosts.values():
        grow(others, [urls[first], *lines[first]])
    deepest = max(map(len, lines.values()), default=1)
    shares = {index: len(line) / (deepest + 1) for index, line in lines.items()}
    return [{**place, "sources": list(lines[index]), "share": shares[index]} for index in range(len(urls))]


class HttpTransport(Transport):
    """The sender serves from its first post on; a receiver serves if it is a relay."""

    name = "http"
    listens = True
    between_hosts = name

    def __init__(
        self,
        *,
        token: str,
        host: str = "127.0.0.1",
        deadline: float = 60.0,
        is_relay: bool = False,
        piece_bytes: int = PIECE_BYTES,
        certificate: str = "",
    ) -> None:
        """`host` is the address at which this end listens and others reach it. With a certificate all of it is encrypted."""
        if not token:
            raise ValueError("token is empty: weights are only served to peers that know the run's token")
        self.token, self.deadline, self.certificate, self.piece_bytes = token, deadline, certificate, piece_bytes
        self._host, self._is_relay = host, is_relay
        self._buffers = ServedBuffers()
        self._server: BufferServer | None = None
        if is_relay:
            self._serve()

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> HttpTransport:
        token, host, deadline, certificate = config.token, config.host, config.deadline, config.certificate
        return cls(token=token, host=host, deadline=deadline, is_relay=not is_sender, certificate=certificate)

    @classmethod
    def routes(cls, part: Part, relays: Sequence[str]) -> list[Part]:
        return [replace(part, place=place) for place in relay_places(part.place, relays)]

    @property
    def relay_url(self) -> str:
        return "" if self._server is None else self._server.url

    @property
    def bytes_served(self) -> int:
        return 0 if self._server is None else self._server.bytes_served

    # The sender's end

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        return self._buffers.add(key, num_bytes, is_offered=False).bytes

    def lend(self, key: str, memory: Tensor) -> None:
        """In place of `allocate`: serve the caller's own memory, 1-D uint8, already filled."""
        self._buffers.add(key, len(memory), is_offered=False, lent=memory)

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        buffer = self._buffers.offer(key)
        return {"key": key, "bytes": buffer.num_bytes, "sources": [self._serve().url], "share": 0.5}

    def free(self, key: str) -> None:
        """At either end: disconnect peers that are reading the buffer, and fail this end's fetch of it."""
        self._buffers.drop(self._buffers.held.get(key))

    def close(self) -> None:
        """Return when no thread, socket or buffer is left but those of a running fetch, which fails at its next check."""
        self._buffers.close()
        if self._server is not None:
            self._server.close()

    def _serve(self) -> BufferServer:
        if self._server is None:
            wait = self.deadline if self._is_relay else 0.0  # a relay may learn of a buffer later than its readers
            token, host, deadline = self.token, self._host, self.deadline
            self._server = BufferServer(
                self._buffers, token=token, host=host, deadline=deadline, wait=wait, certificate=self.certificate
            )
        return self._server

    # The receiver's end

    def prepare(self, places: Sequence[Mapping[str, Plain]]) -> None:
        """An update replaces earlier ones, which a relay has served until now."""
        keys = {place.get("key") for place in places}
        with self._buffers.changed:
            for key, earlier in list(self._buffers.held.items()):
                if earlier.num_come == earlier.num_bytes and key.partition(" for ")[0] not in keys:
                    self._buffers.drop(earlier)

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        there = read_place(Place, place)
        if there.bytes != target.num_bytes:
            raise SyncError(f"{receiver}: {there.key!r} has {there.bytes:,} bytes, and {target.num_bytes:,} are expected")
        buffer = self._collect(there, receiver)
        try:
            with buffer.in_use():
                Fetch(self, there, target, receiver, buffer).run()
        except BaseException:
            self._buffers.drop(buffer)
            raise

    def _collect(self, place: Place, receiver: str) -> ServedBuffer:
        """Return the buffer that collects a part of an update, and from which a relay serves it."""
        with self._buffers.changed:
            is_first = place.key not in self._buffers.held  # else another engine here serves it already
            key = place.key if is_first else f"{place.key} for {receiver}"
            return self._buffers.add(key, place.bytes, is_offered=is_first)
