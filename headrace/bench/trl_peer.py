"""TRL's GRPO in a process of its own: `python -m headrace.bench.trl_peer MODEL ORDER`, where ORDER is a JSON file.

It prints one line for each optimizer step, `{"seconds": …}`, from the end of the step before to its own end. On a GPU vLLM
generates inside its process, on a CPU transformers does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.step_loads import first_word_is_even

_SECONDS = 360.0


class TrlFailed(RuntimeError):
    """It did not do what was asked; the message is one line."""


class OutOfMemory(TrlFailed):
    """With these settings."""


@dataclass(frozen=True)
class Settings:
    """Those of TRL's that a step's time depends on and that are not the work itself."""

    micro_batch: int
    """Completions of one forward and backward pass."""
    checkpointing: bool
    """Whether activations are computed a second time in the backward pass."""

    def __str__(self) -> str:
        checkpointing = "on" if self.checkpointing else "off"
        return (
            f"micro-batches of {self.micro_batch}, gradient checkpointing {checkpointing}, importance sampling correction off"
        )


TRIED = (Settings(64, False), Settings(32, False), Settings(32, True))
"""The fastest first; the next where one does not fit."""


@dataclass(frozen=True)
class TrlSteps:
    """What was measured, and of what."""

    name: str
    settings: Settings
    seconds: list[float]
    """Of each step."""


def missing_modules(device: str) -> list[str]:
    """Of those it needs."""
    needed = ("trl", "datasets", *(("vllm",) if device == "cuda" else ()))
    return [name for name in needed if importlib.util.find_spec(name) is None]


def measure_steps(model: str, folder: Path, *, device: str, completions: int, steps: int, **work: Any) -> TrlSteps:  # noqa: ANN401  (of `main`'s order)
    """Seconds of each step, with the fastest settings that fit."""
    for settings in TRIED:
        order = {"device": device, "completions": completions, "steps": steps, **work, "checkpointing": settings.checkpointing}
        micro_batch = min(settings.micro_batch, completions)
        try:
            seconds = _run(model, folder, {**order, "micro_batch": micro_batch}, steps=steps)
        except OutOfMemory as failed:
            error = failed
            continue
        generator = f"vLLM {_version('vllm')}" if device == "cuda" else "transformers' generate"
        return TrlSteps(f"TRL {_version('trl')} + {generator}", Settings(micro_batch, settings.checkpointing), seconds)
    raise error


def _run(model: str, folder: Path, order: dict[str, Any], *, steps: int) -> list[float]:
    place = Path(tempfile.mkdtemp(dir=folder, prefix="trl-"))
    (place / "order.json").write_text(json.dumps({**order, "folder": str(place)}))
    command = [sys.executable, "-m", "headrace.bench.trl_peer", model, str(place / "order.json")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise TrlFailed(f"TRL: not done within {_SECONDS:.0f} s") from None
    told = [json.loads(line)["seconds"] for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or len(told) != steps:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        kind = OutOfMemory if "OutOfMemoryError" in done.stderr else TrlFailed
        raise kind(f"TRL: {len(told)} of {steps} steps: {said[-1][:200]}")
    return [float(seconds) for seconds in told]


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def main() -> None:
    """As its documentation has it, without what would only cost it time: no KL, no checkpointing where activations fit, no
    importance sampling correction (a forward pass more). Weights have the dtype of the folder."""
    model, order = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    trl: Any = importlib.import_module("trl")  # mypy judges alike with and without it

    class Clock(TrainerCallback):
        """Tells how long each step took."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            self._last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            now = time.perf_counter()
            print(json.dumps({"seconds": now - self._last}), flush=True)
            self._last = now

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.pad_token  # it must have one; nothing ends a completion early
    tokens, is_on_gpu = order["tokens"], order["device"] == "cuda"
    with_vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
    config = trl.GRPOConfig(
        output_dir=order["folder"],
        max_steps=order["steps"],
        per_device_train_batch_size=order["micro_batch"],
        gradient_accumulation_steps=order["completions"] // order["micro_batch"],
        gradient_checkpointing=order["checkpointing"],
        num_generations=order["siblings"],
        max_completion_length=tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        vllm_importance_sampling_correction=False,
        generation_kwargs={"ignore_eos": True} if is_on_gpu else {"min_new_tokens": tokens},
        bf16=is_on_gpu,
        use_cpu=not is_on_gpu,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **(with_vllm if is_on_gpu else {}),
    )

    def reward(completion_ids: list[list[int]], completions: list[str], **_: object) -> list[float]:
        if short := [len(ids) for ids in completion_ids if len(ids) != tokens]:  # another's work
            raise RuntimeError(f"{short[0]} tokens a completion where {tokens} were asked for")
        return first_word_is_even(completions)

    trainer = trl.GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=[reward],
        train_dataset=Dataset.from_list(order["tasks"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
