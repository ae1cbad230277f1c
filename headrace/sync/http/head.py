"""HTTP heads (first line and headers), strictly parsed and bounded in size."""

from __future__ import annotations

import socket
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_HEAD = 8192  # bytes
_END = b"\r\n\r\n"


class BadHead(ValueError):
    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


def read_head(connection: socket.socket, check: Callable[[], None]) -> tuple[str, dict[str, str]]:
    """Read the first line and the headers (by lower-case name), nothing more. `check` is called meanwhile; it may raise."""
    head = bytearray()
    while not head.endswith(_END):
        check()
        try:
            ahead = connection.recv(MAX_HEAD - len(head), socket.MSG_PEEK)
        except TimeoutError:
            continue
        if not ahead:
            raise ConnectionError("closed the connection")
        found = (head + ahead).find(_END)
        num_ours = len(ahead) if found < 0 else found + len(_END) - len(head)
        head += connection.recv(num_ours)
        if len(head) >= MAX_HEAD and not head.endswith(_END):
            raise BadHead(f"sent more than {MAX_HEAD} bytes of headers", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    return _parse(bytes(head[: -len(_END)]))


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    try:
        first, *lines = head.decode("ascii").split("\r\n")
    except UnicodeDecodeError as error:
        raise BadHead("sent headers that are not ASCII") from error
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            raise BadHead("sent headers that cannot be read")
        headers[name.lower()] = value.strip()
    return first, headers


def write_head(first: str, headers: Mapping[str, str | int]) -> bytes:
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("ascii")
