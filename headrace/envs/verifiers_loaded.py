"""Environments of verifiers 0.1 (`load_environment`), which reach the policy through the endpoint of agents."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from headrace.envs.agents import AgentEnvironment
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.envs.agents import Session
    from headrace.records import Plain

_NUMBERS = itertools.count()


class LoadedVerifiersEnvironment(AgentEnvironment):
    """What `verifiers.load_environment(id, **arguments)` returns. A task's `idx` is its place in the dataset: see `rows`."""

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
        super().__init__(id)
        self._inputs = [dict(row) for row in dataset]

    def rows(self) -> list[dict[str, Plain]]:
        """The tasks of a run: `headrace.train(tasks=environment.rows(), environment=environment, …)`."""
        return [{"prompt": row["prompt"], "idx": number} for number, row in enumerate(self._inputs)]

    async def act(self, session: Session) -> float:
        from verifiers.types import ClientConfig

        index: Any = session.row.get("idx")
        if type(index) is not int or not 0 <= index < len(self._inputs):
            raise ConfigError(f"idx = {index!r} of a task: the dataset has {len(self._inputs)} rows")
        variable = f"HEADRACE_EPISODE_API_KEY_{next(_NUMBERS)}"
        os.environ[variable] = session.api_key
        try:
            client = ClientConfig(api_base_url=session.base_url, api_key_var=variable, max_retries=0)
            output = await self._environment.run_rollout(self._inputs[index], client, "policy", {})
        finally:
            del os.environ[variable]
        if output["error"] is not None and not session.rollouts.is_truncated:
            raise RuntimeError(f"verifiers: {output['error']}")
        return float(output["reward"] or 0.0)
