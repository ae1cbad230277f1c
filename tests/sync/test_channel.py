"""Control connections of the collective transport: who is let in, what is read of others, and that nothing they send harms."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import LinkError, SyncError
from headrace.proof import proof
from headrace.sync.collective import channel as channels
from headrace.sync.collective.channel import Channel, call
from headrace.sync.sockets import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "of the run"


class Open:
    """A server that answers every message with the same message, if its number is one."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.server = Server("127.0.0.1", serve=self.serve, name="test-channel")

    def serve(self, connection: socket.socket, is_closed: threading.Event) -> None:
        channel = channels.accept(connection, token=TOKEN, is_closed=is_closed)
        with contextlib.suppress(TypeError, ValueError):
            while channel is not None and not is_closed.is_set():
                message = channel.receive(0.1)
                if message is not None:
                    self.heard.append({**message, "number": int(message["number"])})
                    channel.send(self.heard[-1])

    def call(self, token: str = TOKEN) -> Channel:
        return call("127.0.0.1", self.server.port, token=token, deadline=5.0, check=lambda: None)

    def connect(self) -> tuple[socket.socket, str]:
        """A connection, and the challenge that came on it."""
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=5)
        return connection, json.loads(line_of(connection))["challenge"]

    def is_well(self) -> bool:
        channel = self.call()
        channel.send({"number": 7})
        answer = channel.receive(5.0)
        channel.close()
        return answer == {"number": 7}


def line_of(connection: socket.socket) -> bytes:
    got = b""
    while not got.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            return b""
        got += piece
    return got


def hangs_up(connection: socket.socket) -> bool:
    """Whether the server says no more and closes; a reset, where it left something unread, is that too."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def opened() -> Iterator[Open]:
    opened = Open()
    yield opened
    opened.server.close()


def said(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


DEEP = b"[" * 100_000 + b"\n"
NONSENSE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "deep": b"[" * 4000 + b"\n",
    "deep and long": DEEP,
    "no dict": b"[]\n",
    "no proof": said({"number": 1}),
    "the token": said({"token": TOKEN, "proof": TOKEN}),
    "odd proof": said({"proof": ["x"], "challenge": {}}),
    "lone surrogate": b'{"proof": "\\ud800"}\n',
    "no utf-8": b'{"proof": "\xff"}\n',
    "endless": b"x" * (64 << 10),
}


@pytest.mark.parametrize("words", NONSENSE.values(), ids=NONSENSE.keys())
def test_who_does_not_prove_the_token_is_dropped_and_hinders_nobody(opened: Open, words: bytes) -> None:
    connection, _ = opened.connect()
    with connection:
        connection.sendall(words)
        assert hangs_up(connection)
    assert not opened.heard and opened.is_well()


@pytest.mark.parametrize("words", [DEEP, b"[]\n", said({"number": "x"}), said({"number": None})])
def test_nonsense_from_who_has_proven_it_ends_only_its_connection(opened: Open, words: bytes) -> None:
    channel = opened.call()
    channel._connection.settimeout(5)
    channel._connection.sendall(words)
    assert hangs_up(channel._connection)
    channel.close()
    assert opened.is_well()


def test_before_the_proof_no_second_line_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = channels._parse
    monkeypatch.setattr(channels, "_parse", lambda text: parsed.append(text) or parse(text))
    here, there = socket.socketpair()
    with here, there:
        there.sendall(b'{"proof": "x"}\n{}\n')
        assert channels.accept(here, token=TOKEN, is_closed=threading.Event()) is None
    assert parsed == [b'{"proof": "x"}']


def test_a_hello_is_read_up_to_its_limit_alone(opened: Open) -> None:
    """The proof is right; what comes with it is too long."""
    for padding, is_let_in in ((channels.HELLO_BYTES // 2, True), (channels.HELLO_BYTES, False)):
        connection, challenge = opened.connect()
        with connection:
            connection.sendall(said({"proof": proof(TOKEN, "receiver", challenge), "challenge": "x" * padding}))
            assert hangs_up(connection) is not is_let_in


def test_a_message_of_who_is_known_may_be_long(opened: Open) -> None:
    channel = opened.call()
    channel.send({"number": 1, "values": "x" * (8 * channels.HELLO_BYTES)})
    answer = channel.receive(5.0)
    assert answer is not None and len(answer["values"]) == 8 * channels.HELLO_BYTES
    channel.close()


def test_who_says_nothing_is_dropped_and_who_is_known_may_be_silent(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    known = opened.call()
    monkeypatch.setattr(channels, "HELLO_SECONDS", 0.0)
    connection, _ = opened.connect()
    with connection:
        assert hangs_up(connection)
    known.send({"number": 3})
    assert known.receive(5.0) == {"number": 3}
    known.close()


def test_a_proof_is_good_for_one_connection_and_one_end(opened: Open) -> None:
    """Somebody who saw a greeting plays it back; and a proof of the sender's is none of a receiver's."""
    first, challenge = opened.connect()
    second, another = opened.connect()
    with first, second:
        second.sendall(said({"proof": proof(TOKEN, "receiver", challenge), "challenge": ""}))
        assert hangs_up(second)
        first.sendall(said({"proof": proof(TOKEN, "sender", challenge), "challenge": another}))
        assert hangs_up(first)


def test_a_receiver_with_another_token_is_not_let_in(opened: Open) -> None:
    with pytest.raises(SyncError, match="cannot be reached: it closed the connection"):
        opened.call("of another run")
    assert opened.is_well()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"proof": "f" * 64}, "does not know this run's token"),
        ({}, "does not know this run's token"),
        ([], "does not speak as this run does: a message is a dict"),
    ],
)
def test_a_sender_that_does_not_know_the_token_is_refused_and_never_hears_it(answer: Any, message: str) -> None:
    heard = []

    def pretend(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(said({"challenge": "0" * 32}))
            heard.append(line_of(connection))
            connection.sendall(json.dumps(answer).encode() + b"\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=pretend, args=(listening,))
        thread.start()
        with pytest.raises(SyncError, match=message):
            call("127.0.0.1", listening.getsockname()[1], token=TOKEN, deadline=5.0, check=lambda: None)
        thread.join()
    assert TOKEN.encode() not in heard[0]


def test_a_silent_sender_is_given_up_and_looked_away_from_meanwhile() -> None:
    looks = []
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LinkError, match=r"has not answered for 0\.2 s"):
        call("127.0.0.1", silent.getsockname()[1], token=TOKEN, deadline=0.2, check=lambda: looks.append(1))
    assert looks
