"""Tools of an MCP server (`pip install mcp`), which is started, or connected to, once for all episodes."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import time
from typing import TYPE_CHECKING, Any

from headrace.envs.program import inherited_variables
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from mcp import Client

_ALIVE_SECONDS = 30.0
"""Within which an open server lists its tools; one that runs a long tool in its event loop is not dead."""
_CHECK_SECONDS = 5.0
"""How long a server that answered is taken to be alive, when an episode begins."""


class McpServer:
    """A server by its URL or its command. It is opened when first needed, and again when it has ended."""

    def __init__(self, address: str, *, timeout: float) -> None:
        """It has `timeout` seconds to start and to list its tools."""
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            problem = f"environment.tools = 'mcp:{address}': the package mcp is not installed"
            raise ConfigError(f"{problem}; pip install headrace[mcp]") from error
        self._address = address
        self._command = [] if address.startswith(("http://", "https://")) else _command(address)
        self._timeout, self._answered = timeout, 0.0
        self._opened: asyncio.Future[tuple[Client, list[dict[str, Any]]]] | None = None
        self._holder: asyncio.Task[None] | None = None

    async def tools(self) -> list[dict[str, Any]]:
        """Their schemas, in OpenAI's form."""
        client, schemas = await self._open()
        if time.monotonic() - self._answered > _CHECK_SECONDS:
            self._answered = time.monotonic()  # one asks for all
            if not await _is_alive(client):
                await self._drop(client)
                _, schemas = await self._open()
        return schemas

    async def call(self, name: str, /, **arguments: Any) -> str:  # noqa: ANN401  (what the policy wrote)
        """The text of the result; an error of the tool raises."""
        client, _ = await self._open()
        try:
            result = await client.call_tool(name, arguments)
        except Exception:
            if not await _is_alive(client):
                await self._drop(client)  # the next call opens another
            raise
        self._answered = time.monotonic()
        text = "\n".join(getattr(part, "text", f"({part.type})") for part in result.content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def _open(self) -> tuple[Client, list[dict[str, Any]]]:
        """The connection and its tools. Woken by the task that holds it, since it must be closed by the task that opened it."""
        if self._opened is None or self._holder is None or self._holder.done() or self._opened.get_loop() is not _loop():
            self._opened = _loop().create_future()
            self._holder = _loop().create_task(self._hold(self._opened))
        opened = self._opened
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.shield(opened)
        except TimeoutError as error:
            if self._opened is opened:
                await self.close()
            raise ConnectionError(
                f"the MCP server {self._address!r} did not start and list its tools within {self._timeout:g} s; "
                "environment.options.tool_timeout sets how long it may take"
            ) from error

    async def _hold(self, opened: asyncio.Future[tuple[Client, list[dict[str, Any]]]]) -> None:
        from mcp import Client, StdioServerParameters

        server: Any = self._address
        if self._command:
            command, *arguments = self._command
            server = StdioServerParameters(command=command, args=arguments, env=inherited_variables(), cwd=os.getcwd())
        try:
            async with Client(server) as client:
                opened.set_result((client, await _list_tools(client)))
                self._answered = time.monotonic()
                await asyncio.Event().wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(ConnectionError(f"the MCP server {self._address!r} does not answer: {error}"))
            opened.exception()

    async def _drop(self, client: Client) -> None:
        """Close this connection, unless another episode has done so and opened the next."""
        if self._opened is not None and self._opened.done() and self._opened.result()[0] is client:
            await self.close()

    async def close(self) -> None:
        holder, self._holder, self._opened = self._holder, None, None
        if holder is not None and holder.get_loop() is _loop():
            holder.cancel()
            await asyncio.wait({holder}, timeout=10.0)


def _command(address: str) -> list[str]:
    """The program and its arguments."""
    try:
        command = shlex.split(address)
    except ValueError as error:
        raise ConfigError(f"environment.tools = 'mcp:{address}': {error}") from error
    if not command or shutil.which(command[0]) is None:
        what = f"there is no program {command[0]!r}" if command else "no program is named"
        raise ConfigError(f"environment.tools = 'mcp:{address}': {what}; write mcp:COMMAND or mcp:https://…")
    return command


async def _list_tools(client: Client) -> list[dict[str, Any]]:
    found, cursor = list[Any](), None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in found
    ]


async def _is_alive(client: Client) -> bool:
    try:
        async with asyncio.timeout(_ALIVE_SECONDS):
            await client.list_tools()
    except Exception:  # noqa: BLE001  (whatever a broken connection raises)
        return False
    return True


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()
