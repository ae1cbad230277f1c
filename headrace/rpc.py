"""Frames over a socket: a Unix socket on one host, TCP between hosts.

Either end proves that it knows the run's token before anything else is read from it, and the token itself never travels.
`Peer` puts calls and notices over such a stream; each end may call the other, and calls answer in any order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import socket
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import user_frame
from headrace.proof import is_proven, proof
from headrace.records import frames
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    Handler = Callable[..., Awaitable[Any]]
    OnNotice = Callable[[Any], None]

_HELLO_BYTES = 4096
_HELLO_SECONDS = 30.0
_LONGEST_UNIX_PATH = 100
"""Bytes; the system takes 108."""
_HIGH_WATER = 4 << 20
_READ_AHEAD = 4 << 20


class StreamClosed(ConnectionError):
    """The other end is gone."""


class RemoteError(RuntimeError):
    """A call failed at the other end; `kind` is the type of what was raised there."""

    def __init__(self, *, kind: str, message: str, detail: str = "", frame: str = "", is_config: bool = False) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.detail, self.frame, self.is_config = kind, message, detail, frame, is_config


class Stream:
    """Values in order, each a frame of `headrace.records.frames`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=_HIGH_WATER)
        self.bytes_sent = self.bytes_received = 0

    @property
    def backlog(self) -> int:
        """Bytes written here that the other end has not taken yet."""
        size: int = self._writer.transport.get_write_buffer_size()
        return size

    def write(self, value: object) -> None:
        """Send without waiting; whoever writes much looks at `backlog` or awaits `drain`."""
        frame = frames.encode(value)
        self.bytes_sent += len(frame)
        if self._writer.is_closing():
            raise StreamClosed("the stream is closed")
        self._writer.write(frame)

    async def drain(self) -> None:
        """Until the other end has taken most of what was written."""
        with _closed_explained():
            await self._writer.drain()

    async def receive(self, *, max_bytes: int = frames.MAX_FRAME) -> Any:  # noqa: ANN401  (what was sent)
        with _closed_explained():
            preamble = await self._reader.readexactly(frames.PREAMBLE_BYTES)
            rest = await self._reader.readexactly(frames.remaining_bytes(preamble, max_bytes=max_bytes))
        self.bytes_received += len(preamble) + len(rest)
        return frames.decode(preamble + rest, max_bytes=max_bytes)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop may be gone already
            self._writer.close()


@contextlib.contextmanager
def _closed_explained() -> Iterator[None]:
    try:
        yield
    except (asyncio.IncompleteReadError, ConnectionError, BrokenPipeError) as error:
        raise StreamClosed("the other end closed the stream") from error


