"""The protocol of environments, and the built-in one: one prompt, one completion."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from headrace.records import Episode

if TYPE_CHECKING:
    from headrace.envs.client import Client
    from headrace.records import Plain


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
