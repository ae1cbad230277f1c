"""The recipe's `[environment]` and `[episode]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from headrace.settings import ELASTIC, OPERATIONAL, ConfigError, check, check_least

TOOL_TIMEOUT = 30.0
"""Seconds that a call of a tool may take, unless `options` say otherwise."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """What runs a task to its end; by default one prompt and one answer."""

    name: str = ""
    """`module:Class` or `file.py:Class` of an environment of your own; empty is single-turn, or the one with `tools`."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call over several turns: functions or classes as `module:name`, MCP servers as `mcp:COMMAND` or
    `mcp:URL`."""
    command: tuple[str, ...] = ()
    """A program and its arguments, started for each episode: an agent that finds the model in OPENAI_BASE_URL and
    OPENAI_API_KEY, and its task as JSON on stdin."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class; with `tools`: max_turns, max_tokens, max_seconds, tool_timeout, max_reply, can_resume; with
    `command`: can_resume."""
    concurrency: int = field(default=0, metadata=ELASTIC)
    """Episodes it runs at once; 0 sets no limit but that of what is in flight."""
    processes: int = field(default=0, metadata=ELASTIC)
    """Processes of its own it runs in, each with its share of the episodes; 0 runs it in the launcher. An episode that fails
    ends in its process, and if the process dies or hangs, another takes its place."""

    def __post_init__(self) -> None:
        check_least(0, self, "concurrency", "processes")
        if self.name and self.tools:
            raise ConfigError(f"tools = {list(self.tools)}: an environment of your own has its own; leave it out, or name")
        if self.command and (self.name or self.tools or self.processes):
            raise ConfigError(f"command = {list(self.command)}: leave out name, tools and processes, or the command")


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """Limits of one episode: an environment's run of one task."""

    timeout: float = field(default=0.0, metadata=OPERATIONAL)
    """Seconds it may take, from its environment's start to its end, except while its first generate call waits for a place at
    the engines. After that it is cancelled and run again, as after any failure of an environment. 0 sets no limit; one
    that makes no generate call for a quarter of `deadline` is ended in any case, unless its environment may idle."""

    def __post_init__(self) -> None:
        check(0 <= self.timeout < math.inf, "timeout", self.timeout, "a number of seconds, or 0 for no limit")
