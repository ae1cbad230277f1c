"""The control connection beside the weights: from each receiver to the sender.

A receiver reports who it is, how far it is and why it gave up; the sender answers each report at once, and tells it which group
to join and whether the transfer is over as soon as it knows. The weights themselves go through the group.
(`torch.distributed.TCPStore` could carry the same, but its calls wait for a stopped server forever, whatever their timeout.)

A message is a line of JSON. Each end first proves that it knows the run's token; unauthenticated peers are dropped before
anything else they send is parsed.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from headrace.errors import SyncError
from headrace.proof import is_proven, proof
from headrace.sync.sockets import TICK, connect

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    Message = dict[str, Any]

MAX_MESSAGE = 1 << 20
"""Bytes; a peer that sends more is dropped."""
HELLO_BYTES = 4096
HELLO_SECONDS = 30.0
"""What a peer may send, and how long it may take, before it has proven that it knows the token."""


class Channel:
    """Messages over a connected socket. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""
        self._most = HELLO_BYTES
        self._sending = threading.Lock()

    @property
    def local_host(self) -> str:
        """The address of the interface that reaches the peer."""
        return str(self._connection.getsockname()[0])

    def trust(self) -> None:
        """The peer has proven itself: its messages may be long."""
        self._most = MAX_MESSAGE

    def send(self, message: Message) -> None:
        """Raises OSError. Messages are few and small, so a full socket too means that the peer is lost."""
        with self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> Message | None:
        """The next message, if it comes in time. Raises OSError if the peer is gone, ValueError for what is no message."""
        until = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if len(self._unread) > self._most:
                raise ValueError(f"a message of more than {self._most} bytes")
            self._connection.settimeout(max(until - time.monotonic(), 0.0))
            try:
                piece = self._connection.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                return None
            if not piece:
                raise ConnectionError("it closed the connection")
            self._unread += piece
        text, _, self._unread = self._unread.partition(b"\n")
        if len(text) > self._most:
            raise ValueError(f"a message of more than {self._most} bytes")
        return _parse(text)

    def close(self) -> None:
        self._connection.close()


def accept(connection: socket.socket, *, token: str, is_closed: threading.Event) -> Channel | None:
    """The sender's end of a new connection; None if the peer does not prove that it knows the token. Raises OSError."""
    channel, challenge = Channel(connection), secrets.token_hex(16)
    channel.send({"challenge": challenge})
    until = time.monotonic() + HELLO_SECONDS
    while not is_closed.is_set() and time.monotonic() < until:
        try:
            hello = channel.receive(TICK)
        except ValueError:
            return None
        if hello is not None:
            if not is_proven(hello.get("proof"), token, "receiver", challenge):
                return None
            channel.send({"proof": proof(token, "sender", str(hello.get("challenge")))})
            channel.trust()
            return channel
    return None


def call(host: str, port: int, *, token: str, deadline: float, check: Callable[[], None]) -> Channel:
    """The receiver's end. `check` is called meanwhile, and raises to give up."""
    until = time.monotonic() + deadline

    def check_all() -> None:
        check()
        if time.monotonic() > until:
            raise SyncError(f"the sender at {host}:{port} has not answered for {deadline:g} s")

    try:
        connection = connect(host, port, check=check_all)
    except OSError as error:
        raise SyncError(f"the sender at {host}:{port} cannot be reached: {error.strerror or error}") from error
    channel = Channel(connection)
    try:
        _prove(channel, token, check_all)
    except BaseException as error:
        channel.close()
        if isinstance(error, OSError):
            raise SyncError(f"the sender is gone: {error.strerror or error}") from error
        if isinstance(error, ValueError):
            raise SyncError(f"the sender does not speak as this run does: {error}") from error
        raise
    return channel


def _prove(channel: Channel, token: str, check: Callable[[], None]) -> None:
    """Prove to the sender that this end knows the token, and have it prove the same."""

    def heard() -> Message:
        while (message := channel.receive(TICK)) is None:
            check()
        return message

    challenge = secrets.token_hex(16)
    channel.send({"proof": proof(token, "receiver", str(heard().get("challenge"))), "challenge": challenge})
    if not is_proven(heard().get("proof"), token, "sender", challenge):
        raise SyncError("the sender does not know this run's token")
    channel.trust()


def _parse(text: bytes) -> Message:
    """Raises ValueError for what is no message."""
    try:
        message = json.loads(text)
    except RecursionError as error:  # brackets within brackets, more than Python's parser can follow
        raise ValueError("it is nested too deep") from error
    if not isinstance(message, dict):
        raise ValueError("a message is a dict")
    return message
