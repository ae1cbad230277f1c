"""Makes the environment of a run: the caller's, one by name, the one with tools, or single-turn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

from headrace.envs.program import ProgramAgent
from headrace.envs.single_turn import SingleTurn
from headrace.envs.steps import StepEnvironment
from headrace.envs.tools import ToolEnvironment
from headrace.imports import import_name
from headrace.settings import ConfigError, nearest
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
    """Raise for what can be seen without making the user's own: names that cannot be imported, tools without a schema, options
    that it does not take, a class without `run`."""
    if settings.processes and (environment is not None or not all(isinstance(tool, str) for tool in tools or ())):
        fix = "name it in environment.name or environment.tools, as module:name, or set it to 0"
        raise ConfigError(f"environment.processes = {settings.processes}: a process can only import by name; {fix}")
    if settings.processes and is_single_turn(settings, environment=environment, tools=tools):
        raise ConfigError(f"environment.processes = {settings.processes}: single-turn needs none; set it to 0")
    if environment is None and settings.command:
        _program(settings)
    elif environment is None and (tools or settings.tools):
        _with_tools(settings, tools)
    elif is_single_turn(settings, environment=environment, tools=tools):
        _refuse_options(settings, "single-turn has none; set environment.name or tools")
    else:
        found, name = _named(settings, environment)
        if not _is_made_with_options(found, environment):
            _refuse_options(settings, "the environment is made already; give its class")
        else:
            _check_options(found, settings.options, name)
            if isinstance(found, type) and issubclass(found, StepEnvironment):  # whose worlds are made later
                _made(functools.partial(found, **settings.options), name)
        if isinstance(found, type):
            _check_run(found, name, found.__name__)


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
        _refuse_options(settings, "single-turn has none; set environment.name or tools")
        return SingleTurn() if not settings.concurrency else HostedEnvironment(SingleTurn, "single_turn", settings.concurrency)
    if environment is None and (tools or settings.tools):
        with_tools = _with_tools(settings, tools)
        return HostedEnvironment(lambda: with_tools, "tools", settings.concurrency)  # each episode has its own tools
    if environment is None and settings.command:
        program = _program(settings)
        return HostedEnvironment(lambda: program, settings.command[0], settings.concurrency)
    found, name = _named(settings, environment)
    if _is_made_with_options(found, environment):
        return HostedEnvironment(functools.partial(found, **settings.options), name, settings.concurrency)
    _refuse_options(settings, "the environment is made already; give its class")
    return HostedEnvironment(lambda: found, name, settings.concurrency)


def _with_tools(settings: EnvironmentSettings, tools: Sequence[Any] | None) -> Environment:
    make = functools.partial(ToolEnvironment, list(tools or settings.tools))
    _check_options(make, settings.options, "the environment with tools")
    return _made(functools.partial(make, **settings.options), "tools")


def _program(settings: EnvironmentSettings) -> Environment:
    make = functools.partial(ProgramAgent, settings.command)
    _check_options(make, settings.options, "a program")
    return make(**settings.options)


def _named(settings: EnvironmentSettings, environment: Any) -> tuple[Any, str]:  # noqa: ANN401  (an object or a class)
    """(what the caller gave or the recipe names, its name)"""
    if environment is not None:
        return environment, getattr(environment, "__qualname__", type(environment).__qualname__)
    return import_name(settings.name, setting="environment.name"), settings.name


def _is_made_with_options(found: object, environment: object) -> bool:
    """Whether it is a class, or a function that the recipe names, rather than an environment."""
    return isinstance(found, type) or (environment is None and not hasattr(found, "run"))


def _refuse_options(settings: EnvironmentSettings, reason: str) -> None:
    if settings.options:
        raise ConfigError(f"environment.options = {settings.options}: {reason}")


def _check_options(make: Any, options: dict[str, Any], name: str) -> None:  # noqa: ANN401  (what a user named)
    """Raise unless a class or function takes these arguments."""
    if not callable(make):
        raise ConfigError(
            f"environment.name = {name!r}: is of type {type(make).__name__}; name a class, or a function that makes one"
        )
    try:
        signature = inspect.signature(make)
    except ValueError:  # of a few built-in classes nothing is known
        return
    if isinstance(make, type) and issubclass(make, StepEnvironment):  # whose own options they pass on
        shared = dict(inspect.signature(StepEnvironment).parameters)
        own = [each for key, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD and key not in shared]
        signature = signature.replace(parameters=[*own, *shared.values()])
    try:
        signature.bind(**options)
    except TypeError as error:
        named = [key for key, each in signature.parameters.items() if each.kind in _NAMED]
        unknown = next((key for key in options if key not in named), None)
        if unknown is None:
            raise ConfigError(f"environment.options: {name}: {error}; add it") from error
        fix = nearest(unknown, named, "environment.options.") if named else "it has none"
        raise ConfigError(f"environment.options.{unknown}: is no option of {name}; {fix}") from error


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _check_run(environment: object, name: str, kind: str) -> None:
    if not callable(getattr(environment, "run", None)):
        raise ConfigError(f"environment {name!r}: a {kind} has no `async def run(task, client)`; see docs/environments.md")


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
        _check_run(self._current, name, type(self._current).__name__)
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
