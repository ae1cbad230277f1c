"""The built-in environment with tools, which the policy may call: plain functions, classes with state, MCP servers.

| given | what it is |
|---|---|
| a function | its signature and docstring become the schema; a plain one is called in a thread, an async one awaited |
| a class | an instance per episode, made with `task=` if it takes that; public methods are tools; `close()` is called last |
| `"mcp:COMMAND"`, `"mcp:http://…"` | the tools of an MCP server, opened once for all episodes (`headrace.envs.mcp_server`) |
| `"module:name"` | a function or class by name |

Whatever goes wrong in a call goes back to the policy as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.envs.settings import TOOL_TIMEOUT
from headrace.envs.turns import check_limits
from headrace.imports import import_name
from headrace.settings import ConfigError, check
from headrace.user_code import UserThread, await_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.envs.client import Client
    from headrace.envs.mcp_server import McpServer
    from headrace.records import Episode, Plain

MCP = "mcp:"


@dataclass(frozen=True)
class Tool:
    """One of an episode."""

    schema: dict[str, Any]
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


class Toolbox:
    """The tools of an environment, from which each episode gets its own."""

    def __init__(self, given: Sequence[Any], *, timeout: float, max_reply: int) -> None:
        """A call may take `timeout` seconds, and its result has at most `max_reply` characters."""
        if isinstance(given, str) or not isinstance(given, list | tuple) or not given:
            raise ConfigError(f"environment.tools = {given!r}: give a list of functions, classes or names")
        self._timeout, self._max_reply = timeout, max_reply
        self._functions: list[Tool] = []
        self._classes: list[type] = []
        self._servers: list[McpServer] = []
        for each in given:
            self._add(each)

    def _add(self, given: Any) -> None:  # noqa: ANN401  (what a user gave)
        if isinstance(given, str) and given.startswith(MCP):
            from headrace.envs.mcp_server import McpServer

            self._servers.append(McpServer(given.removeprefix(MCP), timeout=self._timeout))
            return
        found = import_name(given, setting="environment.tools") if isinstance(given, str) else given
        if isinstance(found, type):
            if not _public_methods(found):
                raise ConfigError(f"environment.tools: class {found.__qualname__} has no public methods")
            for name in _public_methods(found):
                _schema(getattr(found, name))  # raises now, not in the first episode
            self._classes.append(found)
        elif inspect.isroutine(found):
            self._functions.append(Tool(_schema(getattr(found, "__func__", found)), found))  # schemas are cached, instances not
        else:
            what = f"an instance of {type(found).__qualname__}"
            raise ConfigError(
                f"environment.tools: {what} is neither a function nor a class; give the class, for an instance each"
            )

    async def open(self, task: dict[str, Plain]) -> EpisodeTools:
        """The tools of one episode."""
        tools, instances = list(self._functions), []
        for cls in self._classes:
            takes_task = "task" in inspect.signature(cls).parameters
            instance = await call_user(functools.partial(cls, **({"task": task} if takes_task else {})), {})
            instances.append(instance)
            tools += [Tool(_schema(getattr(cls, name)), getattr(instance, name)) for name in _public_methods(cls)]
        for server in self._servers:
            tools += [
                Tool(schema, functools.partial(server.call, schema["function"]["name"])) for schema in await server.tools()
            ]
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"environment.tools: two tools are named {twice!r}; rename one")
        return EpisodeTools(tools, instances, timeout=self._timeout, max_reply=self._max_reply)


class EpisodeTools:
    """Functions by name, and the instances they belong to."""

    def __init__(self, tools: list[Tool], instances: list[Any], *, timeout: float, max_reply: int) -> None:
        self._tools, self.instances = {tool.name: tool for tool in tools}, instances
        self._timeout, self._max_reply = timeout, max_reply
        self.was_late = False
        """A call took too long; a plain function may still be at it, in its thread."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def answer(self, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The replies to the calls of one answer, which run at the same time, in their order."""
        texts = await asyncio.gather(*(self._reply(call["function"]["name"], call["function"]["arguments"]) for call in calls))
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]

    async def _reply(self, name: str, arguments: dict[str, Any]) -> str:
        tool = self._tools.get(name)
        try:
            if tool is None:
                raise LookupError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
            async with asyncio.timeout(self._timeout) as limit:
                result = await call_user(tool.function, _typed(arguments, tool.schema))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
            text.encode()
        except (Exception, SystemExit) as error:  # noqa: BLE001  (tools are the user's, and their arguments the policy's)
            is_late = isinstance(error, TimeoutError) and limit.expired()
            self.was_late |= is_late
            reason = f"it took longer than {self._timeout:g} s" if is_late else f"{type(error).__name__}: {error}"
            text = f"Error: {reason}".encode(errors="backslashreplace").decode()
        left_out = len(text) - self._max_reply
        return text if left_out <= 0 else f"{text[: self._max_reply]} … ({left_out} more characters)"

    async def close(self) -> None:
        for instance in self.instances:
            close = getattr(instance, "close", None)
            if close is not None:
                async with asyncio.timeout(self._timeout):
                    await call_user(close, {})


