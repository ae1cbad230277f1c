"""A batch in training, and running one episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine import UnusablePrompt
from headrace.records import Episode, InfraAbort, Invalid
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from headrace.buffer import Group
    from headrace.envs import EngineClient, Environment
    from headrace.records import Batch, Outcome, Plain
    from headrace.trainer import Published


@dataclass(eq=False)
class StartedBatch:
    """The groups taken from the buffer to train one version."""

    version: int
    """The version trained from; the result is `version + 1`."""
    groups: list[Group]
    steps_before: int
    """Optimizer steps the trainer had made before."""
    batches: list[Batch] = field(default_factory=list)
    steps: list[Awaitable[dict[str, float]]] = field(default_factory=list)
    """Metrics of each optimizer step; empty until the steps are requested from the trainer."""
    publishing: Awaitable[Published] | None = None
    """The publication of the next version, if it was requested together with the steps."""


async def run_episode(environment: Environment, task: dict[str, Plain], client: EngineClient) -> Episode:
    """Run one episode. An exception in the environment fails the episode, not the run."""
    try:
        return await environment.run(task, client)
    except ConfigError:
        raise
    except UnusablePrompt as error:
        outcome: Outcome = Invalid(str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the environment is the user's)
        outcome = InfraAbort(f"the environment raised {type(error).__name__}: {error}")
    return Episode(id=client.episode, group=client.group, task=task, outcome=outcome)
