"""The protocol of environments, and the built-in one: one prompt, one completion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from headrace.engine import UnusablePrompt
from headrace.records import Episode, InfraAbort, Invalid
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.envs.client import Client
    from headrace.records import Outcome, Plain


class Environment(Protocol):
    """Runs a task to its end."""

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        """The generate loop calls it once per attempt. If all attempts raise, the episode counts as failed."""


class SingleTurn:
    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        started = time.time()
        rollout = await client.generate(client.prompt(task["prompt"]))
        return Episode(
            id=client.episode, group=client.group, task=task, rollouts=(rollout,), started=started, finished=time.time()
        )


async def run_episode(environment: Environment, task: dict[str, Plain], client: Client) -> Episode:
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
