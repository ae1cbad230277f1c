"""Calls between the processes of a run: frames over a Unix socket on one host, over TLS between hosts.

A `Stream` carries values in order. A `Peer` sends calls and notices over a stream: either end may call the other, and answers
arrive in any order. A process connects to the launcher's `Listener`; both ends prove that they know the run's token before
anything else they send is parsed, and the token itself is never sent. Over TLS the proofs name the listener's certificate, so
that nobody in between can pass them on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import tempfile
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from headrace.errors import user_frame
from headrace.leftovers import new_prefix
from headrace.proof import is_proven, proof
from headrace.records import frames
from headrace.settings import ConfigError
from headrace.tls import client_context, fingerprint, peer_fingerprint, server_context

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping

    Handler = Callable[..., Awaitable[Any]]
    OnNotice = Callable[[Any], None]

PROTOCOL = 2
"""Rises when what hosts say to each other changes; the frames that carry it have a schema of their own."""
_HELLO_BYTES = 4096
_HELLO_SECONDS = 30.0
_HANDSHAKE_SECONDS = 10.0
"""Of TLS, before that."""
_MOST_GREETING = 256
"""Peers that may be unauthenticated at once."""
_LONGEST_UNIX_PATH = 103
"""Bytes; Linux allows 107."""
_LONGEST_SOCKET_NAME = "/headrace-0000000-00000000-000000/00000000-0000-0000-0000-000000000000"
"""A vLLM server's; our own are shorter."""
_HIGH_WATER = 4 << 20
_READ_AHEAD = 4 << 20
_CLOSED = "the other end closed the stream"


class StreamClosed(ConnectionError):
    """The other end has closed the stream."""


class RemoteError(RuntimeError):
    """A call failed at the other end; `kind` is the name of its exception type."""

    def __init__(self, *, kind: str, message: str, detail: str = "", frame: str = "", is_config: bool = False) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.detail, self.frame, self.is_config = kind, message, detail, frame, is_config


def describe_error(error: BaseException) -> dict[str, Any]:
    """The arguments of the `RemoteError` that the caller will see."""
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "detail": "".join(traceback.format_exception(error)),
        "frame": user_frame(error),
        "is_config": isinstance(error, ConfigError),
    }


