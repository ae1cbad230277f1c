"""Frames and calls over real sockets: who is let in, what arrives, and what happens when one end goes or lies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace import rpc as streams
from headrace.proof import proof
from headrace.records import Rollout, Sampling, frames, pack_rollouts, unpack_rollouts
from headrace.rpc import Listener, Peer, RemoteError, Stream, StreamClosed, connect
from headrace.settings import ConfigError
from headrace.tls import client_context, make_certificate, server_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

TOKEN = "a" * 64
KINDS = ("unix", "tcp", "tls")
CERTIFICATE = make_certificate()


async def listen(kind: str, token: str = TOKEN) -> Listener:
    if kind == "unix":
        return await Listener.on_this_host(token=token)
    return await Listener.between_hosts("127.0.0.1", token=token, certificate=CERTIFICATE if kind == "tls" else "")


@contextlib.asynccontextmanager
async def joined(kind: str = "unix") -> AsyncIterator[tuple[Stream, Stream]]:
    """The listener's end and the other."""
    listener = await listen(kind)
    arriving = listener.expect("engine-0", "data")
    theirs = await connect(listener.address, token=TOKEN, name="engine-0", channel="data")
    ours = await arriving
    try:
        yield ours, theirs
    finally:
        for each in (ours, theirs):
            each.close()
        listener.close()


@contextlib.asynccontextmanager
async def peers(
    calls: dict[str, Callable[..., Awaitable[Any]]], notices: dict[str, Callable[[Any], None]] | None = None
) -> AsyncIterator[tuple[Peer, Peer, asyncio.Task[None]]]:
    """Whoever calls, whoever answers, and the task that reads for the first."""
    async with joined() as (ours, theirs):
        caller, answerer = Peer(ours), Peer(theirs, calls=calls, notices=notices)
        reading = [asyncio.ensure_future(peer.run()) for peer in (caller, answerer)]
        try:
            yield caller, answerer, reading[0]
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's path may have 107 letters; those of `tmp_path` may have more."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("kind", KINDS)
async def test_records_and_arrays_arrive_as_they_were_sent(kind):
    rollout = Rollout.from_prompt([5, 6, 7], id="r")
    arrays = {"a": np.arange(7, dtype=np.int32), "none": np.zeros((0, 3), np.float32)}
    async with joined(kind) as (ours, theirs):
        for here, there in ((ours, theirs), (theirs, ours)):
            here.write(
                {
                    "rollouts": pack_rollouts([rollout]),
                    "sampling": Sampling(seed=2**62),
                    "arrays": arrays,
                    "text": "ö" * 5000,
                }
            )
            here.write([1, None, True, 2.5])
            got = await there.receive()
            assert unpack_rollouts(got["rollouts"]) == [rollout]
            assert got["sampling"] == Sampling(seed=2**62) and got["text"] == "ö" * 5000
            assert got["arrays"]["a"].dtype == np.int32 and np.array_equal(got["arrays"]["a"], arrays["a"])
            assert got["arrays"]["none"].shape == (0, 3)
            assert await there.receive() == [1, None, True, 2.5]
            assert here.bytes_sent > 5000


@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrong_token_is_not_let_in_and_is_told_nothing(kind):
    listener = await listen(kind)
    arriving = listener.expect("engine-0", "data")
    with pytest.raises(StreamClosed, match="did not let 'engine-0' in"):
        await connect(listener.address, token="b" * 64, name="engine-0", channel="data")
    assert not arriving.done()
    said = await everything_said(listener.address, {"proof": "0" * 64, "name": "engine-0", "channel": "data"})
    assert said.count(b"HRW") == 1 and b"proof" not in said, "more than the challenge was told"
    theirs = await connect(listener.address, token=TOKEN, name="engine-0", channel="data")  # still expected
    (await arriving).write("welcome")
    assert await theirs.receive() == "welcome"
    listener.close()


