"""Gets one parcel from the first of several sources that gives it, going on from where it is when one fails."""

from __future__ import annotations

import errno
import os
import re
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.errors import SyncError
from headrace.proof import is_proven
from headrace.sync.http.head import TICK, BadHead, read_head, write_head
from headrace.sync.http.parcels import piece_sum
from headrace.sync.http.server import authorization, path_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.http.parcels import Parcel
    from headrace.sync.transport import Target

_MOST_FAULTS = 3
"""Damaged pieces from one source before it is refused."""
_LONGEST_PAUSE = 1.0
_NUMBER = re.compile(r"\d{1,18}")


class _Refused(Exception):
    """A source that is not asked again for this parcel."""


class _Late(TimeoutError):
    """A source that has said nothing for too long: another gets its chance."""


@dataclass(frozen=True)
class Place:
    """Where a parcel is found; what `post` says, checked."""

    key: str
    num_bytes: int
    sources: tuple[str, ...]
    """URLs of servers. The last is the sender's own: what it has freed is given up."""
    piece_bytes: int
    sums: tuple[int, ...]
    """Of each piece."""
    share: float
    """Of the deadline, that a source gets before the next is tried. A parent in a tree has a smaller one than its children,
    which so do not leave it while it looks for another source itself."""

    @classmethod
    def read(cls, place: Mapping[str, Plain]) -> Place:
        key, num_bytes, sources = place.get("key"), place.get("bytes"), place.get("sources")
        piece_bytes, sums, share = place.get("piece_bytes"), place.get("sums"), place.get("share", 0.5)
        if (
            not isinstance(key, str)
            or not isinstance(num_bytes, int)
            or not isinstance(piece_bytes, int)
            or not isinstance(sources, list | tuple)
            or not isinstance(sums, list | tuple)
            or not isinstance(share, float)
            or piece_bytes < 1
            or len(sums) != -(-num_bytes // piece_bytes)
            or not sources
            or not all(isinstance(one, int) for one in sums)
        ):
            raise SyncError("this is no place of a parcel that travels over HTTP")
        urls = tuple(str(source) for source in sources)
        return cls(key, num_bytes, urls, piece_bytes, tuple(s for s in sums if isinstance(s, int)), share)

    def as_plain(self) -> dict[str, Plain]:
        return {
            "transport": "http",
            "key": self.key,
            "bytes": self.num_bytes,
            "sources": list(self.sources),
            "piece_bytes": self.piece_bytes,
            "sums": list(self.sums),
            "share": self.share,
        }


class Fetch:
    """One parcel on its way to one target. `give_up` may come from any thread."""

    def __init__(
        self, place: Place, target: Target, *, receiver: str, token: str, deadline: float, into: Parcel | None, memory: Tensor
    ) -> None:
        self.place, self._target, self._receiver = place, target, receiver
        self._token, self._deadline = token, deadline
        self._into, self._memory = into, memory
        self._is_given_up = threading.Event()
        self._at = 0
        """Bytes that have come."""
        self._source = 0
        self._moved = self._began = time.monotonic()
        """When bytes came last; when the present source was first asked."""
        self._refused: dict[int, str] = {}
        self._faults: dict[int, int] = {}
        self._last_word = "nothing was tried"

    def give_up(self) -> None:
        """The fetch ends with a `SyncError`, shortly."""
        self._is_given_up.set()

    def run(self) -> None:
        """Until all of it is written, or with a `SyncError`."""
        num_tries_in_vain = 0
        while self._at < self.place.num_bytes:
            was_at, self._began = self._at, time.monotonic()
            try:
                self._read_from(self.place.sources[self._source])
            except _Refused as error:
                self._refused[self._source] = self._last_word = str(error)
            except (OSError, BadHead) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._last_word = reason or type(error).__name__
            else:
                continue
            self._turn_to_next()
            num_tries_in_vain = 0 if self._at > was_at else num_tries_in_vain + 1
            if num_tries_in_vain >= len(self.place.sources) - len(self._refused):
                self._pause(min(_LONGEST_PAUSE, TICK * num_tries_in_vain))

    def _turn_to_next(self) -> None:
        num_sources, failed = len(self.place.sources), self._source
        if num_sources - 1 in self._refused and self._refused[num_sources - 1].startswith("has freed"):
            raise self._failed("the sender has freed it")
        if len(self._refused) == num_sources:
            raise self._failed("no source is left: it " + self._refused[failed])
        if time.monotonic() - self._moved > self._deadline:
            raise self._failed(self._last_word)
        self._source = next(
            i % num_sources for i in range(failed + 1, failed + 1 + num_sources) if i % num_sources not in self._refused
        )

    def _failed(self, reason: str) -> SyncError:
        passed, size = time.monotonic() - self._moved, self.place.num_bytes
        return SyncError(
            f"{self._receiver}: parcel {self.place.key!r} from {self.place.sources[self._source]}: {reason}; {self._at:,} of "
            f"{size:,} bytes had come, the last of them {passed:.1f} s ago"
        )

    def _look(self) -> None:
        """Called a few times a second while waiting for a source."""
        self._target.check()
        if self._is_given_up.is_set() or (self._into is not None and self._into.is_over):
            raise self._failed("it was given up here")
        now = time.monotonic()
        silent = now - max(self._moved, self._began)
        if now - self._moved > self._deadline:
            raise self._failed(f"it has sent nothing for {silent:.1f} s")
        if silent > self._patience():
            raise _Late(f"has sent nothing for {silent:.1f} s")

    def _patience(self) -> float:
        """How long the present source may be silent: a share of the deadline, or of what others have left of it."""
        num_left = len(self.place.sources) - len(self._refused)
        spent = max(0.0, self._began - self._moved)
        if num_left == 1:
            return self._deadline
        if spent < self._deadline * self.place.share / 2:
            return self._deadline * self.place.share
        return (self._deadline - spent) / num_left

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._is_given_up.wait(min(left, TICK))
            self._target.check()
            if self._is_given_up.is_set() or time.monotonic() - self._moved > self._deadline:
                raise self._failed("it was given up here" if self._is_given_up.is_set() else self._last_word)

    def _read_from(self, source: str) -> None:
        with self._connect(source) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(TICK)
            self._ask(connection, source)
            self._receive(connection)

    def _connect(self, source: str) -> socket.socket:
        try:
            parts = urlsplit(source)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _Refused(f"is no address: {error}") from error
        if parts.scheme != "http" or host is None or port is None:
            raise _Refused("is no address; it must be http://HOST:PORT")
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)  # so that the target is looked at while a host does not answer
            code = connection.connect_ex(address)
            with selectors.DefaultSelector() as selector:
                selector.register(connection, selectors.EVENT_WRITE)
                while code == errno.EINPROGRESS:
                    self._look()
                    if selector.select(TICK):
                        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
        except BaseException:
            connection.close()
            raise
        return connection

    def _ask(self, connection: socket.socket, source: str) -> None:
        """Request the bytes from here on; returns when they are next to come from the socket."""
        path, wanted = path_of(self.place.key), f"bytes={self._at}-"
        headers: dict[str, str | int] = {"Host": urlsplit(source).netloc, "Range": wanted}
        if source != self.place.sources[-1]:  # a relay may hear of the parcel later than we did
            headers["Prefer"] = f"wait={max(1, round(self._patience()))}"
        connection.sendall(write_head(f"GET {path} HTTP/1.1", headers))
        status, answer = self._read_status(connection)
        scheme, _, challenge = answer.get("www-authenticate", "").partition(" ")
        if status != "401" or scheme != "Headrace" or answer.get("content-length") != "0":
            raise _Refused("does not speak as this run does")
        nonce = secrets.token_hex(16)
        headers["Authorization"] = authorization(self._token, challenge, nonce, path, wanted)
        connection.sendall(write_head(f"GET {path} HTTP/1.1", headers))
        status, answer = self._read_status(connection)
        if status == "401":
            raise _Refused("does not know this run's token")
        length, span = answer.get("content-length", ""), answer.get("content-range", "")
        if not is_proven(answer.get("headrace-proof"), self._token, "parcels", "answer", nonce, path, status, length, span):
            raise _Refused("does not prove this run's token")
        self._check_answer(status, length, span)

    def _read_status(self, connection: socket.socket) -> tuple[str, dict[str, str]]:
        first, headers = read_head(connection, self._look)
        protocol, _, rest = first.partition(" ")
        if protocol != "HTTP/1.1":
            raise _Refused("does not speak HTTP/1.1")
        return rest.partition(" ")[0], headers

    def _check_answer(self, status: str, length: str, span: str) -> None:
        if status == "410":
            raise _Refused("has freed it (410)")
        if status == "404":
            raise _Refused("does not know it (404)")
        size = self.place.num_bytes
        if status not in ("206", "416") or not _NUMBER.fullmatch(length):
            raise _Refused(f"answers {status}")
        if status == "416" or span != f"bytes {self._at}-{size - 1}/{size}" or int(length) != size - self._at:
            raise _Refused(
                f"has another length: {length} bytes, {span!r}, where {size - self._at:,} of {size:,} were asked for"
            )

    def _receive(self, connection: socket.socket) -> None:
        size, piece_bytes, looked = self.place.num_bytes, self.place.piece_bytes, time.monotonic()
        while self._at < size:
            start = self._at // piece_bytes * piece_bytes
            stop = min(start + piece_bytes, size)
            piece = self._memory[: stop - start] if self._into is None else self._memory[start:stop]
            view = piece.numpy().data
            while self._at < stop:
                try:
                    num_come = connection.recv_into(view[self._at - start :])
                except TimeoutError:
                    self._look()
                    continue
                if not num_come:
                    raise ConnectionError("closed the connection")
                self._at, self._moved = self._at + num_come, time.monotonic()
                if self._moved - looked > TICK:  # bytes that trickle in are progress, and the target may have given up
                    self._look()
                    looked = self._moved
            self._finish(start, piece)

    def _finish(self, start: int, piece: Tensor) -> None:
        """A piece is whole: check it, let others have it, write it."""
        if piece_sum(piece) != self.place.sums[start // self.place.piece_bytes]:
            self._at = start
            faults = self._faults[self._source] = self._faults.get(self._source, 0) + 1
            reason = f"sent damaged bytes from {start:,} on"
            raise _Refused(reason) if faults >= _MOST_FAULTS else ConnectionError(reason)
        if self._into is not None:
            self._into.advance(start + len(piece))
        try:
            self._target.write(start, piece)
        except OSError as error:  # not to be taken for one of the source's
            raise self._failed(f"it cannot be written: {error}") from error
        self._moved = time.monotonic()
        self._look()