class ToolEnvironment:
    """The policy answers, and as long as its answer calls tools, their replies follow and it answers again.

    The episode ends with an answer that calls none, after `max_turns` answers, when it holds `max_tokens` tokens or has taken
    `max_seconds`, or when an answer or the context has reached its limit, which counts as truncated; it is scored in each case.
    """

    def __init__(
        self,
        tools: Sequence[Any],
        *,
        max_turns: int = 8,
        max_tokens: int = 0,
        max_seconds: float = 0.0,
        tool_timeout: float = TOOL_TIMEOUT,
        max_reply: int = 8192,
        can_resume: bool = False,
    ) -> None:
        """`tools`: see above. `max_turns`: answers of the policy. `max_tokens`: of an episode, prompt and
        replies included; 0 leaves it to the model's context. `max_seconds`: after which no tool is called; 0 sets no limit. A
        call may take `tool_timeout` seconds, and its reply have `max_reply` characters. `can_resume`: tools may be called again
        with the same arguments after a restart, and reply the same; episodes then continue where they were."""
        check_limits(max_turns=max_turns, max_seconds=max_seconds)
        check(type(max_tokens) is int and max_tokens >= 0, "environment.options.max_tokens", max_tokens, "≥ 0")
        is_time = isinstance(tool_timeout, int | float) and 0 < tool_timeout < math.inf
        check(is_time, "environment.options.tool_timeout", tool_timeout, "a number of seconds above 0")
        check(type(max_reply) is int and max_reply >= 1, "environment.options.max_reply", max_reply, "a whole number ≥ 1")
        self._max_turns, self._max_tokens, self._max_seconds, self.can_resume = max_turns, max_tokens, max_seconds, can_resume
        self._tools = Toolbox(tools, timeout=tool_timeout, max_reply=max_reply)
        self.was_late = False
        """In an episode so far (`EpisodeTools.was_late`)."""

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        tools = await self._tools.open(task)
        try:
            chat = client.chat(task["prompt"], tools=tools.schemas, template_kwargs=task.get("chat_template_kwargs"))
            for turn in range(1, self._max_turns + 1):
                answer = await chat.generate()
                calls = answer.get("tool_calls", ())
                is_full = 0 < self._max_tokens <= len(chat.rollout)
                is_late = 0 < self._max_seconds <= chat.seconds
                if not calls or chat.is_truncated or turn == self._max_turns or is_full or is_late:
                    break
                chat.append(*await tools.answer(calls))
            return chat.episode(task, environment="tools")
        finally:
            self.was_late |= tools.was_late
            await tools.close()


async def call_user(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:  # noqa: ANN401  (a user's function)
    """Await an async function; call any other in a thread, which is left behind if it does not return in time."""
    inner = function.func if isinstance(function, functools.partial) else function
    if inspect.iscoroutinefunction(inner):
        return await await_user(function(**arguments), name=f"tool {getattr(inner, '__name__', inner)}")
    with contextlib.closing(UserThread("tool")) as thread:
        return await thread.call(functools.partial(function, **arguments))


def _public_methods(cls: type) -> list[str]:
    found = (name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_"))
    return [name for name in found if name != "close"]


@functools.lru_cache(maxsize=1024)
def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """OpenAI's, from the signature and the docstring; of a method, without `self`."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        wanted = "it needs type hints, and a docstring that says what it does and, under `Args:`, what each argument is"
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(f"environment.tools: tool {name} has no schema: {wanted} ({error})") from error
    return schema


def _typed(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments that a model wrote as text where the schema wants something else, such as a number, are read as JSON."""
    properties = schema["function"].get("parameters", {}).get("properties", {})
    found = {}
    for name, value in arguments.items():
        kind = properties.get(name, {}).get("type", "string")
        if isinstance(value, str) and kind != "string" and "string" not in kind:
            with contextlib.suppress(ValueError):  # the tool says what is wrong with it
                value = json.loads(value)
        found[name] = value
    return found
