"""Environments that are reset and stepped: an observation, an action, a reward, until the end. Adapters bring the package."""

from __future__ import annotations

import abc
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.envs.turns import check_limits
from headrace.settings import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.envs.client import Client
    from headrace.envs.turns import Conversation
    from headrace.records import Episode, Plain, Rollout

ENVIRONMENT = "environment"
"""The name among a rollout's rewards of what its environment paid."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an action led to."""

    observation: str
    reward: float
    is_last: bool


class World(abc.ABC):
    """What one episode acts in."""

    @abc.abstractmethod
    async def reset(self, seed: int) -> str:
        """The first observation; called once, first. Siblings have the same seed."""

    @abc.abstractmethod
    async def step(self, action: str) -> Step:
        """Called with each answer of the policy."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Called last, also after a failure."""


class StepEnvironment(abc.ABC):
    """Each answer of the policy is an action, and the observation it leads to is the user's next message.

    The first observation follows the task's prompt, in its last message. A task's `seed` sets the start; without one it
    follows from the group, so that siblings start alike. The episode's reward is the sum of its steps', to which reward
    functions, if there are any, add. An answer that reaches its limit, or the context's, ends the episode and is no action."""

    def __init__(
        self, *, max_turns: int = 32, max_seconds: float = 0.0, step_rewards: bool = False, can_resume: bool = False
    ) -> None:
        """`max_turns`: actions of an episode; `max_seconds`: after which no more follow, 0 for no limit. `step_rewards` also
        tells what each turn earned, for advantages that look at it (`train.advantage = "gae"`). `can_resume`: a fresh world
        with the same seed and actions observes and pays the same; after a restart, episodes then continue where they were."""
        check_limits(max_turns=max_turns, max_seconds=max_seconds)
        check(type(step_rewards) is bool, "environment.options.step_rewards", step_rewards, "true or false")
        self._max_turns, self._max_seconds = max_turns, max_seconds
        self._step_rewards, self.can_resume = step_rewards, can_resume

    @abc.abstractmethod
    def _world(self, task: dict[str, Plain]) -> World:
        """Called once per episode; nothing that takes long belongs in it."""

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        world = self._world(task)
        try:
            prompt = with_observation(task["prompt"], await world.reset(_seed(task, client.group)))
            chat = client.chat(prompt, template_kwargs=task.get("chat_template_kwargs"))
            earned = await self._play(chat, world)
        finally:
            await world.close()
        return paid(chat.episode(task), earned, step_rewards=self._step_rewards)

    async def _play(self, chat: Conversation, world: World) -> list[tuple[str, int, float]]:
        """[(rollout id, index of the action's last token, reward)]"""
        earned: list[tuple[str, int, float]] = []
        for turn in range(1, self._max_turns + 1):
            answer = await chat.generate()
            if chat.is_truncated:
                break
            step = await world.step(answer["content"].strip())
            earned.append((chat.rollout.id, len(chat.rollout) - 1, step.reward))
            if step.is_last or turn == self._max_turns or 0 < self._max_seconds <= chat.seconds:
                break
            chat.append({"role": "user", "content": step.observation})
        return earned


def paid(episode: Episode, earned: Sequence[tuple[str, int, float]], *, step_rewards: bool) -> Episode:
    """The episode with the sum of what it earned among its rewards."""
    rewards = {ENVIRONMENT: sum(value for _, _, value in earned)}
    changed: list[Rollout] = []
    for rollout in episode.rollouts:
        steps = [(index, value) for id, index, value in earned if id == rollout.id and step_rewards]
        if steps:  # the reward of the outcome, which is the sum, counts on the last token: less there what is paid here
            steps.append((len(rollout) - 1, -sum(value for _, value in steps)))
        changed.append(rollout.replace(rewards=rewards, step_rewards=tuple(step for step in steps if step[1])))
    return episode.replace(rollouts=tuple(changed))


def with_observation(prompt: Any, observation: str) -> Any:  # noqa: ANN401  (text or messages)
    """A prompt that ends with the observation."""
    if not observation:
        return prompt
    if isinstance(prompt, str):
        return f"{prompt}{observation}"
    *before, last = prompt
    if last["role"] != "user":
        return [*prompt, {"role": "user", "content": observation}]
    content = str(last.get("content") or "")
    return [*before, {**last, "content": f"{content}\n\n{observation}" if content else observation}]


def _seed(task: dict[str, Plain], group: str) -> int:
    """31 bits, which any package takes."""
    seed: Any = task.get("seed")
    if seed is None:
        return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=4).digest(), "little") >> 1
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed = {seed!r} of the task: it must be a whole number ≥ 0")
    return seed
