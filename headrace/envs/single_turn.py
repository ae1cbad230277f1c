"""The protocol of environments, and the built-in one: one prompt, one completion."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from headrace.engine import UnusablePrompt
from headrace.records import Episode, InfraAbort, Invalid
from headrace.settings import ConfigError
from headrace.user_code import await_user

if TYPE_CHECKING:
    from headrace.envs.client import Client, EngineClient
    from headrace.records import Outcome, Plain


class Environment(Protocol):
    """Runs a task to its end."""

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        """The generate loop calls it once per attempt. If all attempts raise, the episode counts as failed."""


class SingleTurn:
    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        started = time.time()
        rollout = await client.generate(client.prompt(task["prompt"], task.get("chat_template_kwargs")))
        return Episode(
            id=client.episode, group=client.group, task=task, rollouts=(rollout,), started=started, finished=time.time()
        )


async def run_episode(
    environment: Environment,
    task: dict[str, Plain],
    client: EngineClient,
    *,
    timeout: float = 0.0,  # noqa: ASYNC109
) -> Episode:
    """Run one episode. An exception in the environment fails the episode, not the run; so does a `timeout`, in seconds."""
    if type(environment) is SingleTurn and not timeout:  # it ends when it is cancelled, and needs no task of its own
        return await _run(environment, task, client)
    running = _run(environment, task, client)
    try:
        async with asyncio.timeout(timeout or None) as client.clock:
            return await await_user(running, name=f"the environment of {client.episode}", on_stuck=client.on_stuck)
    except TimeoutError:
        return _failed(task, client, InfraAbort(f"the episode took longer than episode.timeout = {timeout:g} s"))
    finally:
        client.is_over = True


async def _run(environment: Environment, task: dict[str, Plain], client: EngineClient) -> Episode:
    try:
        return await environment.run(task, client)
    except ConfigError:
        raise
    except UnusablePrompt as error:
        return _failed(task, client, Invalid(str(error)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the environment is the user's)
        return _failed(task, client, InfraAbort(f"the environment raised {type(error).__name__}: {error}"))


def _failed(task: dict[str, Plain], client: EngineClient, outcome: Outcome) -> Episode:
    return Episode(id=client.episode, group=client.group, task=task, outcome=outcome)
