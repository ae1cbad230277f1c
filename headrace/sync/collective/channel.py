"""The control connection from each receiver to the sender; the weights themselves travel through the process group.

A message is a line of JSON. Both ends first prove that they know the run's token; unauthenticated peers are dropped before
anything else they send is parsed. (`torch.distributed.TCPStore` could carry the messages, but it authenticates nobody, and its
calls hang forever on a stopped server, whatever their timeout.)
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from headrace.errors import LinkError, SyncError
from headrace.proof import is_proven, proof
from headrace.sync.sockets import TICK, connect

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    Message = dict[str, Any]

MAX_MESSAGE = 1 << 20  # bytes; a peer that sends more is dropped
HELLO_BYTES = 4096
HELLO_SECONDS = 30.0  # both: limits for a peer that is not yet authenticated


class Channel:
    """Messages over a connected socket. Any thread may send; only one may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""
        self._max_message = HELLO_BYTES
        self._sending = threading.Lock()

    @property
    def local_host(self) -> str:
        """This end's address on the interface that reaches the peer."""
        return str(self._connection.getsockname()[0])

    def trust(self) -> None:
        """Allow long messages: the peer is authenticated."""
        self._max_message = MAX_MESSAGE

    def keep(self) -> None:
        """Leave the connection open when the thread that has accepted it ends."""
        self._connection = self._connection.dup()

    def send(self, message: Message) -> None:
        """Raises OSError, also for a full socket: messages are few and small, so the peer has stopped reading."""
        with self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> Message | None:
        """Return the next message, or None on timeout. Raises OSError if the peer is gone, ValueError for malformed input."""
        until = time.monotonic() + seconds
        while True:
            text, newline, rest = self._unread.partition(b"\n")
            if len(text) > self._max_message:
                raise ValueError(f"a message of more than {self._max_message} bytes")
            if newline:
                self._unread = rest
                return _parse(text)
            self._connection.settimeout(max(until - time.monotonic(), 0.0))
            try:
                piece = self._connection.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                return None
            if not piece:
                raise ConnectionError("it closed the connection")
            self._unread += piece

    def read(self, seconds: float) -> Iterator[Message]:
        """Yield the messages that have come, or the first that comes within `seconds` and those behind it."""
        while (message := self.receive(seconds)) is not None:
            yield message
            seconds = 0.0

    def wait(self, check: Callable[[], None]) -> Message:
        """Like `receive`, until `check` raises."""
        while (message := self.receive(TICK)) is None:
            check()
        return message

    def close(self) -> None:
        self._connection.close()


def accept(connection: socket.socket, *, token: str, is_closed: threading.Event) -> Channel | None:
    """Authenticate a new connection at the sender's end. Returns None if the peer fails to prove the token. Raises OSError."""
    channel, challenge = Channel(connection), secrets.token_hex(16)
    until = time.monotonic() + HELLO_SECONDS

    def check() -> None:
        if is_closed.is_set() or time.monotonic() >= until:
            raise TimeoutError

    channel.send({"challenge": challenge})
    try:
        hello = channel.wait(check)
    except ValueError:
        return None
    if not is_proven(hello.get("proof"), token, "receiver", challenge):
        return None
    channel.send({"proof": proof(token, "sender", str(hello.get("challenge")))})
    channel.trust()
    return channel


def call(host: str, port: int, *, token: str, deadline: float, check: Callable[[], None]) -> Channel:
    """Connect a receiver to the sender. While waiting this calls `check`, which raises to give up."""
    until = time.monotonic() + deadline

    def check_all() -> None:
        check()
        if time.monotonic() > until:
            raise LinkError(f"the sender at {host}:{port} has not answered for {deadline:g} s")

    channel, challenge = None, secrets.token_hex(16)
    try:
        channel = Channel(connect(host, port, check=check_all))
        given = channel.wait(check_all).get("challenge")
        channel.send({"proof": proof(token, "receiver", str(given)), "challenge": challenge})
        if not is_proven(channel.wait(check_all).get("proof"), token, "sender", challenge):
            raise SyncError("the sender does not know this run's token")
    except BaseException as error:
        if channel is not None:
            channel.close()
        if isinstance(error, OSError):
            raise LinkError(f"the sender at {host}:{port} cannot be reached: {error.strerror or error}") from error
        if isinstance(error, ValueError):
            raise SyncError(f"the sender does not speak as this run does: {error}") from error
        raise
    channel.trust()
    return channel


def _parse(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except RecursionError as error:  # more nested brackets than Python's parser can handle
        raise ValueError("it is nested too deep") from error
    if not isinstance(message, dict):
        raise ValueError("a message is a dict")
    return message
