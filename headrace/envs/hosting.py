"""Makes the environment of a run: the caller's, one by name, the one with tools, or single-turn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any

from headrace.envs.program import ProgramAgent
from headrace.envs.single_turn import SingleTurn
from headrace.envs.tools import ToolEnvironment
from headrace.imports import import_name
from headrace.settings import ConfigError
from headrace.user_code import UserThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.envs.client import Client
    from headrace.envs.settings import EnvironmentSettings
    from headrace.envs.single_turn import Environment
    from headrace.records import Episode, Plain


def is_single_turn(settings: EnvironmentSettings, *, environment: object = None, tools: object = None) -> bool:
    """Whether tasks are one prompt and one answer, given what a Python caller passed."""
    return environment is None and not (tools or settings.name or settings.tools or settings.command)


def check_environment(settings: EnvironmentSettings, *, environment: object = None, tools: Sequence[Any] | None = None) -> None:
    """Raise for what can be seen without making it: names that cannot be imported, tools without a schema."""
    if settings.processes and (environment is not None or not all(isinstance(tool, str) for tool in tools or ())):
        fix = "name it in environment.name or environment.tools, as module:name, or set it to 0"
        raise ConfigError(f"environment.processes = {settings.processes}: a process can only import by name; {fix}")
    if settings.processes and is_single_turn(settings, environment=environment, tools=tools):
        raise ConfigError(f"environment.processes = {settings.processes}: single-turn needs none; set it to 0")
    if environment is None and settings.command:
        ProgramAgent(settings.command)
    if environment is None and settings.name:
        import_name(settings.name, setting="environment.name")
    if environment is None and (tools or settings.tools):
        ToolEnvironment(list(tools or settings.tools))


def make_environment(
    settings: EnvironmentSettings,
    *,
    environment: Any = None,  # noqa: ANN401  (an object or a class)
    tools: Sequence[Any] | None = None,
) -> Environment:
    """The environment that runs in this process. `environment` and `tools` are a Python caller's, and override the recipe's."""
    if environment is not None and tools:
        raise ConfigError("tools: an environment of your own has its own; leave one of the two out")
    if is_single_turn(settings, environment=environment, tools=tools):
        if settings.options:
            raise ConfigError(f"environment.options = {settings.options}: single-turn has none; set environment.name or tools")
        return SingleTurn() if not settings.concurrency else HostedEnvironment(SingleTurn, "single_turn", settings.concurrency)
    if environment is None and (tools or settings.tools):
        with_tools = _made(functools.partial(ToolEnvironment, list(tools or settings.tools), **settings.options), "tools")
        return HostedEnvironment(lambda: with_tools, "tools", settings.concurrency)  # each episode has its own tools
    if environment is None and settings.command:
        program = ProgramAgent(settings.command)
        return HostedEnvironment(lambda: program, settings.command[0], settings.concurrency)
    found, name = environment, getattr(environment, "__qualname__", type(environment).__qualname__)
    if environment is None:
        found, name = import_name(settings.name, setting="environment.name"), settings.name
    if isinstance(found, type) or (environment is None and not hasattr(found, "run")):
        return HostedEnvironment(functools.partial(found, **settings.options), name, settings.concurrency)
    if settings.options:
        raise ConfigError(f"environment.options = {settings.options}: the environment is made already; give its class")
    return HostedEnvironment(lambda: found, name, settings.concurrency)


def can_resume(environment: Environment) -> bool:
    """Whether it says that an episode, run again with the same answers of the policy, takes the same course: its finished turns
    are then kept over a restart and given to it again."""
    return bool(getattr(environment, "can_resume", False))


def _made(make: Callable[[], Environment], name: str) -> Environment:
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"environment {name!r} cannot be made: {type(error).__name__}: {error}") from error


class HostedEnvironment:
    """An environment in this process. After an episode that raised or was cancelled, later ones get a fresh instance,
    unless it says that it `outlives_failures`."""

    def __init__(self, make: Callable[[], Environment], name: str, concurrency: int = 0) -> None:
        self.name, self._make = name, make
        self.places = asyncio.Semaphore(concurrency) if concurrency else None
        """Episodes at once; `run_episode` takes one before the episode's time begins."""
        self._current: Environment | None = _made(make, name)
        if not callable(getattr(self._current, "run", None)):
            what = type(self._current).__name__
            raise ConfigError(f"environment {name!r}: a {what} has no `async def run(task, client)`; see docs/environments.md")
        self.can_resume = can_resume(self._current)
        self.may_idle = bool(getattr(self._current, "may_idle", False))
        """It may wait long between generate calls, as for people, without being taken to hang."""

    @property
    def push_counts(self) -> dict[str, int]:
        """Of groups that are pushed to the environment, for metrics and summary."""
        return getattr(self._current, "push_counts", {})

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        current = self._current
        if current is None:
            with contextlib.closing(UserThread("environment")) as maker:
                current = self._current = await maker.call(self._make)
        try:
            return await current.run(task, client)
        except BaseException:
            if self._current is current and not getattr(current, "outlives_failures", False):
                self._current = None
            raise