class Peer:
    """Calls and notices over a stream. `run` reads until the stream closes; every open call then fails."""

    def __init__(
        self, stream: Stream, *, calls: Mapping[str, Handler] | None = None, notices: Mapping[str, OnNotice] | None = None
    ) -> None:
        self.stream = stream
        self.calls, self._notices = dict(calls or {}), dict(notices or {})
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._has_ended = False
        self._numbers = itertools.count()
        self._answering: set[asyncio.Task[None]] = set()

    def begin(self, name: str, /, **arguments: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        """Send a call now; the future is its answer. Calls arrive in the order they were begun."""
        if self._has_ended:  # what is written may still find its way, and no answer ever would
            raise StreamClosed("the stream is closed")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stream.write({"call": name, "number": number, "with": arguments})
        self._open[number] = answer
        answer.add_done_callback(lambda _: self._open.pop(number, None))
        return answer

    async def call(self, name: str, /, *, timeout: float | None = None, **arguments: Any) -> Any:  # noqa: ANN401, ASYNC109
        """Send a call and wait for its answer, at most `timeout` seconds."""
        answer = self.begin(name, **arguments)
        return await asyncio.wait_for(answer, timeout)

    def notify(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Send and expect no answer."""
        self.stream.write({"notice": name, "value": value})

    async def run(self) -> None:
        """Read until the other end closes, which raises `StreamClosed` here and in every open call. What cannot be read raises
        `WireError` here; to whoever waits for an answer the stream is closed then too."""
        try:
            while True:
                self._take(await self.stream.receive())
        except BaseException as error:
            self._has_ended = True
            reason = _reason_of_end(error)
            for answer in list(self._open.values()):
                if not answer.done():
                    answer.set_exception(reason)
                    answer.exception()  # whoever awaits it sees it; nobody need
            for task in self._answering:
                task.cancel()
            raise

    def _take(self, message: Any) -> None:  # noqa: ANN401
        _check_message(message)
        if "notice" in message:
            handler = self._notices.get(message["notice"])
            if handler is None:
                raise frames.WireError(f"unknown notice {message['notice']!r}")
            handler(message["value"])
        elif "call" in message:
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            self._take_answer(message)

    def _take_answer(self, message: dict[str, Any]) -> None:
        answer = self._open.get(message.get("answer", -1))
        if answer is None or answer.done():
            return  # cancelled meanwhile
        if "error" in message:
            answer.set_exception(RemoteError(**message["error"]))
        else:
            answer.set_result(message["value"])

    async def _answer(self, message: dict[str, Any]) -> None:
        number, handler = message["number"], self.calls.get(message["call"])
        try:
            if handler is None:
                raise LookupError(f"there is no call {message['call']!r}")
            value = await handler(**message["with"])
            self.stream.write({"answer": number, "value": value})
        except StreamClosed:
            return
        except Exception as error:  # noqa: BLE001  (whatever it is, the caller is to see it)
            with contextlib.suppress(StreamClosed):
                self.stream.write({"answer": number, "error": describe_error(error)})


_FORMS: dict[str, dict[str, type]] = {
    "notice": {"notice": str, "value": object},
    "call": {"call": str, "number": int, "with": dict},
    "error": {"answer": int, "error": dict},
    "answer": {"answer": int, "value": object},
}


def _check_message(message: Any) -> None:  # noqa: ANN401
    """Refuse a frame that is none of ours before anything is done about it."""
    if not isinstance(message, dict):
        raise frames.WireError("a message is a dict")
    form = next((form for key, form in _FORMS.items() if key in message), None)
    if form is None or message.keys() != form.keys() or not all(isinstance(message[key], form[key]) for key in form):
        raise frames.WireError(f"a message with {', '.join(map(repr, message)) or 'nothing in it'} is not one of ours")


def _reason_of_end(error: BaseException) -> StreamClosed:
    if isinstance(error, StreamClosed):
        return error
    if isinstance(error, frames.WireError):
        return StreamClosed(f"what the other end sent cannot be read: {error}")
    return StreamClosed("the stream was closed here")


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain data."""
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "detail": "".join(traceback.format_exception(error)),
        "frame": user_frame(error),
        "is_config": isinstance(error, ConfigError),
    }


def socket_place() -> Path:
    """Where the folders of sockets lie: with the system's temporary files, unless that path is too long for a socket."""
    is_short = len(tempfile.gettempdir()) < _LONGEST_UNIX_PATH - len("/headrace-0000000-00000000-00000000/s")
    return Path(tempfile.gettempdir() if is_short else "/tmp")


class Listener:
    """Where the processes of a run connect. Each says its name and which of its streams this is."""

    def __init__(self, *, token: str, folder: Path | None) -> None:
        self._token, self._folder = token, folder
        self._server: asyncio.Server | None = None
        self._expected: dict[tuple[str, str], tuple[int, asyncio.Future[Stream]]] = {}
        self._greeting: set[asyncio.Task[Any]] = set()
        self.address = ""

    @classmethod
    async def on_this_host(cls, *, token: str, prefix: str = "") -> Listener:
        """A Unix socket in a folder, named after the prefix, that only this user may enter."""
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix or f'headrace-{os.getpid()}'}-", dir=socket_place()))
        listener = cls(token=token, folder=folder)
        path = folder / "s"
        try:
            listener._server = await asyncio.start_unix_server(listener._greet, path, limit=_READ_AHEAD)
        except BaseException:
            listener.close()
            raise
        listener.address = f"unix:{path}"
        return listener

    @classmethod
    async def between_hosts(cls, host: str, port: int = 0, *, token: str) -> Listener:
        """A TCP port; 0 takes a free one."""
        listener = cls(token=token, folder=None)
        try:
            server = await asyncio.start_server(listener._greet, host, port, limit=_READ_AHEAD)
        except OSError as error:
            raise OSError(error.errno, f"port {port} on {host} cannot be used ({error.strerror}); choose another") from error
        listener._server = server
        listener.address = f"tcp:{host}:{server.sockets[0].getsockname()[1]}"
        return listener

    def expect(self, name: str, channel: str, *, incarnation: int = 0) -> asyncio.Future[Stream]:
        """The stream that this incarnation of `name` will open for `channel`; earlier ones are no longer let in."""
        arrived: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._expected[name, channel] = incarnation, arrived
        return arrived

    def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._greeted(Stream(reader, writer)))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greeted(self, stream: Stream) -> None:
        """Who cannot prove the token, is not expected, or says nothing, is shown out."""
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                challenge = secrets.token_hex(16)
                stream.write({"challenge": challenge})
                hello = await stream.receive(max_bytes=_HELLO_BYTES)
            name, channel = hello["name"], hello["channel"]
            if not is_proven(hello["proof"], self._token, "client", challenge, name, channel, hello["incarnation"]):
                raise PermissionError("wrong token")
            incarnation, arrived = self._expected[name, channel]
            if hello["incarnation"] != incarnation:
                raise PermissionError(f"incarnation {hello['incarnation']} of {name}, where {incarnation} is expected")
            stream.write({"proof": proof(self._token, "server", str(hello["challenge"]))})
            del self._expected[name, channel]
            arrived.set_result(stream)
        except (OSError, TimeoutError, frames.WireError, LookupError, TypeError, asyncio.InvalidStateError):
            stream.close()
        except asyncio.CancelledError:
            stream.close()
            raise

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._greeting:
            task.cancel()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


