"""What a whole step is measured on: tasks, their lengths, a reward, and the environment that gives each completion its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headrace.bench.engine_loads import lognormal_lengths
from headrace.bench.words import random_text
from headrace.records import Episode

if TYPE_CHECKING:
    from headrace.envs import Client
    from headrace.records import Plain

LENGTHS = "lengths"
"""The column of a task that says how many tokens each sibling draws."""


def make_tasks(count: int, *, prompt_tokens: int, vocabulary: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of made-up words, no two alike."""
    random = np.random.default_rng(seed)
    return [{"prompt": random_text(random, words=prompt_tokens, vocabulary=vocabulary)} for _ in range(count)]


def with_lengths(tasks: list[dict[str, Any]], *, siblings: int, mean: float, cap: int) -> list[dict[str, Any]]:
    """The same tasks, with a length for every sibling: most are short, a few are very long."""
    drawn = lognormal_lengths(len(tasks) * siblings, mean=mean, sigma=1.0, cap=cap)
    return [{**task, LENGTHS: list(drawn[number * siblings : (number + 1) * siblings])} for number, task in enumerate(tasks)]


def first_word_is_even(completions: list[str], **_: object) -> list[float]:
    """A reward that takes no time and tells siblings apart."""
    return [float(text.partition(" ")[0].removeprefix("w")[-1:] in tuple("02468")) for text in completions]


class OwnLengths:
    """Asks once, as the built-in environment does; each sibling draws as many tokens as its task says."""

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        started = time.time()
        prompt = client.prompt(task["prompt"])
        engine: Any = client
        engine.limit(int(cast("list[int]", task[LENGTHS])[prompt.index]))
        rollout = await client.generate(prompt)
        return Episode(
            id=client.episode, group=client.group, task=task, rollouts=(rollout,), started=started, finished=time.time()
        )
