"""Environments written for TRL's `environment_factory`: an object with `reset(**row)` whose other public methods are tools."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from headrace.envs.single_turn import SingleTurn
from headrace.envs.tools import ToolEnvironment, call_user
from headrace.imports import import_name
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.envs.client import Client
    from headrace.envs.single_turn import Environment
    from headrace.records import Episode, Plain

_NOT_TOOLS = ("reset", "get_reward")


class TrlEnvironment:
    """As in TRL, instances are made once and reset often. One that raised is not used again, nor one with a call that took too
    long, which may go on in its thread."""

    def __init__(self, factory: str | Callable[[], Any], **options: Any) -> None:  # noqa: ANN401
        """`factory`: a class, a function that makes an instance, or its name. `options`: of `ToolEnvironment`."""
        self._factory = import_name(factory, setting="environment.options.factory") if isinstance(factory, str) else factory
        self._options, self.can_resume = options, bool(options.get("can_resume"))
        first = self._factory()
        if not callable(getattr(first, "reset", None)):
            what = type(first).__qualname__
            raise ConfigError(f"environment.options.factory: a {what} has no `reset(**row)`, which returns text or None")
        self._around(first)  # raises now if a tool has no schema
        self._idle = [first]

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        instance = self._idle.pop() if self._idle else await call_user(self._factory, {})
        prompt = _with_observation(task["prompt"], await call_user(instance.reset, dict(task)))
        inner = self._around(instance)
        episode = await inner.run({**task, "prompt": prompt}, client)
        if hasattr(instance, "get_reward"):
            reward = await call_user(instance.get_reward, {})
            rewards = {} if reward is None else {type(instance).__name__: float(reward)}
            episode = episode.replace(rollouts=tuple(rollout.replace(rewards=rewards) for rollout in episode.rollouts))
        if not (isinstance(inner, ToolEnvironment) and inner.was_late):
            self._idle.append(instance)
        return episode.replace(task=task, environment="trl")

    def _around(self, instance: object) -> Environment:
        members = (name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction))
        tools = [getattr(instance, name) for name in members if not name.startswith("_") and name not in _NOT_TOOLS]
        return ToolEnvironment(tools, **self._options) if tools else SingleTurn()


def _with_observation(prompt: Any, observation: object) -> Any:  # noqa: ANN401  (text or messages)
    """As TRL does it: behind the last message, and nothing between them."""
    if observation is None:
        return prompt
    if not isinstance(observation, str):
        raise ConfigError(f"environment.options.factory: reset returned a {type(observation).__name__}, not text or None")
    if isinstance(prompt, str):
        return prompt + observation
    return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1].get('content') or ''}{observation}"}]
