"""Serves buffers over HTTP: ranges of them, as the bytes arrive, to peers that prove that they know the run's token.

A connection's first request is answered 401 with a challenge; the next one carries the proof. So the token is never sent, an
overheard request cannot be replayed, and no clocks are compared. Answers carry a proof too.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from headrace.errors import SyncError
from headrace.proof import is_proven, proof
from headrace.sync.http.head import BadHead, LongHead, read_head, write_head
from headrace.sync.sockets import TICK, Server

if TYPE_CHECKING:
    import socket

    from headrace.sync.http.served import ServedBuffer, ServedBuffers

_HEAD_SECONDS = 10.0
_SEND_BYTES = 1 << 20
_MOST_REQUESTS = 4
"""On one connection."""
_ROOT = "/weights/"
_SCHEME = "Headrace"
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
_WAIT = re.compile(r"wait=(\d{1,6})")


def path_of(key: str) -> str:
    return _ROOT + quote(key, safe="")


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def authorization(token: str, challenge: str, nonce: str, path: str, wanted: str) -> str:
    """The header that answers a challenge."""
    return f"{_SCHEME} {nonce} {proof(token, 'weights', 'GET', challenge, nonce, path, wanted)}"


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]
    nonce: str
    """What the answer's proof must contain; empty if the request itself proves nothing."""


class BufferServer:
    """Serves one end's buffers."""

    def __init__(self, buffers: ServedBuffers, *, token: str, host: str, deadline: float) -> None:
        self._buffers, self._token, self._deadline = buffers, token, deadline
        self.bytes_served = 0
        self._lock = threading.Lock()
        self._server = Server(host, serve=self._converse, name="headrace-http")
        self.url = url_of(host, self._server.port)

    def close(self) -> None:
        """Running answers are cut off. The buffers are closed first, so no answer waits for more bytes."""
        self._server.close()

    def _converse(self, connection: socket.socket, is_closed: threading.Event) -> None:
        challenge = secrets.token_hex(16)
        for _ in range(_MOST_REQUESTS):
            if not self._answer(connection, challenge, is_closed):
                return

    def _answer(self, connection: socket.socket, challenge: str, is_closed: threading.Event) -> bool:
        """One request; whether another may follow."""
        try:
            request = self._read(connection, challenge, is_closed)
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
        buffer = self._buffers.find(key, wait=min(float(waits[1]), self._deadline) if waits else 0.0)
        if buffer is None or not request.path.startswith(_ROOT):
            status = HTTPStatus.GONE if self._buffers.was_freed(key) else HTTPStatus.NOT_FOUND
            return self._say(connection, status, request=request, is_last=False)
        span = _span(request.headers.get("range", "bytes=0-"), buffer.num_bytes)
        if span is None:
            size = {"Content-Range": f"bytes */{buffer.num_bytes}"}
            return self._say(connection, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, size, request=request, is_last=False)
        start, stop = span
        content = {"Content-Type": "application/octet-stream"}
        if "range" in request.headers:
            content["Content-Range"] = f"bytes {start}-{stop - 1}/{buffer.num_bytes}"
        status = HTTPStatus.PARTIAL_CONTENT if "range" in request.headers else HTTPStatus.OK
        self._say(connection, status, content, request=request, length=stop - start)
        with contextlib.suppress(SyncError), buffer.in_use():  # freed meanwhile: the answer ends early
            self._send(connection, buffer, start, stop)
        return False

    def _read(self, connection: socket.socket, challenge: str, is_closed: threading.Event) -> _Request:
        until = time.monotonic() + min(_HEAD_SECONDS, self._deadline)

        def check() -> None:
            if is_closed.is_set() or time.monotonic() > until:
                raise ConnectionAbortedError

        first, headers = read_head(connection, check)
        method, _, rest = first.partition(" ")
        path, _, protocol = rest.partition(" ")
        if protocol != "HTTP/1.1" or {"content-length", "transfer-encoding"} & headers.keys():
            raise BadHead("is no request that is answered here")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        nonce, _, claim = given.partition(" ")
        parts = ("weights", method, challenge, nonce, path, headers.get("range", ""))
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
            answer[f"{_SCHEME}-Proof"] = proof(self._token, "weights", "answer", request.nonce, request.path, *parts)
        connection.sendall(write_head(f"HTTP/1.1 {status.value} {status.phrase}", answer))
        return not is_last

    def _send(self, connection: socket.socket, buffer: ServedBuffer, start: int, stop: int) -> None:
        """As the bytes arrive; ends early when the buffer is freed, or nothing has moved for the deadline."""
        body = buffer.bytes.numpy().data
        at, moved = start, time.monotonic()
        while at < stop and not buffer.is_over and time.monotonic() - moved < self._deadline:
            num_come = buffer.wait_past(at, TICK)
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
