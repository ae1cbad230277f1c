"""What the trainer's benchmark trains: rollouts without an engine, batches of them, and the trainer itself."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.engine_loads import QWEN3_0_6B
from headrace.config import make_recipe
from headrace.launch import build_trainer
from headrace.model import load_config, num_rows, plan_passes
from headrace.records import Batch, Call, FinishReason, Rollout, Sampling
from headrace.trainer import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from headrace.records import Array
    from headrace.trainer import DeviceTrainer

GPU_SHAPE = QWEN3_0_6B
CPU_SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
LEARNING_RATE = 0.0
"""Of every step that is measured: the same arithmetic, and weights that stay what they are, so that all turns do the same work
and gradients can be compared after any of them."""


def make_trainer(folder: str, *, dtype: str, device: str, micro_batch_tokens: int) -> DeviceTrainer:
    """As a run would build it: the one place that knows how."""
    recipe = make_recipe(
        {
            "device": device,
            "model": {"path": folder, "dtype": dtype},
            "train": {"micro_batch_tokens": micro_batch_tokens},
        }
    )
    return build_trainer(recipe, folder, device=device)


def predicted_peak(folder: str, *, tokens: int, dtype: str, device: str) -> int | None:
    """Bytes that the trainer's own model of its memory expects of a step, the bare process apart; None where there is none."""
    if importlib.util.find_spec("headrace.trainer.memory_prediction") is None:
        return None
    memory: Any = importlib.import_module("headrace.trainer.memory_prediction")
    sizes: Any = importlib.import_module("headrace.model.shape")
    settings = TrainSettings(micro_batch_tokens=tokens)
    shape = sizes.ModelShape.of(load_config(folder))
    found = memory.predict_memory(shape, settings, dtype=dtype, tokens=tokens, on_gpu=device != "cpu")
    return int(found.total - found.process)


def pass_sizes(rollouts: Sequence[Rollout], *, budget: int) -> list[int]:
    """Tokens of each pass that the trainer would make of these rollouts."""
    lengths = [len(rollout) for rollout in rollouts]
    return [sum(num_rows(unit, lengths) for unit in units) for units in plan_passes(rollouts, budget=budget)]


def gradient_of(trainer: DeviceTrainer) -> dict[str, torch.Tensor]:
    """What the trainer holds after `forward_backward`, by the names that transformers gives."""
    return {name: trainer.optimizer.gradient(name).clone() for name, _ in trainer.model.named_parameters()}


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of two gradients, over all weights, as a share of the second's norm."""
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"gradients of different weights: {sorted(ours.keys() ^ theirs.keys())[:3]} …")
    apart = sum(float((ours[name].float() - theirs[name].float()).square().sum()) for name in theirs)
    whole = sum(float(gradient.float().square().sum()) for gradient in theirs.values())
    return float(np.sqrt(apart / whole))


def make_rollouts(lengths: Sequence[int], *, prompt_tokens: int, vocabulary: int, seed: int = 0) -> list[Rollout]:
    """Random tokens in rollouts of these lengths, the prompt's included; all after the prompt are trained."""
    random = np.random.default_rng(seed)
    rollouts = []
    for number, length in enumerate(lengths):
        token_ids = random.integers(1, vocabulary, size=length).astype(np.int32)
        drawn = length - prompt_tokens
        call = Call(
            start=prompt_tokens,
            stop=length,
            engine="made up",
            sampling=Sampling(max_tokens=drawn),
            finish_reason=FinishReason.LENGTH,
            started=0.0,
            finished=0.0,
        )
        rollouts.append(
            Rollout.from_prompt(token_ids[:prompt_tokens], id=f"r{number}").extend(
                call,
                token_ids=token_ids[prompt_tokens:],
                logprobs=np.full(drawn, -np.log(vocabulary), dtype=np.float32),
                versions=np.zeros(drawn, dtype=np.int32),
                policy="policy",
                lineage="",
            )
        )
    return rollouts


def make_batch(trainer: DeviceTrainer, rollouts: Sequence[Rollout], *, advantages: Sequence[float]) -> Batch:
    """GRPO on rollouts as if they were drawn by the trainer's own weights: all ratios are 1, and none is clipped."""
    drawn = trainer.forward(_batch(rollouts, advantages))
    pairs = zip(rollouts, drawn, strict=True)
    return _batch([rollout.replace(logprobs=np.minimum(logprobs, 0)) for rollout, logprobs in pairs], advantages)


def _batch(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> Batch:
    mask: Array = np.concatenate([rollout.loss_mask for rollout in rollouts])
    values = np.repeat(np.asarray(advantages, dtype=np.float32), [len(rollout) for rollout in rollouts])
    return Batch.from_columns(
        rollouts,
        advantages=np.where(mask, values, np.float32(0)),
        weights=mask.astype(np.float32) / np.float32(np.count_nonzero(mask)),
        loss="grpo",
        version=0,
    )
