"""`headrace bench lora --only quantize`: a trainer with its frozen weights in 4 bits beside one that holds them whole.

Both have the same rounded model and train on the same rollouts. A GPU takes the shape of Qwen3-8B, with passes of 8,192 tokens.
Then an engine with a rounded model samples rollouts, which both trainers score.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.harness import Row, say
from headrace.bench.loads import LEARNING_RATE, QWEN3_8B, Load, make_batch, make_rollouts, write_random_model
from headrace.bench.measure import GIB, compare, held_bytes, peak_bytes, release, seconds_of
from headrace.config import make_recipe
from headrace.launch import build_trainer, forecast_memory
from headrace.lora import FOUR_BITS, round_weights
from headrace.model import ModelShape, load_config, load_model, load_plain, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    from headrace.lora import LoraSettings
    from headrace.records import Rollout
    from headrace.trainer import DeviceTrainer

WAYS = {"in 4 bits": FOUR_BITS, "whole": "none"}


def measure_quantized(
    folder: str,
    lora: LoraSettings,
    *,
    device: str,
    dtype: str,
    turns: int,
    judged: Load,
    sample: Callable[[PreTrainedModel, Load], Sequence[Rollout]],
) -> Iterator[list[Row]]:
    """`sample`: rollouts of an engine with this model."""
    is_on_gpu, lora = device != "cpu", replace(lora, quantize=FOUR_BITS)
    tokens, length = (8192, 320) if is_on_gpu else (512, 64)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as place:
        large = write_random_model(QWEN3_8B, Path(place) / "model", dtype=dtype) if is_on_gpu else folder
        release()
        rounded = _round(large, Path(place) / "rounded", lora, device=device, dtype=dtype)
        steps = {}
        for way, quantize in WAYS.items():
            rows, steps[way] = _train(
                way, quantize, rounded, lora, device=device, dtype=dtype, tokens=tokens, length=length, turns=turns
            )
            release()
            yield rows
        yield [Row("step in 4 bits ÷ whole", steps["in 4 bits"] / steps["whole"], "ratio")]
        if is_on_gpu:
            rounded = _round(folder, Path(place) / "small", lora, device=device, dtype=dtype)
        rollouts = sample(load_model(rounded, device=device, dtype=dtype, lora=lora), judged)
        release()
        for way, quantize in WAYS.items():
            trainer = _trainer(quantize, rounded, lora, device=device, dtype=dtype, tokens=tokens)
            again = trainer.forward(make_batch(rollouts, advantages=[0.0] * len(rollouts)))
            yield [Row(f"trainer {way}: {name}", found, "nats") for name, found in compare(rollouts, again).items()]
            del trainer
            release()


def _round(source: str, target: Path, lora: LoraSettings, *, device: str, dtype: str) -> str:
    started = time.perf_counter()
    model = load_plain(source, dtype=dtype)
    round_weights(model, lora, device=device)
    model.save_pretrained(target)
    load_tokenizer(source).save_pretrained(target)
    say(f"rounded, {time.perf_counter() - started:.1f} s with loading and saving")
    release()
    return str(target)


def _recipe(quantize: str, folder: str, lora: LoraSettings, *, device: str, dtype: str, tokens: int) -> Any:  # noqa: ANN401
    return make_recipe(
        {
            "device": device,
            "model": {"path": folder, "dtype": dtype, "context": tokens},
            "lora": {"rank": lora.rank, "alpha": lora.alpha, "quantize": quantize},
            "train": {"micro_batch_tokens": tokens},
            "sampling": {"max_tokens": tokens // 2},
        }
    )


def _trainer(quantize: str, folder: str, lora: LoraSettings, *, device: str, dtype: str, tokens: int) -> DeviceTrainer:
    recipe = _recipe(quantize, folder, lora, device=device, dtype=dtype, tokens=tokens)
    return build_trainer(recipe, folder, device=device)


def _train(
    way: str, quantize: str, folder: str, lora: LoraSettings, *, device: str, dtype: str, tokens: int, length: int, turns: int
) -> tuple[list[Row], float]:
    """Steps of two full passes. Memory is that of torch on a GPU, without what publishing adds."""
    before, started = held_bytes(device), time.perf_counter()
    trainer = _trainer(quantize, folder, lora, device=device, dtype=dtype, tokens=tokens)
    config = load_config(folder)
    rollouts = make_rollouts([length] * (2 * (tokens // length)), prompt_tokens=length // 5, vocabulary=config.vocab_size)
    advantages = np.random.default_rng(0).choice([-1.0, 1.0], size=len(rollouts)).tolist()
    batch = make_batch(rollouts, advantages=advantages)

    def step() -> None:
        trainer.forward_backward(batch)
        trainer.optim_step(LEARNING_RATE)

    say(f"{way}: loaded in {time.perf_counter() - started:.1f} s; first step {seconds_of(step, device):.1f} s")
    held = held_bytes(device) - before
    peak = held + peak_bytes(step, device)
    seconds = statistics.median(seconds_of(step, device) for _ in range(2 * turns + 1))
    recipe = _recipe(quantize, folder, lora, device=device, dtype=dtype, tokens=tokens)
    predicted = forecast_memory(recipe, ModelShape.of(config), context=tokens, longest_prompt=tokens // 2).trainer
    expected = predicted.total - predicted.process - predicted.publishing
    return [
        Row(f"{way}: peak memory of the trainer", peak / GIB, "GiB"),
        Row(f"{way}: predicted", expected / GIB, "GiB"),
        Row(f"{way}: held between steps", held / GIB, "GiB"),
        Row(f"{way}: step", seconds, "s"),
        Row(f"{way}: tokens", sum(map(len, rollouts)) / seconds, "tokens/s"),
    ], seconds
