"""Where the server listens, and to which names it answers: loopback, or any if it has a token."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from headrace.settings import ConfigError


def bind(host: str, port: int, *, has_token: bool) -> socket.socket:
    """A listening socket, made before the model loads, so that a taken port fails at once. Early connections wait."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}: must be between 0 and 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    family, _, _, _, where = found[0]
    if not has_token and not ipaddress.ip_address(str(where[0]).split("%")[0]).is_loopback:
        raise ConfigError(
            f"--host {host}: others could reach it, so it needs a token; set HEADRACE_API_TOKEN or --api-token-file, or leave "
            f"--host at 127.0.0.1"
        )
    try:
        listener = socket.create_server(where, family=family, backlog=1024)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise ConfigError(f"--port {port}: cannot listen on {host}: {reason}; give another --port") from error
    listener.setblocking(False)
    return listener


def is_loopback(header: str, *, own: str) -> bool:
    """Whether a Host header names loopback, or is `own`, the name given as --host. Any port will do: tunnels have their own."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
        return name in ("localhost", own.lower()) or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket) -> str:
    """The listener's address, to be printed."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
