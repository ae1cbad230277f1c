"""Fetches a buffer from several sources: when one fails, the next continues from the same byte."""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.errors import LinkError, SyncError
from headrace.proof import is_proven
from headrace.sync.http.server import BadHead, authorization, path_of, read_head, write_head
from headrace.sync.sockets import TICK, connect
from headrace.tls import fingerprint

if TYPE_CHECKING:
    import socket

    from torch import Tensor

    from headrace.sync.http.server import ServedBuffer
    from headrace.sync.http.transport import HttpTransport
    from headrace.sync.transport import Target


class _Refused(Exception):
    """This source is not used again."""


@dataclass(frozen=True)
class Place:
    key: str
    bytes: int
    sources: tuple  # type: ignore[type-arg]
    """URLs to try in turn. The last is the sender's own; once it has freed the buffer, the fetch fails."""
    share: float  # of the deadline, for a silent source; smaller for parents in the tree, so that they switch first

    def __post_init__(self) -> None:
        if not self.sources or not all(isinstance(source, str) for source in self.sources):
            raise SyncError("this is no place of this transport: it lacks sources")


class Fetch:
    """Fetches one buffer `into` memory from which a relay serves it, and piece by piece from there into the target."""

    def __init__(self, end: HttpTransport, place: Place, target: Target, receiver: str, into: ServedBuffer) -> None:
        self._place, self._target, self._receiver, self._into = place, target, receiver, into
        self._token, self._deadline, self._piece_bytes = end.token, end.deadline, end.piece_bytes
        self._fingerprint = fingerprint(end.certificate)  # empty unless sources use TLS
        self._at = 0  # bytes received so far
        self._moved = self._began = time.monotonic()  # when the last bytes arrived; when this source was tried
        self._sources: deque[str] = deque(place.sources)  # those not refused; the current one first
        self._last_failure = ""

    def run(self) -> None:
        """Return when everything is written. Raises `SyncError`."""
        num_failures = 0
        while self._at < self._place.bytes:
            was_at, self._began = self._at, time.monotonic()
            try:
                self._check()
                self._read_from(self._sources[0])
            except _Refused as error:
                self._refuse(str(error))
            except (OSError, BadHead) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._last_failure = f", and before: {reason or type(error).__name__}"
                self._sources.rotate(-1)
            num_failures = 0 if self._at > was_at else num_failures + 1
            if num_failures >= len(self._sources):
                time.sleep(TICK)

    def _refuse(self, reason: str) -> None:
        source = self._sources[0]
        if source == self._place.sources[-1] and reason.startswith("has freed"):
            raise self._failed("the sender has freed it")
        if len(self._sources) == 1:
            raise self._failed("no source is left: it " + reason)
        self._sources.popleft()

    def _failed(self, reason: str, kind: type[SyncError] = SyncError) -> SyncError:
        standing = f"{self._at:,} of {self._place.bytes:,} bytes had come"
        passed = time.monotonic() - self._moved
        source = f"{self._receiver}: {self._place.key!r} from {self._sources[0]}"
        return kind(f"{source}: {reason}; {standing}, the last of them {passed:.1f} s ago")

    def _check(self) -> None:
        """Raise if the fetch cannot go on, or cannot with this source. Called a few times a second."""
        self._target.check()
        if self._into.is_over:
            raise self._failed("it was given up here")
        now = time.monotonic()
        silent = now - max(self._moved, self._began)
        if now - self._moved > self._deadline:
            raise self._failed(f"it has sent nothing for {silent:.1f} s{self._last_failure}", LinkError)
        left = self._deadline - max(0.0, self._began - self._moved)  # by earlier sources
        if len(self._sources) > 1 and silent > left * self._place.share:
            raise TimeoutError(f"has sent nothing for {silent:.1f} s")

    def _read_from(self, source: str) -> None:
        try:
            parts = urlsplit(source)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _Refused(f"is no address: {error}") from error
        scheme = "https" if self._fingerprint else "http"
        if parts.scheme != scheme or host is None or port is None:
            raise _Refused(f"is no address; it must be {scheme}://HOST:PORT")
        with connect(host, port, check=self._check, fingerprint=self._fingerprint) as connection:
            self._ask(connection, parts.netloc)
            self._receive(connection)

    def _ask(self, connection: socket.socket, host: str) -> None:
        """Request the rest of the bytes; return when the socket delivers them next."""
        path, wanted, nonce = path_of(self._place.key), f"bytes={self._at}-", secrets.token_hex(16)
        headers: dict[str, str | int] = {"Host": host, "Range": wanted}
        status, answer = self._request(connection, path, headers)
        scheme, _, challenge = answer.get("www-authenticate", "").partition(" ")
        if status != "401" or scheme != "Headrace" or answer.get("content-length") != "0":
            raise _Refused("does not speak as this run does")
        headers["Authorization"] = authorization(self._token, challenge, nonce, path, wanted)
        status, answer = self._request(connection, path, headers)
        if status == "401":
            raise _Refused("does not know this run's token")
        length, span = answer.get("content-length", ""), answer.get("content-range", "")
        parts = ("weights", "answer", nonce, path, status, length, span)
        if not is_proven(answer.get("headrace-proof"), self._token, *parts):
            raise _Refused("does not prove this run's token")
        size = self._place.bytes
        if status not in ("206", "416"):
            raise _Refused({"410": "has freed it (410)", "404": "does not know it (404)"}.get(status, f"answers {status}"))
        if (length, span) != (str(size - self._at), f"bytes {self._at}-{size - 1}/{size}"):
            raise _Refused(f"has another length: {length} bytes, {span!r}, where {size - self._at} of {size} were asked for")

    def _request(self, connection: socket.socket, path: str, headers: dict[str, str | int]) -> tuple[str, dict[str, str]]:
        connection.sendall(write_head(f"GET {path} HTTP/1.1", headers))
        first, answer = read_head(connection, self._check)
        if len(first) < 2 or first[0] != "HTTP/1.1":
            raise _Refused("does not speak HTTP/1.1")
        return first[1], answer

    def _receive(self, connection: socket.socket) -> None:
        size, piece_bytes, looked = self._place.bytes, self._piece_bytes, time.monotonic()
        while self._at < size:
            start = self._at // piece_bytes * piece_bytes
            stop = min(start + piece_bytes, size)
            piece = self._into.bytes[start:stop]
            view = piece.numpy().data
            while self._at < stop:
                try:
                    num_come = connection.recv_into(view[self._at - start :])
                except TimeoutError:
                    self._check()
                    continue
                if not num_come:
                    raise ConnectionError("closed the connection")
                self._at, self._moved = self._at + num_come, time.monotonic()
                if self._moved - looked > TICK:  # even a trickle is progress, but the target may have given up
                    self._check()
                    looked = self._moved
            self._finish(start, piece)

    def _finish(self, start: int, piece: Tensor) -> None:
        try:
            self._target.write(start, piece)
        except OSError as error:  # not the source's fault
            raise self._failed(f"it cannot be written: {error}") from error
        self._moved = time.monotonic()
        self._check()
        self._into.advance(start + len(piece))  # last: the next update replaces a buffer that is full
