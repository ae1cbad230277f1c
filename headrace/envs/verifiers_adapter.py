"""Environments of verifiers, which reach the policy through the endpoint of agents (`headrace.envs.agent`): of 0.4
(`verifiers.v1`), tasksets and the agents that play them, and of 0.1, `load_environment`."""

from __future__ import annotations

import abc
import itertools
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from headrace.envs.agents import AgentEnvironment
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.envs.agents import Session
    from headrace.records import Plain

_NUMBERS = itertools.count()


class _Verifiers(AgentEnvironment):
    """Plays the tasks of a list. A task's `idx` is its place there: see `rows`."""

    def __init__(self, name: str, prompts: Sequence[Any]) -> None:
        super().__init__(name)
        self._prompts = prompts

    def rows(self) -> list[dict[str, Plain]]:
        """The tasks of a run: `headrace.train(tasks=environment.rows(), environment=environment, …)`."""
        return [{"prompt": prompt, "idx": number} for number, prompt in enumerate(self._prompts)]

    async def act(self, session: Session) -> dict[str, float] | float | None:
        index: Any = session.row.get("idx")
        if type(index) is not int or not 0 <= index < len(self._prompts):
            raise ConfigError(f"idx = {index!r} of a task: there are {len(self._prompts)}")
        variable = f"HEADRACE_EPISODE_API_KEY_{next(_NUMBERS)}"  # verifiers hands no `API_KEY` on to programs
        os.environ[variable] = session.api_key
        try:
            return await self._play(index, session, variable)
        finally:
            del os.environ[variable]

    @abc.abstractmethod
    async def _play(self, index: int, session: Session, variable: str) -> dict[str, float] | float | None:
        """The reward of a task. The environment variable holds the session's key."""


class VerifiersEnvironment(_Verifiers):
    """An environment by the settings of verifiers' `[env]`."""

    def __init__(self, taskset: str | dict[str, Any], *, limit: int = 0, **settings: Any) -> None:  # noqa: ANN401
        """`taskset`: its id, or its settings with the id. `limit`: takes the first tasks. `settings`: the others of `[env]`,
        such as `agent = { harness = { id = "null" }, runtime = { type = "subprocess" } }`."""
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as error:
            problem = "environment.name: the package verifiers is missing or older than 0.4"
            raise ConfigError(
                f"{problem}; pip install headrace[verifiers], or use LoadedVerifiersEnvironment with 0.1"
            ) from error
        chosen = {"id": taskset} if isinstance(taskset, str) else taskset
        try:
            self._config = resolve_env_config({**settings, "taskset": chosen})
            tasks = load_environment(self._config).taskset
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"environment.options: verifiers refuses them: {error}") from error
        if not limit and not tasks.bounded:
            raise ConfigError(f"environment.options.limit = 0: the taskset {chosen.get('id')!r} is infinite; set a limit")
        self._tasks = list(tasks.take(limit) if limit else tasks)
        super().__init__(self._config.env_id, [task.data.prompt_text for task in self._tasks])

    async def _play(self, index: int, session: Session, variable: str) -> dict[str, float] | float | None:
        from verifiers.v1 import EvalClientConfig, ModelContext
        from verifiers.v1.utils.loaders import load_environment

        # Clients are kept as long as they are served, and belong to one episode: so does the environment that serves them.
        environment = load_environment(self._config)
        context = ModelContext("policy", EvalClientConfig(base_url=session.base_url, api_key_var=variable))
        async with environment.serving():
            episode = await environment.run_episode(self._tasks[index], context)
        rewards = Counter[str]()
        for trace in episode.traces:
            rewards.update({name: reward.value for name, reward in trace.rewards.items() if reward is not None})
        if episode.ok:
            return dict(rewards) or None
        if session.rollouts.is_truncated:
            return dict(rewards) or 0.0
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")


class LoadedVerifiersEnvironment(_Verifiers):
    """What `verifiers.load_environment(id, **arguments)` of 0.1 returns."""

    def __init__(self, id: str, *, limit: int = 0, **arguments: Any) -> None:  # noqa: ANN401
        """`limit`: takes the first rows. `arguments`: of the environment's own `load_environment`."""
        try:
            from verifiers import load_environment
        except ImportError as error:
            raise ConfigError("environment.name: this needs verifiers 0.1; pip install 'verifiers<0.2'") from error
        try:
            self._environment = load_environment(id, **arguments)
            dataset = self._environment.get_dataset(n=limit or -1)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"environment.options: verifiers refuses them: {error}") from error
        self._inputs = [dict(row) for row in dataset]
        super().__init__(id, [row["prompt"] for row in self._inputs])

    async def _play(self, index: int, session: Session, variable: str) -> float:
        from verifiers.types import ClientConfig

        client = ClientConfig(api_base_url=session.base_url, api_key_var=variable, max_retries=0)
        output = await self._environment.run_rollout(self._inputs[index], client, "policy", {})
        if output["error"] is not None and not session.rollouts.is_truncated:
            raise RuntimeError(f"verifiers: {output['error']}")
        return float(output["reward"] or 0.0)
