"""Environments of verifiers 0.4 (`verifiers.v1`): tasksets and the agents that play them, which reach the policy through the
endpoint of agents (`headrace.envs.agent`)."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from headrace.envs.agents import AgentEnvironment
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.envs.agents import Session
    from headrace.records import Plain

_NUMBERS = itertools.count()


class VerifiersEnvironment(AgentEnvironment):
    """An environment by the settings of verifiers' `[env]`. A task's `idx` is its place in the taskset: see `rows`."""

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
        super().__init__(self._config.env_id)
        self._tasks = list(tasks.take(limit) if limit else tasks)

    def rows(self) -> list[dict[str, Plain]]:
        """The tasks of a run: `headrace.train(tasks=environment.rows(), environment=environment, …)`."""
        return [{"prompt": task.data.prompt_text, "idx": number} for number, task in enumerate(self._tasks)]

    async def act(self, session: Session) -> dict[str, float] | float | None:
        from verifiers.v1 import EvalClientConfig, ModelContext
        from verifiers.v1.utils.loaders import load_environment

        index: Any = session.row.get("idx")
        if type(index) is not int or not 0 <= index < len(self._tasks):
            raise ConfigError(f"idx = {index!r} of a task: the taskset has {len(self._tasks)}")
        # Clients are kept as long as they are served, and belong to one episode: so does the environment that serves them.
        environment = load_environment(self._config)
        variable = f"HEADRACE_EPISODE_API_KEY_{next(_NUMBERS)}"  # verifiers hands no `API_KEY` on to programs
        context = ModelContext("policy", EvalClientConfig(base_url=session.base_url, api_key_var=variable))
        os.environ[variable] = session.api_key
        try:
            async with environment.serving():
                episode = await environment.run_episode(self._tasks[index], context)
        finally:
            del os.environ[variable]
        rewards = Counter[str]()
        for trace in episode.traces:
            rewards.update({name: reward.value for name, reward in trace.rewards.items() if reward is not None})
        if episode.ok:
            return dict(rewards) or None
        if session.rollouts.is_truncated:
            return dict(rewards) or 0.0
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")
