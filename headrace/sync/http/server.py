"""Offers the parcels of a shelf over HTTP: ranges of them, as far as they have come, to who proves the run's token.

A connection's first request is answered 401 with a challenge; the proof goes with the next one. So the token never travels, a
request that was overheard is good for nothing, and no clocks are compared. The answers are proven in turn.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from headrace.errors import SyncError
from headrace.proof import is_proven, proof
from headrace.sync.http.head import TICK, BadHead, LongHead, read_head, write_head

if TYPE_CHECKING:
    from headrace.sync.http.parcels import Parcel, Shelf

_HEAD_SECONDS = 10.0
_SEND_BYTES = 1 << 20
_MOST_CONNECTIONS = 256
_MOST_REQUESTS = 4
"""On one connection."""
_ROOT = "/parcels/"
_SCHEME = "Headrace"
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
_WAIT = re.compile(r"wait=(\d{1,6})")


def path_of(key: str) -> str:
    return _ROOT + quote(key, safe="")


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def authorization(token: str, challenge: str, nonce: str, path: str, wanted: str) -> str:
    """The header that answers a challenge."""
    return f"{_SCHEME} {nonce} {proof(token, 'parcels', 'GET', challenge, nonce, path, wanted)}"


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    nonce: str
    """What the asker wants to see proven, if it has proven itself."""


class ParcelServer:
    """A thread that accepts, and one for each connection."""

    def __init__(self, shelf: Shelf, *, token: str, host: str, port: int, advertise: str, deadline: float) -> None:
        self._shelf, self._token, self._deadline = shelf, token, deadline
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
        except OSError as error:
            raise SyncError(f"port {port} on {host} cannot be used ({error.strerror}); choose another") from error
        self._listening.settimeout(TICK)
        self.url = url_of(advertise or host, self._listening.getsockname()[1])
        self.bytes_served = 0
        """Of parcels, to everybody."""
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._threads: set[threading.Thread] = set()
        """Those that answer; only the one that accepts touches this, until it has ended."""
        self._accepting = threading.Thread(target=self._accept, name="parcels-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Whoever is being answered is cut off; the shelf is closed first, so nobody waits for more of a parcel."""
        self._is_closed.set()
        with contextlib.suppress(OSError):  # wakes the one that accepts, where the system does that; else it looks up soon
            self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:  # out of file descriptors, or the asker has gone again
                self._is_closed.wait(TICK)
                continue
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            if len(self._threads) >= _MOST_CONNECTIONS:
                connection.close()
                continue
            thread = threading.Thread(target=self._converse, args=(connection,), name="parcels-answer", daemon=True)
            thread.start()
            self._threads.add(thread)

    def _converse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(TICK)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = secrets.token_hex(16)
            for _ in range(_MOST_REQUESTS):
                if not self._answer(connection, challenge):
                    return

    def _answer(self, connection: socket.socket, challenge: str) -> bool:
        """One request; whether another may follow."""
        try:
            request = self._read(connection, challenge)
        except LongHead:
            return self._say(connection, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except BadHead:
            return self._say(connection, HTTPStatus.BAD_REQUEST)
        if not request.nonce:
            asked = {"WWW-Authenticate": f"{_SCHEME} {challenge}"}
            return self._say(connection, HTTPStatus.UNAUTHORIZED, asked, is_last=False)
        if request.method != "GET":
            return self._say(connection, HTTPStatus.METHOD_NOT_ALLOWED, request=request)
        key = unquote(request.path.removeprefix(_ROOT))
        waits = _WAIT.fullmatch(request.headers.get("prefer", ""))
        parcel = self._shelf.find(key, wait=min(float(waits[1]), self._deadline) if waits else 0.0)
        if parcel is None or not request.path.startswith(_ROOT):
            status = HTTPStatus.GONE if self._shelf.was_freed(key) else HTTPStatus.NOT_FOUND
            return self._say(connection, status, request=request, is_last=False)
        span = _span(request.headers.get("range", "bytes=0-"), parcel.num_bytes)
        if span is None:
            size = {"Content-Range": f"bytes */{parcel.num_bytes}"}
            return self._say(connection, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, size, request=request, is_last=False)
        start, stop = span
        content = {"Content-Type": "application/octet-stream"}
        if "range" in request.headers:
            content["Content-Range"] = f"bytes {start}-{stop - 1}/{parcel.num_bytes}"
        status = HTTPStatus.PARTIAL_CONTENT if "range" in request.headers else HTTPStatus.OK
        self._say(connection, status, content, request=request, length=stop - start)
        with contextlib.suppress(SyncError), parcel.in_use():  # freed meanwhile: the answer ends early
            self._send(connection, parcel, start, stop)
        return False

    def _read(self, connection: socket.socket, challenge: str) -> _Request:
        until = time.monotonic() + min(_HEAD_SECONDS, self._deadline)

        def look() -> None:
            if self._is_closed.is_set() or time.monotonic() > until:
                raise ConnectionAbortedError

        first, headers = read_head(connection, look)
        method, _, rest = first.partition(" ")
        path, _, protocol = rest.partition(" ")
        if protocol != "HTTP/1.1" or {"content-length", "transfer-encoding"} & headers.keys():
            raise BadHead("is no request that is answered here")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        nonce, _, claim = given.partition(" ")
        parts = ("parcels", method, challenge, nonce, path, headers.get("range", ""))
        is_ours = scheme == _SCHEME and bool(nonce) and is_proven(claim, self._token, *parts)
        return _Request(method, path, headers, nonce if is_ours else "")

    def _say(
        self,
        connection: socket.socket,
        status: HTTPStatus,
        headers: dict[str, str] | None = None,
        *,
        request: _Request | None = None,
        length: int = 0,
        is_last: bool = True,
    ) -> bool:
        """Send a head; whether another request may follow."""
        answer: dict[str, str | int] = {**(headers or {}), "Content-Length": length}
        answer["Connection"] = "close" if is_last else "keep-alive"
        if request is not None:
            parts = (str(status.value), str(length), str(answer.get("Content-Range", "")))
            answer[f"{_SCHEME}-Proof"] = proof(self._token, "parcels", "answer", request.nonce, request.path, *parts)
        connection.sendall(write_head(f"HTTP/1.1 {status.value} {status.phrase}", answer))
        return not is_last

    def _send(self, connection: socket.socket, parcel: Parcel, start: int, stop: int) -> None:
        """As it comes; ends early when the parcel is over, or nothing has moved for the deadline."""
        body = parcel.bytes.numpy().data
        at, moved = start, time.monotonic()
        while at < stop and not parcel.is_over and time.monotonic() - moved < self._deadline:
            num_come = parcel.wait_past(at, TICK)
            if num_come <= at:
                continue
            try:
                num_sent = connection.send(body[at : min(stop, num_come, at + _SEND_BYTES)])
            except TimeoutError:
                continue
            at, moved = at + num_sent, time.monotonic()
            with self._lock:
                self.bytes_served += num_sent


def _span(wanted: str, size: int) -> tuple[int, int] | None:
    """(first byte, one past the last) of a range, or None if there is no such range."""
    found = _RANGE.fullmatch(wanted)
    if found is None:
        return None
    start, stop = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
    return (start, stop) if start < stop else None
