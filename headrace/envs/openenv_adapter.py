"""Environments of an OpenEnv server, over its WebSocket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headrace.envs.steps import Step, StepEnvironment, World
from headrace.settings import ConfigError, check

if TYPE_CHECKING:
    from headrace.records import Plain

_SCHEMES = ("http://", "https://", "ws://", "wss://")


class OpenEnvEnvironment(StepEnvironment):
    """A running server by its address; each episode has a session of its own there."""

    def __init__(
        self,
        url: str,
        *,
        action: str = "",
        observation: str = "",
        timeout: float = 60.0,
        **options: Any,  # noqa: ANN401  (of `StepEnvironment`)
    ) -> None:
        """`action` and `observation`: the fields that hold their text. Without `action`, an answer is a JSON object with all
        fields; without `observation`, the policy sees all fields as JSON. A task's `options` are passed to `reset`. `timeout`:
        seconds that the server may take for a reset or a step."""
        super().__init__(**options)
        try:
            import openenv.core  # noqa: F401
        except ImportError as error:
            raise ConfigError("environment.name: the package openenv-core is missing; pip install headrace[openenv]") from error
        is_url = isinstance(url, str) and url.startswith(_SCHEMES)
        check(is_url, "environment.options.url", url, f"an address that starts with {' or '.join(_SCHEMES)}")
        check(isinstance(timeout, int | float) and timeout > 0, "environment.options.timeout", timeout, "seconds above 0")
        self._url, self._action, self._observation, self._timeout = url, action, observation, timeout

    def _world(self, task: dict[str, Plain]) -> World:
        from openenv.core.generic_client import GenericEnvClient

        session = GenericEnvClient(self._url, message_timeout_s=self._timeout, mode="simulation")
        return _OpenEnvWorld(session, task.get("options"), action=self._action, observation=self._observation)


class _OpenEnvWorld(World):
    def __init__(self, session: Any, options: Any, *, action: str, observation: str) -> None:  # noqa: ANN401
        self._session, self._options, self._action, self._observation = session, options or {}, action, observation

    async def reset(self, seed: int) -> str:
        result = await self._session.reset(**{"seed": seed, **self._options})
        return self._text(result.observation)

    async def step(self, action: str) -> Step:
        try:
            result = await self._session.step(self._fields(action))
        except (_NotAnAction, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "(code: VALIDATION_ERROR)" not in str(error):
                raise
            return Step(f"This is not a valid action: {error}", 0.0, is_last=False)  # what the policy can cause is no failure
        return Step(self._text(result.observation), float(result.reward or 0.0), is_last=bool(result.done))

    def _fields(self, action: str) -> dict[str, Any]:
        if self._action:
            return {self._action: action}
        try:
            fields = json.loads(action)
        except (ValueError, RecursionError) as error:
            raise _NotAnAction(f"it must be a JSON object ({error})") from error
        if not isinstance(fields, dict):
            raise _NotAnAction("it must be a JSON object")
        return fields

    def _text(self, observation: dict[str, Any]) -> str:
        if not self._observation:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            known = ", ".join(observation) or "none"
            raise ConfigError(
                f"environment.options.observation = {self._observation!r}: there is no such field; there are {known}"
            )
        found = observation[self._observation]
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)

    async def close(self) -> None:
        await self._session.close()


class _NotAnAction(ValueError):
    """Says why to the policy."""
