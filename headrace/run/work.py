"""One episode run, and one batch in training."""

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
    """The groups of one version, taken from the buffer to be trained."""

    version: int
    """The version they train; the result is the next."""
    groups: list[Group]
    steps_before: int
    """The trainer's optimizer steps before these."""
    batches: list[Batch] = field(default_factory=list)
    """One for each optimizer step."""
    steps: list[Awaitable[dict[str, float]]] = field(default_factory=list)
    """The metrics of each optimizer step; empty until the trainer is asked for them."""
    publishing: Awaitable[Published] | None = None
    """The publication of the next version, if the trainer was asked for it together with the steps."""


async def run_episode(environment: Environment, task: dict[str, Plain], client: EngineClient) -> Episode:
    """Run one episode. What the environment raises fails the episode, not the run."""
    try:
        return await environment.run(task, client)
    except ConfigError:
        raise
    except UnusablePrompt as error:
        outcome: Outcome = Invalid(str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the environment is the user's)
        outcome = InfraAbort(f"the environment raised {type(error).__name__}: {error}")
    return Episode(id=client.episode, group=client.group, task=task, outcome=outcome)