async def connect(address: str, *, token: str, name: str, channel: str, incarnation: int = 0) -> Stream:
    """Open one of this process's streams to a listener, and check that it is the run's own. `incarnation` counts the starts of
    the process that has this name."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(place, limit=_READ_AHEAD)
    elif kind == "tcp":
        host, _, port = place.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=_READ_AHEAD)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        raise ValueError(f"address {address!r}: must be unix:PATH or tcp:HOST:PORT")
    stream = Stream(reader, writer)
    try:
        async with asyncio.timeout(_HELLO_SECONDS):
            await _introduce(stream, address, token, name, channel, incarnation)
    except BaseException:
        stream.close()
        raise
    return stream


async def _introduce(stream: Stream, address: str, token: str, name: str, channel: str, incarnation: int) -> None:
    try:
        asked = await stream.receive(max_bytes=_HELLO_BYTES)
        challenge = secrets.token_hex(16)
        claim = proof(token, "client", str(asked["challenge"]), name, channel, str(incarnation))
        hello = {"name": name, "channel": channel, "incarnation": incarnation}
        stream.write({"proof": claim, "challenge": challenge, **hello})
        answer = await stream.receive(max_bytes=_HELLO_BYTES)
        is_ours = is_proven(answer["proof"], token, "server", challenge)
    except (frames.WireError, LookupError, TypeError) as error:
        raise PermissionError(f"whoever listens at {address} does not speak as this run does: {error}") from error
    except StreamClosed as error:
        raise StreamClosed(f"{address} did not let {name!r} in as {channel!r}: another token, or it is not expected") from error
    if not is_ours:
        raise PermissionError(f"whoever listens at {address} does not know this run's token")