class Stream:
    """Sends and receives values in order, each as a frame of `headrace.records.frames`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=_HIGH_WATER)
        self.bytes_sent = 0
        self._waiting: deque[frames.Frame] = deque()  # a frame of several pieces, and those behind it
        self._num_waiting = 0  # their bytes that are not written yet
        self._sending: asyncio.Task[None] | None = None

    @property
    def backlog(self) -> int:
        """Bytes written that the OS has not accepted yet."""
        return self._num_waiting + int(self._writer.transport.get_write_buffer_size())

    @property
    def own_host(self) -> str:
        """The address of this host at this end, over TCP."""
        return str(self._writer.get_extra_info("sockname")[0])

    def write(self, value: object) -> None:
        """Send without waiting. Callers that write a lot check `backlog` or await `drain`. Arrays must not change until they
        are sent: those of a long frame, and of any frame behind it, are read when what is before them has left."""
        frame = frames.make_frame(value)
        if self._writer.is_closing():
            raise StreamClosed("the stream is closed")
        self.bytes_sent += frame.num_bytes
        if not self._waiting and frame.num_bytes <= frames.PIECE:
            self._writer.write(next(frame.pieces))
            return
        self._waiting.append(frame)
        self._num_waiting += frame.num_bytes
        if len(self._waiting) == 1:
            self._sending = asyncio.get_running_loop().create_task(self._send_waiting())

    async def _send_waiting(self) -> None:
        """Other tasks run between two pieces."""
        try:
            while self._waiting:
                for piece in self._waiting[0].pieces:
                    self._num_waiting -= len(piece)
                    self._writer.write(piece)
                    await self._writer.drain()
                self._waiting.popleft()
        except OSError:
            pass  # whoever reads the stream sees that it is closed
        except Exception:
            self._writer.transport.abort()  # half a frame has left: nothing behind it could be read
            raise
        finally:
            self._waiting.clear()
            self._num_waiting = 0

    async def drain(self) -> None:
        """Wait until the OS has accepted most of what was written."""
        if self._sending is not None:
            await asyncio.wait({self._sending})
        try:
            await self._writer.drain()
        except OSError as error:
            raise StreamClosed(_CLOSED) from error

    async def receive(self, *, max_bytes: int = frames.MAX_FRAME) -> Any:  # noqa: ANN401  (anything that was sent)
        reading = frames.reading(max_bytes=max_bytes)
        wanted = next(reading)
        try:
            while True:
                wanted = reading.send(await self._reader.readexactly(wanted))
        except StopIteration as end:
            return end.value
        except (asyncio.IncompleteReadError, OSError) as error:
            raise StreamClosed(_CLOSED) from error

    def close(self) -> None:
        """What waits behind a long frame is not sent any more."""
        with contextlib.suppress(RuntimeError):  # its event loop may be gone already
            if self._sending is not None:
                self._sending.cancel()
            self._writer.close()


class Peer:
    """Calls and notices over a stream. `run` reads until the stream closes; then every open call fails."""

    def __init__(
        self,
        stream: Stream,
        *,
        calls: Mapping[str, Handler] | None = None,
        notices: Mapping[str, OnNotice] | None = None,
        max_bytes: int = frames.MAX_FRAME,
    ) -> None:
        """`max_bytes`: of what the other end may send at once."""
        self.stream, self._max_bytes = stream, max_bytes
        self.calls, self.notices = dict(calls or {}), dict(notices or {})
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._has_ended = False
        self._numbers = itertools.count()
        self._answering: set[asyncio.Task[None]] = set()

    def begin(self, name: str, /, **arguments: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        """Send a call now and return the future of its answer. Calls arrive in the order sent."""
        if self._has_ended:  # a write might succeed, but nobody would read the answer
            raise StreamClosed("the stream is closed")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stream.write({"call": name, "number": number, "with": arguments})
        self._open[number] = answer
        answer.add_done_callback(lambda _: self._open.pop(number, None))
        return answer

    async def call(self, name: str, /, *, timeout: float | None = None, **arguments: Any) -> Any:  # noqa: ANN401, ASYNC109
        """Send a call and wait for its answer, at most `timeout` seconds."""
        return await asyncio.wait_for(self.begin(name, **arguments), timeout)

    def notify(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Send without expecting an answer."""
        self.stream.write({"notice": name, "value": value})

    async def run(self) -> None:
        """Read until the other end closes, which raises `StreamClosed` here and in every open call. Unreadable data, or a
        notice that its handler cannot use, raises `WireError` here and `StreamClosed` in the open calls."""
        try:
            while True:
                message = await self.stream.receive(max_bytes=self._max_bytes)
                try:
                    self._handle(message)
                except (LookupError, TypeError, AttributeError) as error:
                    raise frames.WireError(f"{error!r} in {str(message)[:100]}") from error
        except BaseException as error:
            self._has_ended = True
            is_unreadable = isinstance(error, frames.WireError)
            reason = f"what the other end sent cannot be read: {error}" if is_unreadable else str(error) or "closed here"
            for answer in list(self._open.values()):
                if not answer.done():
                    answer.set_exception(StreamClosed(reason))
                    answer.exception()  # marks it as retrieved, so that asyncio does not warn
            for task in self._answering:
                task.cancel()
            raise

    def _handle(self, message: Any) -> None:  # noqa: ANN401
        match message:
            case {"notice": str(name), "value": value} if name in self.notices:
                self.notices[name](value)
            case {"call": str(name), "number": int(number), "with": dict(arguments)}:
                task = asyncio.get_running_loop().create_task(self._answer(name, number, arguments))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case {"answer": int(number), "error": dict()} | {"answer": int(number), "value": _}:
                answer = self._open.get(number)
                if answer is None or answer.done():
                    return  # cancelled in the meantime
                if "error" in message:
                    answer.set_exception(RemoteError(**message["error"]))
                else:
                    answer.set_result(message["value"])
            case _:
                raise frames.WireError(f"neither a call, an answer nor a known notice: {str(message)[:100]}")

    async def _answer(self, name: str, number: int, arguments: dict[str, Any]) -> None:
        try:
            if name not in self.calls:
                raise LookupError(f"there is no call {name!r}")
            self.stream.write({"answer": number, "value": await self.calls[name](**arguments)})
        except StreamClosed:
            return
        except Exception as error:  # noqa: BLE001  (the caller must see any error)
            with contextlib.suppress(StreamClosed):
                self.stream.write({"answer": number, "error": describe_error(error)})


def socket_place() -> Path:
    """The parent of socket folders: the system's temporary folder, or /tmp if that path is too long for a socket."""
    is_short = len(tempfile.gettempdir()) < _LONGEST_UNIX_PATH - len(_LONGEST_SOCKET_NAME)
    return Path(tempfile.gettempdir() if is_short else "/tmp")


async def open_socket(connection: socket.socket) -> Stream:
    """A stream over a connected socket, such as one end of a pair."""
    return Stream(*await asyncio.open_connection(sock=connection, limit=_READ_AHEAD))


