"""Small real runs for the orchestration tests, and what memory tensors take."""

from __future__ import annotations

import shutil
import subprocess
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headrace
from headrace.run.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

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


def books_close(summary: dict[str, Any]) -> bool:
    """Whether every rollout that was submitted is in one place."""
    counts = dict(summary["accounting"])
    counts.pop("evaluation")
    return counts.pop("submitted") == sum(counts.values()) > 0


def mismatches(rows: list[dict[str, Any]]) -> list[float]:
    """Of the versions that trained rollouts which they sampled themselves: others have none."""
    return [row["train/mismatch_max"] for row in rows if "train/mismatch_max" in row]


def weights(checkpoint: str | Path | None) -> dict[str, torch.Tensor]:
    assert checkpoint is not None
    return load_file(f"{checkpoint}/model.safetensors")


def same_weights(left: str | Path | None, right: str | Path | None) -> bool:
    ours, theirs = weights(left), weights(right)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def failing_loss(folder: Path) -> str:
    """A loss whose fifth call raises, as `train.loss` names it."""
    path = folder / "failing_loss.py"
    path.write_text(
        "calls = []\n"
        "def fails(tokens):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 5:\n"
        "        raise RuntimeError('out of luck')\n"
        "    return -tokens.ratio() * tokens.advantages, {}\n"
    )
    return f"{path}:fails"


def run_on_a_full_disk(run: Callable[..., RunResult], disk: Path, cache: Path) -> CheckpointError:
    """Its weights are rescued, and the same command goes on once there is room; returns how it failed."""
    folder, kept = disk / "run", disk / "run" / "checkpoints"
    settings: dict[str, Any] = {"steps": 9, "observe": {"keep_rollouts_every": 0, "trace": False}}
    settings["model"] = {"hidden_size": 96, "num_heads": 3, "num_layers": 2}
    with pytest.raises(CheckpointError, match=r"No space left on device|os error 28") as caught:
        run(folder, **settings)
    message = str(caught.value)
    rescued = message.partition("it is in ")[2].partition(",")[0]
    assert "Nothing is lost" in message and rescued.startswith(str(cache)) and weights(rescued)
    assert int(rescued.rpartition("-")[2]) < 9
    assert any(kept.glob("step-*")) and all(weights(path) for path in kept.glob("step-*")) and not any(kept.glob(".*"))
    for path in kept.glob("step-*"):
        shutil.rmtree(path)
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    result = run(folder, **settings)
    assert result.summary["status"] == "finished" and result.summary["accounting"]["trained"] == 9 * 16
    assert not Path(rescued).exists()
    return caught.value


class LiveStorages(TorchDispatchMode):
    """The most bytes that tensors made within it had at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._alive = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {each.untyped_storage()._cdata for each in filter(torch.is_tensor, tree_leaves((args, kwargs)))}
        result = function(*args, **(kwargs or {}))
        for each in filter(torch.is_tensor, tree_leaves(result)):
            storage = each.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._alive.values()))
        return result
