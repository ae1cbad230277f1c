"""Small real runs for the orchestration tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

import headrace

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.launch.launcher import RunResult

SMALL: dict[str, Any] = {
    "model": {"path": "builtin:tiny", "hidden_size": 32, "num_heads": 1, "num_layers": 1, "context": 32},
    "sampling": {"max_tokens": 6},
    "train": {"batch": 16, "group_size": 4, "learning_rate": 1e-3},
    "engine": {"slots": 8},
    "evaluate": {"limit": 8},
    "checkpoint": {"every": 3, "keep": 10},
    "threads": 1,
    "orchestrate": "inline",
}
TASKS = [{"prompt": f"{number}", "answer": str(number)} for number in range(12)]


def length_reward(prompt: str, completion: str, **_: object) -> float:
    """Fewer characters are better: something even an untrained model can do more or less of."""
    return 1.0 / (1 + len(completion))


def small_run(folder: Path | None, **changes: Any) -> RunResult:
    settings: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in SMALL.items()}
    arguments: dict[str, Any] = {"tasks": TASKS, "reward": length_reward, "held_out": TASKS[:4], "steps": 6, "quiet": True}
    for key, value in changes.items():
        if key in settings and isinstance(value, dict):
            settings[key] |= value
        else:
            arguments[key] = value
    return headrace.train(run_dir=folder, **{**settings, **arguments})


def weights(checkpoint: str | Path | None) -> dict[str, torch.Tensor]:
    assert checkpoint is not None
    return load_file(f"{checkpoint}/model.safetensors")


def same_weights(left: str | Path | None, right: str | Path | None) -> bool:
    ours, theirs = weights(left), weights(right)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
