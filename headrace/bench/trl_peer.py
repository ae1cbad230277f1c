"""TRL's GRPO in a process of its own: `python -m headrace.bench.trl_peer MODEL ORDER`, where ORDER is a JSON file.

It prints one line for each optimizer step, `{"seconds": …}`, from the end of the step before to its own end.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.step_loads import first_word_is_even

if TYPE_CHECKING:
    from collections.abc import Sequence

NEEDED = ("trl", "vllm", "datasets")
_MINI_BATCH = 32
"""Completions of one forward pass of TRL's."""
_SECONDS = 360.0


class TrlFailed(RuntimeError):
    """It did not do what was asked; the message is one line."""


def missing_modules() -> list[str]:
    """Of those it needs."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def trl_seconds(
    model: str, folder: Path, *, tasks: Sequence[dict[str, Any]], completions: int, siblings: int, tokens: int, steps: int
) -> list[float]:
    """Seconds of each step, as its own process tells them."""
    folder.mkdir(parents=True)
    order = {"tasks": list(tasks), "completions": completions, "siblings": siblings, "tokens": tokens, "steps": steps}
    (folder / "order.json").write_text(json.dumps({**order, "folder": str(folder)}))
    command = [sys.executable, "-m", "headrace.bench.trl_peer", model, str(folder / "order.json")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise TrlFailed(f"TRL: not done within {_SECONDS:.0f} s") from None
    told = [json.loads(line)["seconds"] for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or len(told) != steps:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise TrlFailed(f"TRL: {len(told)} of {steps} steps: {said[-1][:200]}")
    return [float(seconds) for seconds in told]


def main() -> None:
    """As its documentation has it: vLLM in the same process, bfloat16 under autocast, no KL."""
    model, order = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        """Tells how long each step took."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            self._last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            now = time.perf_counter()
            print(json.dumps({"seconds": now - self._last}), flush=True)
            self._last = now

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = tokenizer.pad_token  # it must have one; `ignore_eos` lets nothing end a completion early
    mini_batch = min(_MINI_BATCH, order["completions"])
    config = GRPOConfig(
        output_dir=order["folder"],
        max_steps=order["steps"],
        per_device_train_batch_size=mini_batch,
        gradient_accumulation_steps=order["completions"] // mini_batch,
        num_generations=order["siblings"],
        max_completion_length=order["tokens"],
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        bf16=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        generation_kwargs={"ignore_eos": True},
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=[first_word_is_even],
        train_dataset=Dataset.from_list(order["tasks"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