async def everything_said(address: str, hello: dict[str, Any]) -> bytes:
    """All that a listener says to somebody whose hello is wrong, until it hangs up."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(place)
    else:
        host, _, port = place.rpartition("@")[2].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context() if kind == "tls" else None)
    writer.write(frames.encode({"challenge": "0" * 32, **hello}))
    said = await reader.read()
    writer.close()
    return said


async def test_a_listener_that_does_not_know_the_token_is_refused(short_folder):
    """It takes whatever it is told for a proof, and answers with one of its own."""
    heard = []

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream(reader, writer)
        stream.write({"challenge": "0" * 32})
        heard.append(await stream.receive())
        stream.write({"proof": "f" * 64})

    server = await asyncio.start_unix_server(pretend, short_folder / "s")
    with pytest.raises(PermissionError, match="does not know this run's token"):
        await connect(f"unix:{short_folder / 's'}", token=TOKEN, name="engine-0", channel="data")
    assert TOKEN not in repr(heard)
    server.close()


async def test_a_proof_cannot_be_played_back():
    """Somebody who saw a whole greeting says the same again; and a client's proof is not the listener's."""
    listener = await listen("unix")
    listener.expect("engine-0", "data")
    seen = proof(TOKEN, "client", "1" * 32, "engine-0", "data", "0")
    who = {"name": "engine-0", "channel": "data", "incarnation": 0}
    said = await everything_said(listener.address, {"proof": seen, **who})
    assert b"proof" not in said
    listener.close()


def relaying(challenge: str, answer: dict[str, Any], heard: list[dict[str, Any]]) -> Callable[..., Awaitable[None]]:
    """A listener in the middle: it asks what it is told to ask, notes the hello, and answers as it is told."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream(reader, writer)
        stream.write({"challenge": challenge})
        heard.append(await stream.receive())
        stream.write(answer)
        stream.close()

    return talk


@pytest.mark.parametrize(
    "change",
    [{"channel": "control"}, {"name": "engine-1"}, {"incarnation": 1}, {}],
    ids=["channel", "name", "incarnation", "nothing"],
)
async def test_a_proof_for_one_channel_opens_no_other(change):
    """Somebody in the middle passes a hello on as that of another of the run's streams. (As it is, it is let in.)"""
    listener, heard = await listen("tcp"), []
    for who in (("engine-0", "data"), ("engine-0", "control"), ("engine-1", "data")):
        listener.expect(*who)
    host, _, port = listener.address.removeprefix("tcp:").rpartition(":")
    stream = Stream(*await asyncio.open_connection(host, int(port)))
    challenge = (await stream.receive())["challenge"]
    async with await asyncio.start_server(relaying(challenge, {}, heard), "127.0.0.1", 0) as middle:
        with pytest.raises(PermissionError):
            address = f"tcp:127.0.0.1:{middle.sockets[0].getsockname()[1]}"
            await connect(address, token=TOKEN, name="engine-0", channel="data")
    stream.write({**heard[0], **change})
    if change:
        with pytest.raises(StreamClosed):
            await stream.receive()
    else:
        assert "proof" in await stream.receive()
    stream.close()
    listener.close()


