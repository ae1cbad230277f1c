"""Parcels to engines on other hosts, over HTTP: in ranges, resumed where they broke off, relayed from engine to engine.

The sender keeps a parcel in host memory and serves it. A receiver that is a relay serves what it has received of it, while the
rest still comes; `relay_places` says who reads from whom, so that no link carries more than a few copies:

    trainer ──► engine 0 ──► engine 2        sources of engine 2: engine 0, then the trainer
       │            └──────► engine 3
       └──────► engine 1 ──► engine 4 …

Each receiver checks every piece against the sums that came with the place before it writes it or hands it on. When a source
fails, falls silent or sends something else, the next in the list is asked for the bytes from there on.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.sync.http.client import Fetch, Place
from headrace.sync.http.parcels import Memory, Parcel, Shelf, piece_sum
from headrace.sync.http.server import ParcelServer
from headrace.sync.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target, TransportConfig

PIECE_BYTES = 4 << 20


def relay_places(place: Mapping[str, Plain], urls: Sequence[str], *, fan_out: int = 2) -> list[dict[str, Plain]]:
    """A place for each receiver, given the addresses of all of them: a tree in which nobody serves more than `fan_out`.

    >>> [p["sources"] for p in relay_places({"key": "k", "bytes": 0, "sources": ["http://t:1"]}, ["a", "b", "c"])]
    [['http://t:1'], ['http://t:1'], ['a', 'http://t:1']]
    """
    if fan_out < 1:
        raise ValueError(f"fan_out = {fan_out}: must be at least 1")
    origin = list(_sources(place))
    lines: list[list[str]] = []
    for index in range(len(urls)):
        parent = index // fan_out - 1
        lines.append(origin if parent < 0 else [urls[parent], *lines[parent]])
    deepest = len(lines[-1]) if lines else 1
    return [{**place, "sources": list(line), "share": len(line) / (deepest + 1)} for line in lines]


def _sources(place: Mapping[str, Plain]) -> Sequence[str]:
    sources = place.get("sources")
    if not isinstance(sources, list | tuple) or not sources:
        raise SyncError("this is no place of a parcel that travels over HTTP")
    return [str(source) for source in sources]


class HttpTransport(Transport):
    """A `Transport` between hosts. The sender's end serves once a parcel is posted; a receiver's serves if it is a relay.

    `host` and `port` are where it listens (0 takes a free port), `advertise` the name that others reach it by where that is
    another. `deadline` is how many seconds may pass without progress.
    """

    name = "http"
    crosses_hosts = True
    listens = True

    def __init__(
        self,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        deadline: float = 60.0,
        is_relay: bool = False,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        if not token:
            raise ValueError("token is empty: parcels are only given to who knows the run's token")
        if host in ("", "0.0.0.0", "::") and not advertise:
            raise ValueError(f"host = {host!r}: say in `advertise` which address others reach this host by")
        self._token, self._host, self._port, self._advertise = token, host, port, advertise
        self._deadline, self._is_relay, self._piece_bytes = deadline, is_relay, piece_bytes
        self._shelf = Shelf()
        self._pieces = Memory()
        self._fetching: set[Fetch] = set()
        self._relaying: set[str] = set()
        """Keys of parcels that are coming and handed on meanwhile."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._server: ParcelServer | None = None
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
        """Where others get what this end has; empty while it serves nothing."""
        return "" if self._server is None else self._server.url

    @property
    def bytes_served(self) -> int:
        """Of parcels, from here, to everybody."""
        return 0 if self._server is None else self._server.bytes_served

    # The sender's end

    def allocate(self, key: str, num_bytes: int) -> Tensor:
        return self._shelf.add(key, num_bytes, is_offered=False).bytes

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        url = self._serve().url
        parcel = self._shelf.offer(key)
        with parcel.in_use():
            sums = tuple(piece_sum(piece) for piece in parcel.bytes.split(self._piece_bytes) if len(piece))
        return Place(key, parcel.num_bytes, (url,), self._piece_bytes, sums, 0.5).as_plain()

    def push(self, key: str, receivers: Sequence[str]) -> None:
        """Receivers come for it themselves."""

    def free(self, key: str) -> None:
        """At either end. Whoever is reading the parcel from here is cut off, and a fetch of it here is given up."""
        with self._changed:
            for fetch in self._fetching:
                if fetch.place.key == key:
                    fetch.give_up()
        self._shelf.drop(key)

    def close(self) -> None:
        """Returns when no thread, socket or buffer of it is left."""
        with self._changed:
            self._is_closed = True
            for fetch in self._fetching:
                fetch.give_up()
        self._shelf.close()
        if self._server is not None:
            self._server.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._fetching, self._deadline)
        self._pieces.clear()

    def _serve(self) -> ParcelServer:
        with self._changed:
            if self._is_closed:
                raise SyncError("the transport is closed")
            if self._server is None:
                self._server = ParcelServer(
                    self._shelf,
                    token=self._token,
                    host=self._host,
                    port=self._port,
                    advertise=self._advertise,
                    deadline=self._deadline,
                )
            return self._server

    # The receiver's end

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        found = Place.read(place)
        if found.num_bytes != target.num_bytes:
            raise SyncError(
                f"{receiver}: parcel {found.key!r} has {found.num_bytes:,} bytes, and {target.num_bytes:,} are expected"
            )
        if not self._is_relay:
            return self._run(found, target, receiver, into=None)
        with self._changed:
            coming, is_first = set(self._relaying), found.key not in self._relaying
            self._relaying.add(found.key)
        if not is_first:  # it comes for another engine of this process already, and that one is handed on
            return self._run(found, target, receiver, into=None)
        try:
            self._relay(found, target, receiver, coming=coming)
        finally:
            with self._changed:
                self._relaying.discard(found.key)

    def _relay(self, place: Place, target: Target, receiver: str, *, coming: set[str]) -> None:
        for key in self._shelf.held():
            if key not in coming:
                self._shelf.drop(key)
        parcel = self._shelf.add(place.key, place.num_bytes, is_offered=True)
        try:
            with parcel.in_use():
                self._run(place, target, receiver, into=parcel)
        except BaseException:
            self._shelf.drop(place.key, only=parcel)
            raise

    def _run(self, place: Place, target: Target, receiver: str, *, into: Parcel | None) -> None:
        memory = self._pieces.take(min(place.piece_bytes, place.num_bytes)) if into is None else into.bytes
        fetch = Fetch(place, target, receiver=receiver, token=self._token, deadline=self._deadline, into=into, memory=memory)
        with self._changed:
            if self._is_closed:
                raise SyncError("the transport is closed")
            self._fetching.add(fetch)
        try:
            fetch.run()
        finally:
            if into is None:
                self._pieces.give(memory)
            with self._changed:
                self._fetching.discard(fetch)
                self._changed.notify_all()
