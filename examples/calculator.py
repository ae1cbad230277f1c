"""A calculator as a tool: the policy writes a call, reads the reply, and answers.

SFT shows a tiny model how calls are written, and stops when it solves a share of the tasks; RL goes on from there, with whole
episodes: the tool's replies are in the rollouts, but not in the loss.

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


def make_tasks(count: int, *, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    pairs = [(rng.randint(2, 9), rng.randint(2, 99)) for _ in range(count)]
    return [{"prompt": f"{a}*{b}=", "a": a, "b": b} for a, b in pairs]


def demonstrations(tasks: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row for each turn. Without a chat template, replies of tools stand between <tool_response> marks."""
    rows = []
    for task in tasks:
        call = json.dumps({"name": "multiply", "arguments": {"a": task["a"], "b": task["b"]}})
        called = f"<tool_call>{call}</tool_call>"
        reply = f"<tool_response>\n{task['a'] * task['b']}\n</tool_response>\n"
        rows.append({"prompt": task["prompt"], "completion": called})
        rows.append({"prompt": f"{task['prompt']}{called}<|end|>{reply}", "completion": f"{task['a'] * task['b']}"})
    return rows


def right(completion: str, a: int, b: int) -> float:
    """Whether the last line is the product."""
    return float(completion.rpartition("\n")[2] == str(a * b))


def main(**settings: object) -> RunResult:
    defaults: dict[str, Any] = {
        "steps": 30,
        "model": {"path": "builtin:tiny", "hidden_size": 64, "num_heads": 2, "num_layers": 2, "context": 160},
        "sft": {"steps": 400, "batch": 32, "learning_rate": 3e-3, "until_success": 0.3, "check_every": 20},
        "environment": {"options": {"max_turns": 2}},
        "sampling": {"max_tokens": 90},
        "train": {"batch": 64, "group_size": 8, "learning_rate": 5e-4},
        "evaluate": {"limit": 32},
        "orchestrate": "inline",
        "threads": 1,
    }
    defaults["sft"]["tasks"] = demonstrations(make_tasks(1000, seed=1))
    return headrace.train(
        tasks=make_tasks(1000, seed=2),
        held_out=make_tasks(32, seed=3),
        tools=[multiply],
        reward=right,
        fresh=True,
        **defaults | settings,
    )


if __name__ == "__main__":
    summary = main().summary
    print(f"solved with the tool: {summary['success_before']:.0%} before RL, {summary['success_after']:.0%} after")
