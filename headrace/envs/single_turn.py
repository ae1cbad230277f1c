"""The protocol of environments, and the built-in one: one prompt, one completion."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.engine import UnusablePrompt
from headrace.envs.episode_clock import EpisodeClock
from headrace.records import Episode, InfraAbort, Invalid
from headrace.settings import ConfigError
from headrace.user_code import await_user

if TYPE_CHECKING:
    from headrace.envs.client import Client, EngineClient
    from headrace.records import Outcome, Plain, Rollout


_IDLE_SHARE = 4
"""Three attempts that hang, and end when cancelled, do so before the run's `deadline`."""


class Environment(Protocol):
    """Runs a task to its end."""

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        """The generate loop calls it once per attempt. If all attempts raise, the episode counts as failed."""


class EnvironmentFailed(RuntimeError):
    """What became of an environment in another process: it raised something, or the process ended."""


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
    deadline: float = 0.0,
) -> Episode:
    """Run one episode. An exception in the environment fails the episode, not the run; so do a `timeout`, in seconds, a quarter
    of `deadline` without a generate call, unless the environment says that it `may_idle`, and a result that is not an episode
    of this client's."""
    if type(environment) is SingleTurn and not timeout:  # it ends when it is cancelled, and needs no task of its own
        try:
            return await _run(environment, task, client)
        finally:
            client.release()
    name = str(getattr(environment, "name", type(environment).__qualname__))
    async with getattr(environment, "places", None) or contextlib.nullcontext():
        idle = 0.0 if getattr(environment, "may_idle", False) else deadline / _IDLE_SHARE
        client.clock, running = EpisodeClock(timeout, idle), _run(environment, task, client)
        try:
            async with client.clock.running():
                episode = await await_user(running, name=f"the environment of {client.episode}", on_stuck=client.on_stuck)
        except TimeoutError:
            reason = f"the episode took longer than episode.timeout = {timeout:g} s"
            if client.clock.was_idle:
                made_none = f"environment {name!r} made no generate call for {idle:g} s, a quarter of deadline = {deadline:g}"
                reason = f"{made_none}; raise that if it may take so long, or have it say `may_idle = True`"
            return _failed(task, client, InfraAbort(reason))
        finally:
            client.is_over = True
            client.release()
    if not hasattr(environment, "places"):  # not made by `make_environment`
        return episode
    problem = _problem(episode, client)
    if problem:
        return _failed(task, client, InfraAbort(f"environment {name!r} returned {problem}"))
    return episode if episode.environment != "single_turn" else episode.replace(environment=name)


async def _run(environment: Environment, task: dict[str, Plain], client: EngineClient) -> Episode:
    try:
        return await environment.run(task, client)
    except ConfigError:
        raise
    except UnusablePrompt as error:
        return _failed(task, client, Invalid(str(error)))
    except EnvironmentFailed as error:
        return _failed(task, client, InfraAbort(f"the environment {error}"))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the environment is the user's)
        return _failed(task, client, InfraAbort(f"the environment raised {type(error).__name__}: {error}"))


def _failed(task: dict[str, Plain], client: EngineClient, outcome: Outcome) -> Episode:
    return Episode(id=client.episode, group=client.group, task=task, outcome=outcome)


def _problem(episode: object, client: EngineClient) -> str:
    """What is wrong with an environment's result; "" if nothing is. The sampled tokens of a rollout that an engine generated
    must be the engine's; an environment may bring others of its own (`Rollout.demonstrate`)."""
    if not isinstance(episode, Episode):
        return f"a {type(episode).__name__}, not an Episode"
    if (episode.id, episode.group) != (client.episode, client.group):
        return f"episode {episode.id!r} of group {episode.group!r}, but ran {client.episode!r} of {client.group!r}"
    if not isinstance(episode.outcome, Invalid | InfraAbort) and not any(each.num_sampled for each in episode.rollouts):
        return "no rollout with a sampled token, and no failure as its outcome"
    ids = [rollout.id for rollout in episode.rollouts]
    if len(set(ids)) < len(ids):
        return f"two rollouts with the id {next(id for id in ids if ids.count(id) > 1)!r}"
    for rollout in episode.rollouts:
        generated = client.generated.get(rollout.id)
        if rollout.episode != client.episode:
            return f"rollout {rollout.id!r}, which is of episode {rollout.episode!r}"
        if generated is not None and not is_of(rollout, generated):
            return f"rollout {rollout.id!r} with other sampled tokens than the engine's"
    return ""


def is_of(rollout: Rollout, generated: Rollout) -> bool:
    """Whether the sampled tokens of a rollout are all the engine's; it may have been cut."""
    length = min(len(rollout), len(generated))
    arrays = ("token_ids", "logprobs", "versions")
    same = all(np.array_equal(getattr(rollout, name)[:length], getattr(generated, name)[:length]) for name in arrays)
    return same and not rollout.is_sampled[length:].any()
