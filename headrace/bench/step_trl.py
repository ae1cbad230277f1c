"""TRL's GRPO in a child process, for `headrace bench step` and `lora`: vLLM generates on a GPU, transformers on a CPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.bench.child import Child, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SECONDS = 600.0
TRIED = ((64, False), (32, False), (32, True), (8, True))
"""(completions per pass, gradient checkpointing), fastest first; the next is tried when one runs out of memory."""
TRIED_8B = ((16, False), (8, False), (16, True), (4, True))
"""For 8 billion parameters, where each try loads the model twice."""


class TrlSteps(NamedTuple):
    name: str
    settings: str
    seconds: list[float]


def missing_modules(device: str) -> list[str]:
    """Modules that TRL needs and that are not installed."""
    needed = ("trl", "datasets", *(("vllm",) if device == "cuda" else ()))
    return [name for name in needed if importlib.util.find_spec(name) is None]


def measure_steps(
    folder: Path,
    *,
    device: str,
    completions: int,
    tried: Sequence[tuple[int, bool]] = TRIED,
    **work: Any,  # noqa: ANN401  (see `train`)
) -> TrlSteps:
    """Seconds of each step, with the fastest of the `tried` settings that fit in memory."""
    for size, checkpointing in tried:
        micro_batch = min(size, completions)
        with tempfile.TemporaryDirectory(dir=folder, prefix="trl-") as place:
            order = {"device": device, "completions": completions, "output": place, **work}
            order |= {"micro_batch": micro_batch, "checkpointing": checkpointing}
            log = Path(place) / "log"
            try:
                with Child("TRL", "headrace.bench.step_trl:train", order, log=log) as child:
                    seconds = child.hear(seconds=_SECONDS)
            except PeerFailed:
                if (size, checkpointing) == tried[-1] or "OutOfMemoryError" not in log.read_text(errors="replace"):
                    raise
                continue
        generator = f"vLLM {_version('vllm')}" if device == "cuda" else "transformers' generate"
        settings = f"micro-batches of {micro_batch}, gradient checkpointing {'on' if checkpointing else 'off'}"
        name = f"TRL {_version('trl')} + {generator}" + (f" + PEFT {_version('peft')}" if work.get("lora") else "")
        return TrlSteps(name, f"{settings}, importance sampling correction off", seconds)
    raise AssertionError


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def grpo_config(*, is_on_gpu: bool, **settings: Any) -> Any:  # noqa: ANN401  (TRL ships no types)
    """TRL's settings, without what would only cost it time: no KL, no checkpoints, no importance sampling correction, which is
    one more forward pass, and its samples are never stale."""
    trl: Any = importlib.import_module("trl")  # for mypy, which may run without it
    with_vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3} if is_on_gpu else {}
    usual = {"temperature": 1.0, "beta": 0.0, "vllm_importance_sampling_correction": False, "bf16": is_on_gpu, **with_vllm}
    return trl.GRPOConfig(use_cpu=not is_on_gpu, save_strategy="no", report_to=[], disable_tqdm=True, **usual, **settings)


def train(order: dict[str, Any], orders: Iterator[Any]) -> Iterator[list[float]]:
    """Runs in TRL's process: the seconds of each step, since the end of the previous one. Gradient checkpointing is off if
    activations fit. Weights are as TRL loads them, in float32; with an adapter (`lora`, its rank and alpha) those that are
    frozen have the folder's dtype."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    from headrace.bench.step import first_word_is_even

    trl: Any = importlib.import_module("trl")  # for mypy, which may run without it
    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            moments.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            moments.append(time.perf_counter())

    tokenizer: Any = AutoTokenizer.from_pretrained(order["model"], trust_remote_code=False)
    tokenizer.eos_token = tokenizer.pad_token  # TRL needs one; nothing ends a completion early
    tokens, is_on_gpu, lora = order["tokens"], order["device"] == "cuda", order.get("lora")
    adapted: dict[str, Any] = {}
    if lora:
        peft: Any = importlib.import_module("peft")
        sizes = {"r": lora["rank"], "lora_alpha": lora["alpha"]}
        adapted = {"peft_config": peft.LoraConfig(**sizes, target_modules="all-linear", task_type="CAUSAL_LM")}
    config = grpo_config(
        is_on_gpu=is_on_gpu,
        output_dir=order["output"],
        max_steps=order["steps"],
        per_device_train_batch_size=order["micro_batch"],
        gradient_accumulation_steps=order["completions"] // order["micro_batch"],
        gradient_checkpointing=order["checkpointing"],
        num_generations=order["siblings"],
        max_completion_length=tokens,
        learning_rate=1e-6,
        model_init_kwargs={"dtype": "auto"} if lora else None,
        generation_kwargs={"ignore_eos": True} if is_on_gpu else {"min_new_tokens": tokens},
    )

    def reward(completion_ids: list[list[int]], completions: list[str], **_: object) -> list[float]:
        if short := [len(ids) for ids in completion_ids if len(ids) != tokens]:  # less work than ours
            raise RuntimeError(f"{short[0]} tokens a completion where {tokens} were asked for")
        return first_word_is_even(completions)

    trl.GRPOTrainer(
        model=order["model"],
        args=config,
        reward_funcs=[reward],
        train_dataset=Dataset.from_list(order["tasks"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
        **adapted,
    ).train()
    yield [after - before for before, after in itertools.pairwise(moments)]