@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "not pinned"])
async def test_nobody_between_two_hosts_passes_their_proofs_on(pins):
    """Somebody in the middle has a certificate of their own and passes every byte on, to the listener over TLS."""
    listener = await listen("tls")
    arriving = listener.expect("engine-0", "data")
    pinned, _, place = listener.address.removeprefix("tls:").rpartition("@")
    host, _, port = place.rpartition(":")

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, int(port), ssl=client_context())

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while got := await source.read(4096):
                target.write(got)
            target.close()

        await asyncio.gather(copy(reader, ours), copy(theirs, writer))

    context = server_context(make_certificate())
    async with await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context) as middle:
        address = f"tls:{pinned + '@' if pins else ''}127.0.0.1:{middle.sockets[0].getsockname()[1]}"
        with pytest.raises(PermissionError if pins else StreamClosed, match="certificate" if pins else "did not let"):
            await connect(address, token=TOKEN, name="engine-0", channel="data")
    assert not arriving.done()
    through = await connect(f"tls:{place}", token=TOKEN, name="engine-0", channel="data")
    through.close()
    (await arriving).close()
    listener.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_only_the_newest_incarnation_is_let_in(kind):
    """An engine that was given up, and could not be killed, comes too late: its successor is expected in its place."""
    listener = await listen(kind)
    first = listener.expect("engine-0", "data", incarnation=1)
    second = listener.expect("engine-0", "data", incarnation=2)
    for late in (1, 3):
        with pytest.raises(StreamClosed, match="did not let 'engine-0' in"):
            await connect(listener.address, token=TOKEN, name="engine-0", channel="data", incarnation=late)
    theirs = await connect(listener.address, token=TOKEN, name="engine-0", channel="data", incarnation=2)
    (await second).write("welcome")
    assert await theirs.receive() == "welcome" and not first.done()
    for stream in (theirs, second.result()):
        stream.close()
    listener.close()


@pytest.mark.parametrize("padding", [0, streams._HELLO_BYTES])
async def test_a_hello_is_read_up_to_its_limit_alone(padding):
    """Its proof is right; what comes with it is too long."""
    listener = await listen("tcp")
    arriving = listener.expect("engine-0", "data")
    host, _, port = listener.address.removeprefix("tcp:").rpartition(":")
    stream = Stream(*await asyncio.open_connection(host, int(port)))
    claim = proof(TOKEN, "client", (await stream.receive())["challenge"], "engine-0", "data", "0")
    who = {"name": "engine-0", "channel": "data", "incarnation": 0}
    stream.write({"proof": claim, "challenge": "0" * (32 + padding), **who})
    if padding:
        with pytest.raises(StreamClosed):
            await stream.receive()
    else:
        assert "proof" in await stream.receive()
    assert arriving.done() is (padding == 0)
    stream.close()
    listener.close()


@pytest.mark.parametrize("kind", ["tcp", "tls"])
async def test_silent_peers_do_not_use_up_descriptors(monkeypatch, kind):
    monkeypatch.setattr(streams, "_HANDSHAKE_SECONDS", 0.05)
    monkeypatch.setattr(streams, "_MOST_GREETING", 2)
    listener = await listen(kind)
    place = listener.address.rpartition("@")[2].removeprefix("tcp:").split(":")
    opened = [await asyncio.open_connection(*place) for _ in range(3)]
    last, _ = opened[-1]  # the others are greeted, or else all are dropped in the handshake
    assert await asyncio.wait_for(last.read(), 5) == b""
    assert len(listener._greeting) == (2 if kind == "tcp" else 0)
    for _, writer in opened:
        writer.close()
    listener.close()


@pytest.mark.parametrize("error", [TimeoutError(110, "timed out"), OSError(113, "no route to host")])
async def test_a_network_that_is_lost_closes_the_stream(error):
    async with joined("tcp") as (ours, _):
        ours._reader.set_exception(error)
        with pytest.raises(StreamClosed):
            await ours.receive()


