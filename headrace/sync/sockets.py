"""Shared by `collective` and `http`: a server with one thread per connection, and a connect that can be cancelled."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from headrace.errors import SyncError
from headrace.tls import check_peer, client_context, server_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

TICK = 0.1  # seconds. Every wait on a socket checks this often whether to go on.
_ATTEMPT = 1.0  # seconds that an attempt to connect may take
_HANDSHAKE = 5.0  # seconds that TLS may take to begin
_MOST_CONNECTIONS = 256


class Server:
    """Runs `serve(connection, is_closed)` in a thread per connection; it must return a few `TICK`s after `is_closed` is set."""

    def __init__(
        self, host: str, *, serve: Callable[[socket.socket, threading.Event], None], name: str, certificate: str = ""
    ) -> None:
        """Over TLS if there is a certificate."""
        self._serve, self._name = serve, name
        self._context = server_context(certificate) if certificate else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, 0), family=family, backlog=_MOST_CONNECTIONS)
        except OSError as error:
            raise SyncError(f"cannot listen on {host}: {error.strerror or error}") from error
        self._listening.settimeout(TICK)
        self.port: int = self._listening.getsockname()[1]
        self._is_closed = threading.Event()
        self._threads: set[threading.Thread] = set()  # only the accepting thread touches this, until it has ended
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Return when all threads have ended."""
        self._is_closed.set()
        with contextlib.suppress(OSError):  # wakes the accepting thread at once on some systems; on others TICK does
            self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listening.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:  # out of file descriptors, or the peer has left already
                self._is_closed.wait(TICK)
                continue
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            if len(self._threads) >= _MOST_CONNECTIONS:
                connection.close()
                continue
            thread = threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-serve", daemon=True)
            thread.start()
            self._threads.add(thread)

    def _run(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            if self._context is None:
                _prepare(connection)
                self._serve(connection, self._is_closed)
                return
            connection.settimeout(_HANDSHAKE)
            with self._context.wrap_socket(connection, server_side=True) as encrypted:
                _prepare(encrypted)
                self._serve(encrypted, self._is_closed)


def connect(host: str, port: int, *, check: Callable[[], None], fingerprint: str = "") -> socket.socket:
    """Open a connection with timeout `TICK`, over TLS to the peer with this `fingerprint` if one is given. Raises OSError.
    Between attempts this calls `check`, which raises to give up."""
    while True:
        check()
        try:
            connection = socket.create_connection((host, port), timeout=_ATTEMPT)
        except TimeoutError:
            continue
        if fingerprint:
            connection = encrypt(connection, fingerprint)
        _prepare(connection)
        return connection


def encrypt(connection: socket.socket, fingerprint: str) -> ssl.SSLSocket:
    """The connection over TLS; it is closed if that fails, or the peer has another certificate."""
    connection.settimeout(_HANDSHAKE)
    with contextlib.ExitStack() as on_error:
        on_error.callback(connection.close)
        encrypted = client_context().wrap_socket(connection)
        on_error.callback(encrypted.close)
        check_peer(encrypted, fingerprint)
        on_error.pop_all()
    return encrypted


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(TICK)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
