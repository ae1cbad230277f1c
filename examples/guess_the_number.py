"""Guess the number over turns: an environment of one's own, with text prompts and no chat template.

The policy guesses a digit, is told whether the number is lower or higher, and guesses again, three times at most. It starts
from random weights, and a token is a guess, so that RL alone teaches it to search.

    python examples/guess_the_number.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import headrace

if TYPE_CHECKING:
    from headrace.envs import Client
    from headrace.launch import RunResult

MAX_GUESSES = 3
TASKS = [{"prompt": "guess:", "number": number} for number in range(10)]


class GuessTheNumber:
    """`<` says that the number is lower than the guess, `>` that it is higher, `?` that the guess is no digit."""

    can_resume = True  # the same guesses get the same replies, so that a restart loses no turn

    async def run(self, task: dict[str, Any], client: Client) -> headrace.Episode:
        rollout, number = client.prompt(task["prompt"]), str(task["number"])
        for turn in range(MAX_GUESSES):
            rollout = await client.generate(rollout)
            guess = client.text(rollout)[-1:]
            if guess == number or turn == MAX_GUESSES - 1:
                break
            rollout = client.append(rollout, "?" if not guess.isdigit() else "<" if number < guess else ">")
        return headrace.Episode(id=client.episode, group=client.group, task=task, rollouts=(rollout,))


def found_early(completion: str, number: int) -> float:
    """1 for the first guess, 0.2 less for each more, 0 if none is right. A completion such as `5>7<6` has every turn."""
    guesses = completion[::2]
    return 1.0 - 0.2 * (len(guesses) - 1) if guesses.endswith(str(number)) else 0.0


def main(**settings: object) -> RunResult:
    defaults: dict[str, Any] = {
        "steps": 60,
        "model": {"path": "builtin:tiny", "hidden_size": 64, "num_heads": 2, "num_layers": 2, "context": 32},
        "sampling": {"max_tokens": 1},
        "train": {"batch": 160, "group_size": 16, "learning_rate": 2e-3},
        "evaluate": {"success_at": 0.5, "samples": 8},
        "orchestrate": "inline",
        "threads": 1,
    }
    return headrace.train(
        tasks=TASKS, held_out=TASKS, environment=GuessTheNumber, reward=found_early, fresh=True, **defaults | settings
    )


if __name__ == "__main__":
    summary = main().summary
    print(f"found within {MAX_GUESSES} guesses: {summary['success_before']:.0%} before, {summary['success_after']:.0%} after")