class Listener:
    """Accepts the streams of a run's processes. Each stream announces its process name and channel."""

    address: str
    folder: Path | None = None
    """Of a Unix socket: private to this user, and removed with the listener or at the end of the process."""
    _temporary: tempfile.TemporaryDirectory[str] | None = None
    _server: asyncio.Server

    def __init__(self, *, token: str, certificate: str = "") -> None:
        self._token, self._fingerprint = token, fingerprint(certificate)
        self._bound = [self._fingerprint] if certificate else []
        self._expected: dict[tuple[str, str], tuple[int, asyncio.Future[Stream]]] = {}
        self._greeting: set[asyncio.Task[Any]] = set()

    @classmethod
    async def on_this_host(cls, *, token: str, prefix: str = "") -> Self:
        """A Unix socket in a private folder whose name starts with `prefix`."""
        listener = cls(token=token)
        listener._temporary = tempfile.TemporaryDirectory(
            prefix=f"{prefix or new_prefix()}-", dir=socket_place(), ignore_cleanup_errors=True
        )
        listener.folder = folder = Path(listener._temporary.name)
        listener.address = f"unix:{folder / 's'}"
        listener._server = await asyncio.start_unix_server(listener._admit, folder / "s", limit=_READ_AHEAD)
        return listener

    @classmethod
    async def between_hosts(cls, host: str, port: int = 0, *, token: str, certificate: str = "", address: str = "") -> Self:
        """A TCP port, with TLS if there is a certificate; 0 picks a free one. `address`: what others call `host`."""
        listener = cls(token=token, certificate=certificate)
        tls: dict[str, Any] = {}
        if certificate:
            tls = {"ssl": server_context(certificate), "ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        try:
            listener._server = await asyncio.start_server(listener._admit, host, port, limit=_READ_AHEAD, **tls)
        except OSError as error:
            raise OSError(error.errno, f"port {port} on {host} cannot be used ({error.strerror}); choose another") from error
        port = listener._server.sockets[0].getsockname()[1]
        kind = f"tls:{listener._fingerprint}@" if certificate else "tcp:"
        listener.address = f"{kind}{address or host}:{port}"
        return listener

    def expect(self, name: str, channel: str, *, incarnation: int = 0) -> asyncio.Future[Stream]:
        """The stream that this incarnation of `name` will open for `channel`; earlier incarnations are rejected from now on."""
        arrived: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._expected[name, channel] = incarnation, arrived
        return arrived

    def _find(self, name: str, channel: str) -> tuple[int, asyncio.Future[Stream]]:
        """The incarnation that may open this stream, and who waits for it; raises LookupError if nobody does."""
        return self._expected[name, channel]

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Drop peers that are unauthenticated, unexpected or silent."""
        stream, task, is_admitted = Stream(reader, writer), asyncio.current_task(), False
        assert task is not None
        if len(self._greeting) >= _MOST_GREETING:
            return stream.close()
        self._greeting.add(task)
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                challenge = secrets.token_hex(16)
                stream.write({"challenge": challenge})
                hello = await stream.receive(max_bytes=_HELLO_BYTES)
            name, channel = hello["name"], hello["channel"]
            incarnation, arrived = self._find(name, channel)
            claim = ("client", challenge, name, channel, incarnation, *self._bound)
            if is_proven(hello["proof"], self._token, *claim) and hello["incarnation"] == incarnation and not arrived.done():
                stream.write({"proof": proof(self._token, "server", str(hello["challenge"]), *self._bound)})
                self._expected.pop((name, channel), None)
                arrived.set_result(stream)
                is_admitted = True
        except (OSError, TimeoutError, asyncio.CancelledError, frames.WireError, LookupError, TypeError):
            pass  # closed below; this task ends here, and asyncio logs one that is cancelled
        finally:
            self._greeting.discard(task)
            if not is_admitted:
                stream.close()

    def close(self) -> None:
        self._server.close()
        for task in self._greeting:
            task.cancel()
        if self._temporary is not None:
            self._temporary.cleanup()


async def connect(address: str, *, token: str, name: str, channel: str, incarnation: int = 0) -> Stream:
    """Open a stream to a listener, and check that it belongs to this run. `incarnation` counts the starts of process `name`."""
    kind, _, place = address.partition(":")
    pinned, found = "", list[str]()
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(place, limit=_READ_AHEAD)
    elif kind in ("tcp", "tls"):
        pinned, _, place = place.rpartition("@")
        host, _, port = place.rpartition(":")
        context = client_context() if kind == "tls" else None
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=_READ_AHEAD, ssl=context)
        found = [peer_fingerprint(writer.get_extra_info("ssl_object"))] if context else []
    else:
        raise ValueError(f"address {address!r}: must be unix:PATH, tcp:HOST:PORT or tls:[FINGERPRINT@]HOST:PORT")
    stream = Stream(reader, writer)
    try:
        if pinned and found != [pinned]:
            raise PermissionError(f"the listener at {address} has another certificate than this run")
        async with asyncio.timeout(_HELLO_SECONDS):
            asked = await stream.receive(max_bytes=_HELLO_BYTES)
            challenge = secrets.token_hex(16)
            claim = proof(token, "client", str(asked["challenge"]), name, channel, str(incarnation), *found)
            hello = {"name": name, "channel": channel, "incarnation": incarnation}
            stream.write({"proof": claim, "challenge": challenge, **hello})
            answer = await stream.receive(max_bytes=_HELLO_BYTES)
        if not is_proven(answer["proof"], token, "server", challenge, *found):
            raise PermissionError(f"the listener at {address} does not know this run's token")
        return stream
    except BaseException as error:
        stream.close()
        if isinstance(error, frames.WireError | LookupError | TypeError):
            raise PermissionError(f"the listener at {address} is not one of this run: {error}") from error
        if isinstance(error, StreamClosed):
            reason = "another token, or it is not expected"
            raise StreamClosed(f"{address} did not let {name!r} in as {channel!r}: {reason}") from error
        raise
