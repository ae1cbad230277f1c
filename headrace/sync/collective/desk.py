"""The word beside the weights: a desk at the sender, a line from each receiver.

A line carries small messages: who is here, how far it is, why it gave up; and back, what group to join and whether the
transfer is over. The bytes themselves go through the group. `torch.distributed.TCPStore` could carry the same, but its
calls wait for a stopped server without end whatever their timeout says, and cannot be ended from outside. Here nobody waits
in a call: the desk is one thread over sockets that do not block, and a receiver looks for its answer in slices of its own.

A message is a line of JSON. The first ones prove that each end knows the run's token; a line that does not prove it in time is
dropped before anything else it sends is parsed. From then on the desk answers each message, at once if there is news and
otherwise when `ANSWER_AFTER` has passed, so a line that is up is heard of several times a second in both directions.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from headrace.errors import SyncError
from headrace.proof import is_proven, proof

if TYPE_CHECKING:
    from collections.abc import Callable

    Message = dict[str, Any]

ANSWER_AFTER = 0.1
"""Seconds a question waits for news before it is answered without any."""
LONGEST = 1 << 20
"""Bytes of a message; a line that sends more is closed."""
HELLO_BYTES = 4096
HELLO_SECONDS = 30.0
"""What a line may send, and how long it may take, before it has proven that it knows the token."""


class Line:
    """A receiver's connection, as the desk sees it. Only the desk's thread touches it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_known = False
        """Whether it has proven that it knows the token."""
        self.challenge = secrets.token_hex(16)
        self.opened_at = time.monotonic()
        self.asked_at: float | None = None
        self.group = 0
        """The number of the group that its receiver last heard of."""
        self.given: set[str] = set()
        """Keys of that group's mailbox that went down this line."""
        self._unread = b""

    def read(self) -> list[Message] | None:
        """The messages that have come; None when the other end is gone or talks nonsense."""
        try:
            piece = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not piece:
            return None
        *whole, self._unread = (self._unread + piece).split(b"\n")
        if len(whole) > 1 and not self.is_known:  # nobody of ours says more before its proof is answered
            return None
        most = LONGEST if self.is_known else HELLO_BYTES
        if any(len(text) > most for text in (*whole, self._unread)):
            return None
        try:
            return [_message(text) for text in whole]
        except ValueError:
            return None

    def write(self, message: Message) -> bool:
        """Whether all of it went: answers are small and at most one is on its way, so a full socket is a lost receiver."""
        text = json.dumps(message).encode() + b"\n"
        try:
            return self.connection.send(text) == len(text)
        except OSError:
            return False


