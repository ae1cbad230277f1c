"""Serves ranges of buffers over HTTP, as the bytes arrive, to peers that prove that they know the run's token.

The server answers a connection's first request with 401 and a challenge; the next request carries the proof. So the token is
never sent, a captured request cannot be replayed, and no clocks are compared. Answers carry a proof too.
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
from headrace.sync.http.head import BadHead, read_head, write_head
from headrace.sync.sockets import TICK, Server

if TYPE_CHECKING:
    import socket

    from headrace.sync.http.served import ServedBuffer, ServedBuffers

_HEAD_SECONDS = 10.0
_SEND_BYTES = 1 << 20
_MOST_REQUESTS = 4  # per connection
_ROOT = "/weights/"
_SCHEME = "Headrace"
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
_WAIT = re.compile(r"wait=(\d{1,6})")


def path_of(key: str) -> str:
    return _ROOT + quote(key, safe="")


def authorization(token: str, challenge: str, nonce: str, path: str, wanted: str) -> str:
    """Return the header that answers a challenge."""
    return f"{_SCHEME} {nonce} {proof(token, 'weights', 'GET', challenge, nonce, path, wanted)}"


@dataclass(frozen=True)
class _Exchange:
    """One request and its answer. `nonce` is set if the request was authenticated; the answer then proves the token with it."""

    connection: socket.socket
    token: str
    method: str = ""
    path: str = ""
    headers: dict[str, str] | None = None
    nonce: str = ""

    def answer(self, status: HTTPStatus, *, length: int = 0, is_last: bool = False, **headers: str) -> bool:
        """Send the head of an answer; return whether another request may follow."""
        sent: dict[str, str | int] = {name.replace("_", "-"): value for name, value in headers.items()}
        sent |= {"Content-Length": length, "Connection": "close" if is_last else "keep-alive"}
        if self.nonce:
            parts = (str(status.value), str(length), headers.get("Content_Range", ""))
            sent[f"{_SCHEME}-Proof"] = proof(self.token, "weights", "answer", self.nonce, self.path, *parts)
        self.connection.sendall(write_head(f"HTTP/1.1 {status.value} {status.phrase}", sent))
        return not is_last


class BufferServer:
    def __init__(self, buffers: ServedBuffers, *, token: str, host: str, deadline: float) -> None:
        self._buffers, self._token, self._deadline = buffers, token, deadline
        self.bytes_served = 0
        self._lock = threading.Lock()
        self._server = Server(host, serve=self._converse, name="headrace-http")
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}"

    def close(self) -> None:
        """Cut off running answers. The caller has closed the buffers, so no answer waits for more bytes."""
        self._server.close()

    def _converse(self, connection: socket.socket, is_closed: threading.Event) -> None:
        challenge = secrets.token_hex(16)
        for _ in range(_MOST_REQUESTS):
            try:
                exchange = self._read(connection, challenge, is_closed)
            except BadHead as error:
                _Exchange(connection, self._token).answer(error.status, is_last=True)
                return
            if not self._answer(exchange, challenge):
                return

    def _read(self, connection: socket.socket, challenge: str, is_closed: threading.Event) -> _Exchange:
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
        return _Exchange(connection, self._token, method, path, headers, nonce if is_ours else "")

    def _answer(self, exchange: _Exchange, challenge: str) -> bool:
        """Return whether another request may follow."""
        headers, path = exchange.headers or {}, exchange.path
        if not exchange.nonce:
            return exchange.answer(HTTPStatus.UNAUTHORIZED, WWW_Authenticate=f"{_SCHEME} {challenge}")
        if exchange.method != "GET":
            return exchange.answer(HTTPStatus.METHOD_NOT_ALLOWED, is_last=True)
        key, waits = unquote(path.removeprefix(_ROOT)), _WAIT.fullmatch(headers.get("prefer", ""))
        buffer = self._buffers.find(key, wait=min(float(waits[1]), self._deadline) if waits else 0.0)
        if buffer is None or not path.startswith(_ROOT):
            return exchange.answer(HTTPStatus.GONE if self._buffers.was_freed(key) else HTTPStatus.NOT_FOUND)
        size, has_range = buffer.num_bytes, "range" in headers
        span = _span(headers.get("range", "bytes=0-"), size)
        if span is None:
            return exchange.answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, Content_Range=f"bytes */{size}")
        start, stop = span
        content = {"Content_Range": f"bytes {start}-{stop - 1}/{size}"} if has_range else {}
        status = HTTPStatus.PARTIAL_CONTENT if has_range else HTTPStatus.OK
        exchange.answer(status, length=stop - start, is_last=True, Content_Type="application/octet-stream", **content)
        with contextlib.suppress(SyncError), buffer.in_use():  # if it was freed meanwhile, the answer ends early
            self._send(exchange.connection, buffer, start, stop)
        return False

    def _send(self, connection: socket.socket, buffer: ServedBuffer, start: int, stop: int) -> None:
        """Send bytes as they arrive; stop early if the buffer is freed, or after the deadline without progress."""
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
    """Parse a range into (first byte, one past the last), or None if it is invalid."""
    found = _RANGE.fullmatch(wanted)
    if found is None:
        return None
    start, stop = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
    return (start, stop) if start < stop else None
