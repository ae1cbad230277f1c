"""Serves ranges of buffers over HTTP, as the bytes arrive, to peers that prove that they know the run's token.

A buffer is in host memory, complete at the sender and still filling at a relay; its memory is reused once nobody reads it.

The server answers a connection's first request with 401 and a challenge; the next request carries the proof. So the token is
never sent, a captured request cannot be replayed, and no clocks are compared. Answers carry a proof too.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from headrace.errors import SyncError
from headrace.proof import is_proven, proof
from headrace.sync.memory import Spare, TorchBuffer
from headrace.sync.sockets import TICK, Server

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

_GONE_KEYS = 16  # freed keys to remember, to tell "freed" from "unknown"
_MAX_HEAD = 8192  # bytes
_HEAD_SECONDS = 10.0
_SEND_BYTES = 1 << 20
_MOST_REQUESTS = 4  # per connection
_END = b"\r\n\r\n"
_ROOT = "/weights/"
_SCHEME = "Headrace"
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")


class BadHead(ValueError):
    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


def read_head(connection: socket.socket, check: Callable[[], None]) -> tuple[list[str], dict[str, str]]:
    """Read the words of the first line and the headers (by lower-case name), nothing more. `check` may raise meanwhile."""
    head = b""
    while not head.endswith(_END):
        if len(head) == _MAX_HEAD:
            raise BadHead(f"sent more than {_MAX_HEAD} bytes of headers", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        check()
        try:
            byte = connection.recv(1)  # what follows the head goes straight to its place
        except TimeoutError:
            continue
        if not byte:
            raise ConnectionError("closed the connection")
        head += byte
    try:
        first, *lines = head.removesuffix(_END).decode("ascii").split("\r\n")
    except UnicodeDecodeError as error:
        raise BadHead("sent headers that are not ASCII") from error
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            raise BadHead("sent headers that cannot be read")
        headers[name.lower()] = value.strip()
    return first.split(" ", 2), headers


def write_head(first: str, headers: Mapping[str, str | int]) -> bytes:
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("ascii")


def path_of(key: str) -> str:
    return _ROOT + quote(key, safe="")


def authorization(token: str, challenge: str, nonce: str, path: str, wanted: str) -> str:
    return f"{_SCHEME} {nonce} {proof(token, 'weights', 'GET', challenge, nonce, path, wanted)}"


@dataclass(eq=False)
class ServedBuffer:
    """A buffer under a key; `num_come` of its bytes have arrived. At the sender it is complete, at a relay it fills."""

    owner: ServedBuffers
    key: str
    bytes: Tensor
    buffer: TorchBuffer | None  # whose memory it is; None: another transport's, which may reuse it as soon as this is over
    is_offered: bool  # whether peers may read it
    num_come: int = 0
    num_users: int = 0
    is_over: bool = False  # set when every user must leave

    @property
    def num_bytes(self) -> int:
        return len(self.bytes)

    def advance(self, num_come: int) -> None:
        """Record arrived bytes and wake the readers waiting for them."""
        with self.owner.changed:
            self.num_come = num_come
            self.owner.changed.notify_all()

    def wait_past(self, at: int, seconds: float) -> int:
        """Wait until more than `at` bytes have arrived, the buffer is over or the time is up; return how many have arrived."""
        with self.owner.changed:
            self.owner.changed.wait_for(lambda: self.is_over or self.num_come > at, seconds)
            return self.num_come

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Prevent reuse of the memory inside this context. Raises `SyncError` once the buffer is over."""
        with self.owner.changed:
            if self.is_over:
                raise SyncError(f"{self.key!r} was freed")
            self.num_users += 1
        try:
            yield
        finally:
            with self.owner.changed:
                self.num_users -= 1
                self.owner.reuse(self)