class Desk:
    """Listens for receivers in a thread of its own, and tells the transport what they say.

    `on_message(line, message)` for each message, `on_gone(line)` when the line is lost, `news(line)` for an answer or None.
    """

    def __init__(
        self,
        host: str,
        *,
        token: str,
        on_message: Callable[[Line, Message], None],
        on_gone: Callable[[Line], None],
        news: Callable[[Line], Message | None],
    ) -> None:
        self._token = token
        self._on_message, self._on_gone, self._news = on_message, on_gone, news
        try:
            self._listener = socket.create_server((host, 0), family=_family(host), backlog=128)
        except OSError as error:
            raise SyncError(f"cannot listen on {host} for receivers: {error.strerror or error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._lines: set[Line] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="headrace-collective-desk", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Something has changed: look for news now. Called from any thread."""
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody is left to tell
            self._wake.send(b"\0")

    def close(self) -> None:
        self._is_closed = True
        self.nudge()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._is_closed:
                is_asked = any(line.asked_at is not None for line in self._lines)
                for key, _ in selector.select(ANSWER_AFTER / 2 if is_asked else 1.0):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj is self._woken:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(4096)
                    elif not self._hear(key.data):
                        self._drop(key.data, selector)
                for line in [line for line in self._lines if self._is_late(line) or not self._answer(line)]:
                    self._drop(line, selector)
            self._answer_all_once_more()
            for line in list(self._lines):
                self._drop(line, selector)
        for endpoint in (self._listener, self._wake, self._woken):
            endpoint.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = Line(connection)
        self._lines.add(line)
        selector.register(connection, selectors.EVENT_READ, line)
        line.write({"challenge": line.challenge})  # lost on one that is gone, as the next look shows

    def _hear(self, line: Line) -> bool:
        messages = line.read()
        if messages is None:
            return False
        for message in messages:
            if not line.is_known:
                line.is_known = is_proven(message.get("proof"), self._token, "receiver", line.challenge)
                if not line.is_known or not line.write({"proof": proof(self._token, "sender", str(message.get("challenge")))}):
                    return False
                continue
            line.asked_at = time.monotonic()
            try:
                self._on_message(line, message)
            except (TypeError, ValueError):  # no receiver of ours talks like that
                return False
        return True

    def _is_late(self, line: Line) -> bool:
        return not line.is_known and time.monotonic() - line.opened_at > HELLO_SECONDS

    def _answer(self, line: Line) -> bool:
        if line.asked_at is None:
            return True
        answer = self._news(line)
        if answer is None:
            if time.monotonic() - line.asked_at < ANSWER_AFTER:
                return True
            answer = {}
        line.asked_at = None
        return line.write(answer)

    def _answer_all_once_more(self) -> None:
        """The transport closes: whoever still asks is told why before its line goes."""
        for line in self._lines:
            if line.asked_at is not None:
                line.write(self._news(line) or {})

    def _drop(self, line: Line, selector: selectors.BaseSelector) -> None:
        self._lines.discard(line)
        selector.unregister(line.connection)
        line.connection.close()
        self._on_gone(line)


class Caller:
    """A receiver's end of its line. Used by one thread at a time."""

    def __init__(self, host: str, port: int, *, token: str, deadline: float, check: Callable[[], None]) -> None:
        self.address = (host, port)
        self._unread = b""
        self._asked_at: float | None = None
        self._connection = _connected(host, port, deadline=deadline, check=check)
        try:
            self._greet(token, deadline, check)
        except BaseException:
            self.close()
            raise
        self.local_host: str = self._connection.getsockname()[0]
        """The address of the interface that reaches the sender."""

    @property
    def waited(self) -> float:
        """Seconds that the last question has been without an answer."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @property
    def may_ask(self) -> bool:
        return self._asked_at is None

    def ask(self, message: Message) -> None:
        """Ask, not waiting for the answer. What is urgent need not wait for that to the last question."""
        if self.may_ask:
            self._asked_at = time.monotonic()
        self._send(message)

    def answer(self, seconds: float) -> Message | None:
        """The answer, if it comes within so long."""
        until = time.monotonic() + seconds
        while b"\n" not in self._unread:
            self._connection.settimeout(max(until - time.monotonic(), 0.0))
            try:
                piece = self._connection.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:
                raise SyncError(f"the sender is gone: {error.strerror or error}") from error
            if not piece:
                raise SyncError("the sender is gone: it closed the connection")
            self._unread += piece
            if len(self._unread) > LONGEST:
                raise SyncError(f"the sender sent a message of more than {LONGEST} bytes")
        text, _, self._unread = self._unread.partition(b"\n")
        self._asked_at = None
        try:
            return _message(text)
        except ValueError as error:
            raise SyncError(f"the sender does not speak as this run does: {error}") from error

    def is_up(self) -> bool:
        """Whether the sender has not closed it, as far as this end knows."""
        self._connection.settimeout(0.0)
        try:
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def tell(self, message: Message) -> None:
        """A last word nobody answers, if it can be said at once."""
        with contextlib.suppress(SyncError):
            self._send(message)

    def close(self) -> None:
        self._connection.close()

    def _greet(self, token: str, deadline: float, check: Callable[[], None]) -> None:
        """Prove to the sender that this end knows the token, and have it prove the same."""
        challenge, until = secrets.token_hex(16), time.monotonic() + deadline

        def heard() -> Message:
            while (answer := self.answer(ANSWER_AFTER)) is None:
                check()
                if time.monotonic() > until:
                    raise SyncError(f"the sender has not answered for {deadline:g} s")
            return answer

        self._send({"proof": proof(token, "receiver", str(heard().get("challenge"))), "challenge": challenge})
        if not is_proven(heard().get("proof"), token, "sender", challenge):
            raise SyncError("whoever listens at {}:{} does not know this run's token".format(*self.address))

    def _send(self, message: Message) -> None:
        self._connection.settimeout(0.0)
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:  # a full socket too: the sender has read nothing of many small messages
            raise SyncError(f"the sender is gone: {error.strerror or error}") from error


def _message(text: bytes) -> Message:
    """Raises ValueError for what is no message."""
    try:
        message = json.loads(text)
    except RecursionError as error:  # brackets within brackets, more than Python's parser can follow
        raise ValueError("it is nested too deep") from error
    if not isinstance(message, dict):
        raise ValueError("a message is a dict")
    return message


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connected(host: str, port: int, *, deadline: float, check: Callable[[], None]) -> socket.socket:
    """A connection, asked for in slices so that `check` is called meanwhile."""
    connection = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.monotonic()
        code = connection.connect_ex((host, port))
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_WRITE)
            while not selector.select(0.1):
                check()
                if time.monotonic() - began > deadline:
                    raise SyncError(f"the sender at {host}:{port} did not take the connection for {deadline:g} s")
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise SyncError(f"the sender at {host}:{port} cannot be reached: {os.strerror(code)}")
    except OSError as error:
        connection.close()
        raise SyncError(f"the sender at {host}:{port} cannot be reached: {error.strerror or error}") from error
    except SyncError:
        connection.close()
        raise
    return connection
