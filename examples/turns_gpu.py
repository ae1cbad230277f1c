"""Two tasks of several turns for a small chat model on one GPU: find a number by hints, and compute with a calculator.

python examples/turns_gpu.py guess --model HuggingFaceTB/SmolLM2-135M-Instruct
python examples/turns_gpu.py calculate --model HuggingFaceTB/SmolLM2-135M-Instruct --max-lag 0 --seconds 60
"""

from __future__ import annotations

import argparse
import operator
import random
import re
import time
from typing import TYPE_CHECKING, Any

import headrace
from headrace.records import Scored

if TYPE_CHECKING:
    from headrace.envs import Client
    from headrace.launch import RunResult
    from headrace.run import CallbackState

HIGHEST, GUESSES, CALLS = 30, 6, 3
EXAMPLES = "(20 + 15) * 12|20 + 15|35|35 * 12|420|Answer: 420|30 * 11 - 14|30 * 11|330|330 - 14|316|Answer: 316"
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Guess:
    """A number is right, too low or too high. Found at once it is worth 1, and 0.1 less for each more guess; else up to 0.3, by
    the share of guesses that the hints allowed."""

    async def run(self, task: dict[str, Any], client: Client) -> headrace.Episode:
        chat, low, high, num_sensible, reward = client.chat(task["prompt"]), 1, HIGHEST, 0, 0.0
        for turn in range(GUESSES):
            found = re.search(r"\d+", str((await chat.generate())["content"]))
            guess = int(found[0][:4]) if found else 0
            if guess == task["number"]:
                reward = 1.0 - 0.1 * turn
                break
            num_sensible += low <= guess <= high
            reward = 0.3 * num_sensible / GUESSES
            if turn == GUESSES - 1 or chat.is_truncated:
                break
            if guess < task["number"]:
                low, hint = max(low, guess + 1), "Higher."
            else:
                high, hint = min(high, guess - 1), "Lower."
            chat.append({"role": "user", "content": hint})
        return chat.episode(task, outcome=Scored(reward))


class Calculate:
    """The policy writes an operation, is told the result, and goes on until it writes the answer. The right answer is worth 1;
    else each right result on the way is worth 0.25."""

    async def run(self, task: dict[str, Any], client: Client) -> headrace.Episode:
        chat, results, reward = client.chat(task["prompt"]), set[int](), 0.0
        for turn in range(CALLS + 1):
            said = str((await chat.generate())["content"])
            if answer := re.search(r"Answer: (\d{1,9})\b", said):
                reward = max(reward, float(int(answer[1]) == task["steps"][-1]))
                break
            if turn == CALLS or chat.is_truncated:
                break
            call = re.fullmatch(r"\s*(\d{1,6}) ([+*-]) (\d{1,6})\s*", said)
            reply = "I cannot compute that."
            if call:
                result = OPERATIONS[call[2]](int(call[1]), int(call[3]))
                results |= {result} & set(task["steps"])
                reward, reply = 0.25 * len(results), str(result)
            chat.append({"role": "user", "content": reply})
        return chat.episode(task, outcome=Scored(reward))


def chat_of(system: str, turns: str, question: str) -> list[dict[str, str]]:
    """A prompt that shows an earlier dialogue, whose turns are separated by bars; the user begins."""
    roles = ["user", "assistant"] * turns.count("|")
    shown = [{"role": role, "content": text} for role, text in zip(roles, turns.split("|"), strict=False)]
    return [{"role": "system", "content": system}, *shown, {"role": "user", "content": question}]


def guess_tasks(rng: random.Random) -> list[dict[str, Any]]:
    system = f"Find the user's whole number from 1 to {HIGHEST}. Answer with one number only."
    prompt = chat_of(system, "Guess my number.|4|Higher.|22|Lower.|9|Right!|Thank you.", "I have a new number. Guess it.")
    return [{"prompt": prompt, "number": rng.randint(1, HIGHEST)} for _ in range(4096)]


def calculate_tasks(rng: random.Random) -> list[dict[str, Any]]:
    system = "Compute with a calculator that does one operation at a time, such as 12 + 34. Then write the answer."
    rows = []
    for _ in range(4096):
        a, b, c = sorted((rng.randint(11, 99) for _ in range(3)), reverse=True)
        text, steps = rng.choice(
            [
                (f"({a} + {b}) * {c}", [a + b, (a + b) * c]),
                (f"({a} - {b}) * {c}", [a - b, (a - b) * c]),
                (f"{a} * {b} + {c}", [a * b, a * b + c]),
                (f"{a} * {b} - {c}", [a * b, a * b - c]),
            ]
        )
        prompt = chat_of(system, EXAMPLES, text)
        rows.append({"prompt": prompt, "steps": steps})
    return rows


class StopAfter(headrace.Callback):
    """Ends a run some seconds after its third version: by then everything is compiled."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._started = seconds, 0.0

    def on_step(self, state: CallbackState) -> None:
        if state.version <= 3:
            self._started = time.monotonic()
        elif 0 < self._seconds < time.monotonic() - self._started:
            state.stop()


def main(arguments: list[str] | None = None) -> RunResult:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["guess", "calculate"])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=0.0, help="of RL after version 3, then it stops; 0 sets no limit")
    parser.add_argument("--max-lag", default="auto", help="0 trains in turn with sampling")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--run-dir", default=None)
    given = parser.parse_args(arguments)
    environment, make_tasks = {"guess": (Guess, guess_tasks), "calculate": (Calculate, calculate_tasks)}[given.task]
    return headrace.train(
        model={"path": given.model, "dtype": "bfloat16", "context": 1024},
        tasks=make_tasks(random.Random(0)),
        held_out=make_tasks(random.Random(1))[:256],
        environment=environment,
        steps=given.steps,
        run_dir=given.run_dir,
        callbacks=[StopAfter(given.seconds)],
        sampling={"max_tokens": 16},
        staleness={"max_lag": given.max_lag if given.max_lag == "auto" else int(given.max_lag)},
        train={"batch": given.batch, "group_size": 8, "learning_rate": 2e-5, "warmup_steps": 5},
        evaluate={"limit": 256, "success_at": 0.5 if given.task == "guess" else 1.0},
        fresh=True,
    )


if __name__ == "__main__":
    main()