class ServedBuffers:
    """One condition guards them all."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.held: dict[str, ServedBuffer] = {}  # by key
        self._spare = Spare(TorchBuffer)
        self.gone: deque[str] = deque(maxlen=_GONE_KEYS)
        self._is_closed = False

    def add(self, key: str, num_bytes: int, *, is_offered: bool, lent: Tensor | None = None) -> ServedBuffer:
        """Make a new buffer, in memory of its own unless some is `lent`; an earlier one with the same key is freed first."""
        with self.changed:
            if self._is_closed:
                raise SyncError("the transport is closed")
            self.drop(self.held.get(key))
            buffer = None
            if lent is None:
                buffer = self._spare.take(num_bytes)
                lent = buffer.tensor[:num_bytes]
            made = self.held[key] = ServedBuffer(self, key, lent, buffer, is_offered)
            self.changed.notify_all()
            return made

    def find(self, key: str, *, wait: float = 0.0) -> ServedBuffer | None:
        """Return the buffer if it is on offer within `wait` seconds."""

        def is_offered() -> bool:
            return key in self.held and self.held[key].is_offered

        with self.changed:
            self.changed.wait_for(lambda: is_offered() or key in self.gone or self._is_closed, wait)
            return self.held[key] if is_offered() else None

    def offer(self, key: str) -> ServedBuffer:
        """Let peers read a buffer that was filled here and is complete."""
        with self.changed:
            if key not in self.held:
                raise SyncError(f"{key!r} was freed, or never allocated")
            self.held[key].is_offered = True
            self.held[key].advance(self.held[key].num_bytes)
            return self.held[key]

    def drop(self, buffer: ServedBuffer | None) -> None:
        """Free a buffer: every user leaves it soon, and then its memory is reused."""
        with self.changed:
            if buffer is not None and self.held.get(buffer.key) is buffer:
                del self.held[buffer.key]
                self.gone.append(buffer.key)
                buffer.is_over = True
                self.changed.notify_all()
                self.reuse(buffer)

    def reuse(self, buffer: ServedBuffer) -> None:
        if buffer.buffer is not None and buffer.is_over and not buffer.num_users and not self._is_closed:
            self._spare.give(buffer.buffer)

    def close(self) -> None:
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
            for buffer in list(self.held.values()):
                self.drop(buffer)
            self._spare.clear()


class BufferServer:
    """`wait`: seconds in which a buffer that is asked for may come to be offered, as at a relay."""

    def __init__(
        self, buffers: ServedBuffers, *, token: str, host: str, deadline: float, wait: float, certificate: str
    ) -> None:
        self._buffers, self._token, self._deadline, self._wait = buffers, token, deadline, wait
        self.bytes_served = 0
        self._lock = threading.Lock()
        self._server = Server(host, serve=self._converse, name="headrace-http", certificate=certificate)
        self.url = f"{'https' if certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{self._server.port}"

    def close(self) -> None:
        """Cut off running answers. The caller has closed the buffers, so no answer waits for more bytes."""
        self._server.close()

    def _converse(self, connection: socket.socket, is_closed: threading.Event) -> None:
        challenge, has_more = secrets.token_hex(16), True
        for _ in range(_MOST_REQUESTS):
            until = time.monotonic() + min(_HEAD_SECONDS, self._deadline)

            def check(until: float = until) -> None:
                if is_closed.is_set() or time.monotonic() > until:
                    raise ConnectionAbortedError

            try:
                first, headers = read_head(connection, check)
                if len(first) != 3 or first[2] != "HTTP/1.1" or {"content-length", "transfer-encoding"} & headers.keys():
                    raise BadHead("is no request that is answered here")
                has_more = self._answer(connection, challenge, first[0], first[1], headers)
            except BadHead as error:
                has_more = _send_head(connection, error.status, is_last=True)
            if not has_more:
                return

    def _answer(self, connection: socket.socket, challenge: str, method: str, path: str, headers: dict[str, str]) -> bool:
        """Answer a request; return whether another may follow."""
        wanted = headers.get("range", "")
        scheme, nonce, claim, *_ = [*headers.get("authorization", "").split(" "), "", "", ""]
        if scheme != _SCHEME or not is_proven(claim, self._token, "weights", method, challenge, nonce, path, wanted):
            return _send_head(connection, HTTPStatus.UNAUTHORIZED, WWW_Authenticate=f"{_SCHEME} {challenge}")
        answer = partial(_send_head, connection, prove=partial(proof, self._token, "weights", "answer", nonce, path))
        if method != "GET":
            return answer(HTTPStatus.METHOD_NOT_ALLOWED, is_last=True)
        key = unquote(path.removeprefix(_ROOT))
        buffer = self._buffers.find(key, wait=self._wait)
        if buffer is None or not path.startswith(_ROOT):
            return answer(HTTPStatus.GONE if key in self._buffers.gone else HTTPStatus.NOT_FOUND)
        size, found = buffer.num_bytes, _RANGE.fullmatch(wanted or "bytes=0-")
        start, stop = (int(found[1]), min(size, int(found[2] or size) + 1)) if found else (0, 0)
        if start >= stop:
            return answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, Content_Range=f"bytes */{size}")
        content: dict[str, Any] = {"length": stop - start, "Content_Type": "application/octet-stream"}
        content |= {"Content_Range": f"bytes {start}-{stop - 1}/{size}"} if wanted else {}
        answer(HTTPStatus.PARTIAL_CONTENT if wanted else HTTPStatus.OK, is_last=True, **content)
        with contextlib.suppress(SyncError), buffer.in_use():  # if it was freed meanwhile, the answer ends early
            self._send(connection, buffer, start, stop)
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


def _send_head(
    connection: socket.socket,
    status: HTTPStatus,
    *,
    prove: Callable[..., str] | None = None,
    length: int = 0,
    is_last: bool = False,
    **headers: str,
) -> bool:
    """Send the head of an answer, with a proof of the token if the request had one; returns whether another may follow."""
    sent: dict[str, str | int] = {name.replace("_", "-"): value for name, value in headers.items()}
    sent |= {"Content-Length": length, "Connection": "close" if is_last else "keep-alive"}
    if prove is not None:
        sent[f"{_SCHEME}-Proof"] = prove(str(status.value), str(length), headers.get("Content_Range", ""))
    connection.sendall(write_head(f"HTTP/1.1 {status.value} {status.phrase}", sent))
    return not is_last
