"""Text environments of Gymnasium: observations and actions are text."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from headrace.envs.steps import Step, StepEnvironment, World
from headrace.settings import ConfigError
from headrace.user_code import UserThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.records import Plain

_CLOSE_SECONDS = 5.0
"""How long an environment may take to close; one that hangs is left behind in its thread."""


class GymnasiumEnvironment(StepEnvironment):
    """A registered environment by its id, or what a function makes; a fresh one per episode, in a thread of its own."""

    def __init__(self, id: str | Callable[..., Any], *, make: dict[str, Any] | None = None, **options: Any) -> None:  # noqa: ANN401
        """`make`: arguments of the environment. A task's `options` are passed to `reset`. `options`: of `StepEnvironment`."""
        super().__init__(**options)
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError("environment.name: the package gymnasium is missing; pip install headrace[gymnasium]") from error
        self._make, self._arguments = id, dict(make or {})
        if isinstance(id, str):
            try:
                gymnasium.spec(id)
            except (gymnasium.error.Error, ImportError) as error:
                raise ConfigError(
                    f"environment.options.id = {id!r}: {error}; write MODULE:ID to import what it needs"
                ) from error
            self._make, self._arguments = gymnasium.make, {"id": id, **self._arguments}

    def _world(self, task: dict[str, Plain]) -> World:
        return _GymnasiumWorld(self._make, self._arguments, task.get("options"))


class _GymnasiumWorld(World):
    """All calls are made in one thread: they block, and some environments belong to the thread that made them."""

    def __init__(self, make: Any, arguments: dict[str, Any], options: Plain) -> None:  # noqa: ANN401
        self._make, self._arguments, self._options = make, arguments, options
        self._thread = UserThread("gymnasium")
        self._env: Any = None

    async def reset(self, seed: int) -> str:
        def start() -> Any:  # noqa: ANN401  (whatever it observes)
            self._env = self._make(**self._arguments)
            return self._env.reset(seed=seed, options=self._options)[0]

        return _text(await self._thread.call(start))

    async def step(self, action: str) -> Step:
        def step() -> Step:
            observation, reward, terminated, truncated, _ = self._env.step(action)
            return Step(_text(observation), float(reward), is_last=bool(terminated or truncated))

        return await self._thread.call(step)

    async def close(self) -> None:
        try:
            if self._env is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await self._thread.call(self._env.close)
        finally:
            self._thread.close()


def _text(observation: object) -> str:
    if isinstance(observation, str):
        return observation
    fix = "wrap the environment in gymnasium.wrappers.TransformObservation, and TransformAction for its actions"
    raise ConfigError(f"environment.options.id: an observation is a {type(observation).__name__}, not text; {fix}")