async def test_what_a_listener_says_is_read_up_to_the_same_limit():
    long = relaying("0" * streams._HELLO_BYTES, {}, [])
    async with await asyncio.start_server(long, "127.0.0.1", 0) as middle:
        with pytest.raises(PermissionError, match=r"is not one of this run: .*bytes"):
            address = f"tcp:127.0.0.1:{middle.sockets[0].getsockname()[1]}"
            await connect(address, token=TOKEN, name="engine-0", channel="data")


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1", b"HRW", "oversized", "not a dict", "no proof", "odd name"])
async def test_who_says_nothing_or_nonsense_is_shown_out_and_hinders_nobody(monkeypatch, words):
    said: bytes = {
        "oversized": frames._PREAMBLE.pack(frames._MAGIC, frames.SCHEMA, 100, 1 << 30),
        "not a dict": frames.encode([1, 2]),
        "no proof": frames.encode({"name": "engine-0", "channel": "data"}),
        "odd name": frames.encode({"proof": "00", "name": ["engine-0"], "channel": {}, "challenge": 3}),
    }.get(words, words)
    listener = await listen("unix")
    arriving = listener.expect("engine-0", "data")
    reader, writer = await asyncio.open_unix_connection(listener.address.removeprefix("unix:"))
    writer.write(said)
    await reader.readexactly(1)  # it is being greeted
    is_silent = isinstance(words, bytes)  # each is less than the beginning of a message
    assert not is_silent or listener._greeting, "there are 30 s to say hello"
    theirs = await connect(listener.address, token=TOKEN, name="engine-0", channel="data")
    (await arriving).write(1)
    assert await theirs.receive() == 1 and (not is_silent or listener._greeting)
    if is_silent:
        monkeypatch.setattr(streams, "_HELLO_SECONDS", 0.01)
        reader, _ = await asyncio.open_unix_connection(listener.address.removeprefix("unix:"))
    async with asyncio.timeout(20):
        await reader.read()
        writer.close()
        listener.close()
        while listener._greeting:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("who", [("engine-1", "data"), ("engine-0", "control")])
async def test_nobody_is_let_in_who_is_not_expected(who):
    listener = await listen("unix")
    arriving = listener.expect("engine-0", "data")
    with pytest.raises(StreamClosed, match=f"did not let '{who[0]}' in as '{who[1]}'.*not expected"):
        await connect(listener.address, token=TOKEN, name=who[0], channel=who[1])
    assert not arriving.done()
    await connect(listener.address, token=TOKEN, name="engine-0", channel="data")
    await arriving
    with pytest.raises(StreamClosed):  # each is expected once
        await connect(listener.address, token=TOKEN, name="engine-0", channel="data")
    listener.close()


async def test_a_listener_that_is_silent_is_given_up(monkeypatch, short_folder):
    monkeypatch.setattr(streams, "_HELLO_SECONDS", 0.2)
    server = await asyncio.start_unix_server(lambda *_: None, short_folder / "s")
    with pytest.raises(TimeoutError):
        await connect(f"unix:{short_folder / 's'}", token=TOKEN, name="engine-0", channel="data")
    with pytest.raises(ValueError, match="unix:PATH, tcp:HOST:PORT or tls:"):
        await connect("pigeon:home", token=TOKEN, name="engine-0", channel="data")
    server.close()


async def test_a_port_that_is_taken_is_named_with_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} on 127\.0\.0\.1 cannot be used.*choose another"):
            await Listener.between_hosts("127.0.0.1", port, token=TOKEN)


