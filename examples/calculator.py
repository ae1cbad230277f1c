"""A calculator as a tool: the policy writes a call, reads the reply, and answers.

SFT shows a tiny model how a call is written, but most of its examples give the product at once, which the model cannot learn to
do. RL teaches it to call the tool, by whole episodes: the tool's replies are in the rollouts, but not in the loss.

    python examples/calculator.py
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import headrace

if TYPE_CHECKING:
    from headrace.launch import RunResult


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: one number
        b: the other
    """
    return a * b


def make_tasks() -> list[dict[str, Any]]:
    """All products of two numbers of two digits, in random order."""
    rows = [{"prompt": f"{a}*{b}=", "a": a, "b": b} for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(rows)
    return rows


def demonstrations(tasks: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each turn: one task in four calls the tool. Without a chat template, replies stand between marks."""
    rows = []
    for number, task in enumerate(tasks):
        prompt, product = task["prompt"], str(task["a"] * task["b"])
        if number % 4 == 0:
            call = json.dumps({"name": "multiply", "arguments": {"a": task["a"], "b": task["b"]}})
            rows.append({"prompt": prompt, "completion": f"<tool_call>{call}</tool_call>"})
            prompt += f"<tool_call>{call}</tool_call><|end|><tool_response>\n{product}\n</tool_response>\n"
        rows.append({"prompt": prompt, "completion": product})
    return rows


def is_right(completion: str, a: int, b: int) -> float:
    """Whether the last line is the product."""
    return float(completion.rpartition("\n")[2] == str(a * b))


def main(**settings: object) -> RunResult:
    defaults: dict[str, Any] = {
        "steps": 30,
        "model": {"path": "builtin:tiny", "hidden_size": 64, "num_heads": 4, "num_layers": 2, "context": 160},
        "sft": {"steps": 600, "batch": 64, "learning_rate": 3e-3, "schedule": "linear", "until_success": 0.12},
        "environment": {"options": {"max_turns": 2}},
        "sampling": {"max_tokens": 90},
        "train": {"batch": 64, "group_size": 8, "learning_rate": 5e-4},
        "evaluate": {"limit": 128},
        "orchestrate": "inline",
        "threads": 1,
    }
    tasks = make_tasks()
    defaults["sft"] |= {"tasks": demonstrations(tasks[128:5000]), "check_every": 50}
    return headrace.train(
        tasks=tasks[5000:], held_out=tasks[:128], tools=[multiply], reward=is_right, fresh=True, **defaults | settings
    )


if __name__ == "__main__":
    summary = main().summary
    print(f"solved with the tool: {summary['success_before']:.0%} before RL, {summary['success_after']:.0%} after")
