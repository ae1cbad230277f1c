"""Fetches a buffer from several sources: when one fails, the next continues from the same byte."""

from __future__ import annotations

import re
import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.errors import SyncError
from headrace.proof import is_proven
from headrace.sync.http.head import BadHead, read_head, write_head
from headrace.sync.http.served import piece_sum
from headrace.sync.http.server import authorization, path_of
from headrace.sync.sockets import TICK, connect
from headrace.sync.transport import read_place

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.http.served import ServedBuffer
    from headrace.sync.transport import Target

_MOST_FAULTS = 3  # damaged pieces after which a source is not used again
_LONGEST_PAUSE = 1.0
_NUMBER = re.compile(r"\d{1,18}")


class _Refused(Exception):
    """This source is not used again."""


class _Late(TimeoutError):
    """The source was silent for too long: try the next one."""


@dataclass(frozen=True)
class Place:
    key: str
    bytes: int
    sources: tuple  # type: ignore[type-arg]
    """URLs to try in turn. The last is the sender's own; once it has freed the buffer, the fetch fails."""
    piece_bytes: int
    sums: tuple  # type: ignore[type-arg]
    """A checksum per piece."""
    share: float  # of the deadline, for a silent source; smaller for parents in the tree, so that they switch first

    @classmethod
    def read(cls, place: Mapping[str, Plain]) -> Place:
        read = read_place(cls, place)
        has_sums = read.piece_bytes > 0 and len(read.sums) == -(-read.bytes // read.piece_bytes)
        if not has_sums or not read.sources or not all(isinstance(source, str) for source in read.sources):
            raise SyncError("this is no place of this transport: it lacks sources, or a checksum for each piece")
        return read


@dataclass(eq=False)
class Fetch:
    """Fetches one buffer into one target. `memory` holds one piece at a time or, at a relay, is all of `into`."""

    place: Place
    target: Target
    receiver: str
    token: str
    deadline: float
    into: ServedBuffer | None
    memory: Tensor

    def __post_init__(self) -> None:
        self._is_given_up = threading.Event()
        self._at = 0  # bytes received so far
        self._source = 0
        self._moved = self._began = time.monotonic()  # when the last bytes arrived; when this source was tried
        self._refused: dict[int, str] = {}
        self._faults: dict[int, int] = {}
        self._last_failure = "nothing was tried"

    def give_up(self) -> None:
        """Make the fetch fail soon with a `SyncError`. Any thread may call this."""
        self._is_given_up.set()

    def run(self) -> None:
        """Return when everything is written. Raises `SyncError`."""
        num_failures = 0
        while self._at < self.place.bytes:
            was_at, self._began = self._at, time.monotonic()
            try:
                self._read_from(self.place.sources[self._source])
            except _Refused as error:
                self._refused[self._source] = self._last_failure = str(error)
            except (OSError, BadHead) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._last_failure = reason or type(error).__name__
            else:
                continue
            self._turn_to_next()
            num_failures = 0 if self._at > was_at else num_failures + 1
            if num_failures >= len(self.place.sources) - len(self._refused):
                self._pause(min(_LONGEST_PAUSE, TICK * num_failures))

    def _turn_to_next(self) -> None:
        num_sources, failed = len(self.place.sources), self._source
        if num_sources - 1 in self._refused and self._refused[num_sources - 1].startswith("has freed"):
            raise self._failed("the sender has freed it")
        if len(self._refused) == num_sources:
            raise self._failed("no source is left: it " + self._refused[failed])
        if time.monotonic() - self._moved > self.deadline:
            raise self._failed(self._last_failure)
        self._source = next(
            i % num_sources for i in range(failed + 1, failed + 1 + num_sources) if i % num_sources not in self._refused
        )

    def _failed(self, reason: str) -> SyncError:
        passed, size = time.monotonic() - self._moved, self.place.bytes
        return SyncError(
            f"{self.receiver}: {self.place.key!r} from {self.place.sources[self._source]}: {reason}; {self._at:,} of "
            f"{size:,} bytes had come, the last of them {passed:.1f} s ago"
        )

    def _check(self) -> None:
        """Raise if the fetch cannot go on, or cannot with this source. Called a few times a second."""
        self.target.check()
        if self._is_given_up.is_set() or (self.into is not None and self.into.is_over):
            raise self._failed("it was given up here")
        now = time.monotonic()
        silent = now - max(self._moved, self._began)
        if now - self._moved > self.deadline:
            raise self._failed(f"it has sent nothing for {silent:.1f} s")
        if silent > self._patience():
            raise _Late(f"has sent nothing for {silent:.1f} s")

    def _patience(self) -> float:
        """How long this source may be silent: its share of the deadline, or of what earlier sources have left of it."""
        num_left = len(self.place.sources) - len(self._refused)
        spent = max(0.0, self._began - self._moved)
        if num_left == 1:
            return self.deadline
        if spent < self.deadline * self.place.share / 2:
            return self.deadline * self.place.share
        return (self.deadline - spent) / num_left

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._is_given_up.wait(min(left, TICK))
            self.target.check()
            if self._is_given_up.is_set() or time.monotonic() - self._moved > self.deadline:
                raise self._failed("it was given up here" if self._is_given_up.is_set() else self._last_failure)

    def _read_from(self, source: str) -> None:
        try:
            parts = urlsplit(source)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _Refused(f"is no address: {error}") from error
        if parts.scheme != "http" or host is None or port is None:
            raise _Refused("is no address; it must be http://HOST:PORT")
        with connect(host, port, check=self._check) as connection:
            self._ask(connection, source)
            self._receive(connection)

    def _ask(self, connection: socket.socket, source: str) -> None:
        """Request the rest of the bytes; return when the socket delivers them next."""
        path, wanted = path_of(self.place.key), f"bytes={self._at}-"
        headers: dict[str, str | int] = {"Host": urlsplit(source).netloc, "Range": wanted}
        if source != self.place.sources[-1]:  # a relay may learn of the buffer later than we do
            headers["Prefer"] = f"wait={max(1, round(self._patience()))}"
        connection.sendall(write_head(f"GET {path} HTTP/1.1", headers))
        status, answer = self._read_status(connection)
        scheme, _, challenge = answer.get("www-authenticate", "").partition(" ")
        if status != "401" or scheme != "Headrace" or answer.get("content-length") != "0":
            raise _Refused("does not speak as this run does")
        nonce = secrets.token_hex(16)
        headers["Authorization"] = authorization(self.token, challenge, nonce, path, wanted)
        connection.sendall(write_head(f"GET {path} HTTP/1.1", headers))
        status, answer = self._read_status(connection)
        if status == "401":
            raise _Refused("does not know this run's token")
        length, span = answer.get("content-length", ""), answer.get("content-range", "")
        if not is_proven(answer.get("headrace-proof"), self.token, "weights", "answer", nonce, path, status, length, span):
            raise _Refused("does not prove this run's token")
        self._check_answer(status, length, span)

    def _read_status(self, connection: socket.socket) -> tuple[str, dict[str, str]]:
        first, headers = read_head(connection, self._check)
        protocol, _, rest = first.partition(" ")
        if protocol != "HTTP/1.1":
            raise _Refused("does not speak HTTP/1.1")
        return rest.partition(" ")[0], headers

    def _check_answer(self, status: str, length: str, span: str) -> None:
        if status == "410":
            raise _Refused("has freed it (410)")
        if status == "404":
            raise _Refused("does not know it (404)")
        size = self.place.bytes
        if status not in ("206", "416") or not _NUMBER.fullmatch(length):
            raise _Refused(f"answers {status}")
        if status == "416" or span != f"bytes {self._at}-{size - 1}/{size}" or int(length) != size - self._at:
            raise _Refused(
                f"has another length: {length} bytes, {span!r}, where {size - self._at:,} of {size:,} were asked for"
            )

    def _receive(self, connection: socket.socket) -> None:
        size, piece_bytes, looked = self.place.bytes, self.place.piece_bytes, time.monotonic()
        while self._at < size:
            start = self._at // piece_bytes * piece_bytes
            stop = min(start + piece_bytes, size)
            piece = self.memory[: stop - start] if self.into is None else self.memory[start:stop]
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
        if piece_sum(piece) != self.place.sums[start // self.place.piece_bytes]:
            self._at = start
            faults = self._faults[self._source] = self._faults.get(self._source, 0) + 1
            reason = f"sent damaged bytes from {start:,} on"
            raise _Refused(reason) if faults >= _MOST_FAULTS else ConnectionError(reason)
        if self.into is not None:
            self.into.advance(start + len(piece))
        try:
            self.target.write(start, piece)
        except OSError as error:  # not the source's fault
            raise self._failed(f"it cannot be written: {error}") from error
        self._moved = time.monotonic()
        self._check()