async def test_the_socket_is_this_users_alone_and_goes_with_its_listener():
    listener = await listen("unix")
    folder = Path(listener.address.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and f"headrace-{os.getpid()}-" in folder.name
    waiting = asyncio.ensure_future(everything_said(listener.address, {}))
    await asyncio.sleep(0.05)
    listener.close()
    await waiting  # who was being greeted is let go too
    assert not folder.exists()
    with pytest.raises(OSError, match="No such file"):
        await connect(listener.address, token=TOKEN, name="engine-0", channel="data")


async def test_a_long_folder_for_temporary_files_is_no_hindrance(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    async with joined() as (ours, theirs):
        ours.write(1)
        assert await theirs.receive() == 1


# Calls


async def test_calls_answer_in_any_order_and_arrive_in_theirs():
    arrived: list[int] = []
    gates = [asyncio.Event() for _ in range(20)]

    async def answer(number: int) -> int:
        arrived.append(number)
        await gates[number].wait()
        return number * number

    async with peers({"square": answer}) as (caller, *_):
        answers = [caller.begin("square", number=number) for number in range(20)]
        while len(arrived) < 20:  # noqa: ASYNC110  (one event would not say how many)
            await asyncio.sleep(0.001)
        assert arrived == list(range(20))
        for number in reversed(range(20)):
            gates[number].set()
            assert await answers[number] == number * number
            assert not any(other.done() for other in answers[:number])
        assert not caller._open


class Odd(Exception):
    """A user's own kind of error."""


async def test_what_a_call_raises_is_raised_here_with_its_kind_and_place():
    async def odd() -> None:
        raise Odd("it does not add up")

    async def wrong() -> None:
        raise ConfigError("threads = -1: must be above 0")

    async def unsendable() -> object:
        return object()

    async with peers({"odd": odd, "wrong": wrong, "unsendable": unsendable}) as (caller, *_):
        with pytest.raises(RemoteError, match="Odd: it does not add up") as caught:
            await caller.call("odd")
        error = caught.value
        assert (error.kind, error.message, error.is_config) == ("Odd", "it does not add up", False)
        assert "test_rpc.py" in error.frame and "in odd" in error.detail
        with pytest.raises(RemoteError) as caught:
            await caller.call("wrong")
        assert caught.value.is_config and caught.value.message.startswith("threads = -1")
        with pytest.raises(RemoteError, match="does not travel"):
            await caller.call("unsendable")
        with pytest.raises(RemoteError, match="there is no call 'nothing'"):
            await caller.call("nothing")
        with pytest.raises(RemoteError, match="unexpected keyword"):
            await caller.call("odd", number=3)


async def test_when_the_other_end_dies_open_calls_fail_and_no_more_are_begun():
    called = asyncio.Event()

    async def never() -> None:
        called.set()
        await asyncio.Event().wait()

    async with peers({"never": never}) as (caller, answerer, reading):
        answers = [caller.begin("never") for _ in range(3)]
        await called.wait()
        answerer.stream._writer.transport.abort()  # as the system does for a killed process
        for answer in answers:
            with pytest.raises(StreamClosed):
                await answer
        with pytest.raises(StreamClosed):
            await reading
        with pytest.raises(StreamClosed):  # at once, not left without an answer
            caller.begin("never")


async def test_a_call_that_is_cancelled_is_forgotten_and_its_answer_ignored():
    gate = asyncio.Event()

    async def late() -> int:
        await gate.wait()
        return 1

    async def soon() -> int:
        return 2

    async with peers({"late": late, "soon": soon}) as (caller, *_):
        with pytest.raises(TimeoutError):
            await caller.call("late", timeout=0.02)
        waiting = asyncio.ensure_future(caller.call("late"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not caller._open
        gate.set()
        assert await caller.call("soon") == 2


@pytest.mark.parametrize("fault", ["flipped", "not a message", "unknown notice", "half a call"])
async def test_what_cannot_be_read_ends_the_stream_and_open_calls(fault):
    async def never() -> None:
        await asyncio.Event().wait()

    async with joined() as (ours, theirs):
        caller = Peer(ours)
        reading = asyncio.ensure_future(caller.run())
        answer = caller.begin("never")
        frame = bytearray(frames.encode({"answer": 0, "value": list(range(100))}))
        frame[60] ^= 4
        said = {
            "flipped": bytes(frame),
            "not a message": frames.encode([1]),
            "unknown notice": frames.encode({"notice": "gossip", "value": 1}),
            "half a call": frames.encode({"call": "never"}),
        }
        theirs._writer.write(said[fault])
        with pytest.raises(frames.WireError):
            await reading
        with pytest.raises(StreamClosed, match="cannot be read"):  # to whoever waits, the other end is lost
            await answer
        with pytest.raises(StreamClosed):
            caller.begin("never")


@pytest.mark.parametrize("kind", KINDS)
async def test_large_frames_cross_without_waiting_for_each_other(kind):
    block = np.arange(30 << 18, dtype=np.int32)

    async def echo(block: np.ndarray) -> np.ndarray:
        return block + 1

    async with joined(kind) as (ours, theirs):
        left, right = Peer(ours, calls={"echo": echo}), Peer(theirs, calls={"echo": echo})
        reading = [asyncio.ensure_future(peer.run()) for peer in (left, right)]
        answers = await asyncio.gather(left.call("echo", block=block), right.call("echo", block=block))
        assert all(np.array_equal(answer, block + 1) for answer in answers)
        for task in reading:
            task.cancel()


async def test_a_frame_of_many_pieces_lets_other_tasks_run_and_keeps_its_place(monkeypatch):
    monkeypatch.setattr(frames, "PIECE", 1 << 16)

    async def echo(block: np.ndarray) -> np.ndarray:
        return block

    seen: list[object] = []
    block = np.arange(1 << 20, dtype=np.int32)
    num_turns, written = 0, []

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async with peers({"echo": echo}, {"note": lambda value: seen.append(value)}) as (caller, *_):
        write = caller.stream._writer.write
        monkeypatch.setattr(caller.stream._writer, "write", lambda piece: (written.append(len(piece)), write(piece)))
        turning = asyncio.ensure_future(count_turns())
        caller.notify("note", "before")
        answer = caller.begin("echo", block=block)
        caller.notify("note", "after")
        assert caller.stream.backlog > block.nbytes and caller.stream.bytes_sent > block.nbytes
        assert np.array_equal(await answer, block)
        assert len(await caller.call("echo", block=block[:1])) == 1 and seen == ["before", "after"]
        turning.cancel()
        assert caller.stream.backlog == 0 and len(written) > 60 and max(written) < (1 << 16) + 100
        assert num_turns > 60


async def test_pieces_that_wait_can_be_drained_or_end_with_their_stream(monkeypatch):
    monkeypatch.setattr(frames, "PIECE", 1 << 16)
    block = np.zeros(64 << 20, dtype=np.uint8)  # more than both ends and the system between them hold
    async with joined() as (ours, theirs):
        ours.write(block)
        draining = asyncio.ensure_future(ours.drain())
        await asyncio.sleep(0.02)
        assert not draining.done() and ours.backlog > 0
        assert len(await theirs.receive()) == len(block)
        await draining
        ours.write(block)
        ours.close()
        with pytest.raises(StreamClosed):
            await theirs.receive()
        with pytest.raises(StreamClosed):
            ours.write(1)


async def test_a_piece_that_cannot_be_made_ends_the_stream(monkeypatch):
    """Half a frame has left: the other end would read whatever comes next as the rest of it."""
    monkeypatch.setattr(frames, "PIECE", 1 << 16)
    really = frames.make_frame

    def make_half(value: object) -> frames.Frame:
        frame = really(value)

        def pieces() -> Iterator[bytes]:
            yield next(frame.pieces)
            raise MemoryError("no room for the second piece")

        return frames.Frame(frame.num_bytes, pieces())

    async with joined() as (ours, theirs):
        with monkeypatch.context() as patch:
            patch.setattr(frames, "make_frame", make_half)
            ours.write(np.zeros(1 << 20, dtype=np.uint8))
        sending = ours._sending
        with pytest.raises(StreamClosed):
            await theirs.receive()
        with pytest.raises(MemoryError, match="second piece"):
            await sending
        with pytest.raises(StreamClosed):
            ours.write(1)


async def test_what_the_other_end_does_not_read_is_seen_and_can_be_waited_for():
    async with joined() as (ours, theirs):
        ours.write(1)
        await ours.drain()
        assert ours.backlog == 0
        for _ in range(24):  # more than both ends and the system between them hold
            ours.write(np.zeros(1 << 20, dtype=np.uint8))
        assert ours.backlog > streams._HIGH_WATER
        draining = asyncio.ensure_future(ours.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        assert await theirs.receive() == 1
        for _ in range(24):
            await theirs.receive()
        await draining
        assert ours.backlog <= streams._HIGH_WATER


async def test_a_notice_arrives_before_what_was_sent_after_it():
    seen: list[int] = []

    async def count() -> int:
        return len(seen)

    async with peers({"count": count}, {"note": seen.append}) as (caller, *_):
        for number in range(50):
            caller.notify("note", number)
        assert await caller.call("count") == 50 and seen == list(range(50))
