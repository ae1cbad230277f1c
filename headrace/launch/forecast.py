"""Predicts a run's memory. `headrace doctor` reports it, and a run compares it with its real peak."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.engine import blocks_for, engine_kind, free_memory
from headrace.launch.placement import choose_device, choose_transport, device_of
from headrace.model import ModelError
from headrace.settings import ConfigError
from headrace.staleness import max_untrained_groups
from headrace.sync import transport_class
from headrace.trainer import TrainerMemory, predict_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.engine import EngineMemory
    from headrace.envs import PromptEncoder
    from headrace.model import ModelShape
    from headrace.records import Plain

    Task = dict[str, Plain]

NUM_CHECKED_PROMPTS = 64
"""Prompts measured of the training tasks and of each held-out source, to estimate the longest."""
_FEWEST_ROLLOUTS = 16
"""The KV cache has room for at least this many, so that a prompt much longer than those measured still fits."""


@dataclass(frozen=True)
class Forecast:
    """Predicted memory of one run, in bytes."""

    trainer: TrainerMemory
    engine: EngineMemory
    exported: int
    """Published weights in memory allocated by the driver, outside torch."""
    is_one_process: bool
    sleep: str
    mapped: int = 0
    """Published weights mapped into an engine's process; on a CPU they count towards its size."""
    server: int = 0
    """Memory of the vLLM server behind an engine's process, on the same device."""
    most_blocks: int = 0
    """The most KV blocks an engine can use at once; 0 if unknown."""

    @property
    def trainer_process(self) -> int:
        """Size of the trainer's process; inline, it includes the engine."""
        together = self.engine.total - self.engine.process if self.is_one_process else 0
        return self.trainer.total + together

    @property
    def engine_process(self) -> int:
        """Size of the engine's process, without any server behind it."""
        return self.trainer_process if self.is_one_process else self.engine.total + self.mapped

    def together(self, num_engines: int) -> int:
        """Trainer and engines on one device: the larger of training (engines may sleep) and generating."""
        beside = self.server - (self.trainer.process if self.is_one_process else 0)
        training = self.trainer.total + num_engines * (self.engine.asleep(self.sleep) + beside)
        generating = self.trainer.resident + num_engines * (self.engine.total + beside)
        return self.exported + max(training, generating)


def forecast(
    recipe: Recipe,
    shape: ModelShape,
    *,
    context: int,
    longest_prompt: int,
    on_gpu: bool,
    transport: str,
    free: int,
    most_blocks: int = 0,
    num_parameters: int = 0,
    total: int = 0,
) -> Forecast:
    """`context`: tokens a rollout may have at most; `free`: bytes free when the engine starts; `most_blocks`: from
    `max_kv_blocks`; `total`: bytes of a vLLM server's GPU."""
    dtype = recipe.model.dtype
    engine, server = engine_kind(recipe.engine).predict_memory(
        recipe, shape, context=context, free=free, most_blocks=most_blocks, on_gpu=on_gpu, total=total
    )
    published = transport_class(transport).memory(engine.weights, on_gpu=on_gpu)
    longest = min(context, longest_prompt + recipe.sampling.max_tokens)
    trainer = predict_memory(
        shape,
        recipe.train,
        dtype=dtype,
        tokens=tokens_per_pass(recipe, longest=longest),
        on_gpu=on_gpu,
        num_parameters=num_parameters,
        num_references=bool(recipe.train.kl) + bool(recipe.train.teacher),
        publishing=published.trainer,
    )
    return Forecast(
        trainer=trainer,
        engine=engine,
        exported=published.exported,
        is_one_process=recipe.is_inline,
        sleep=recipe.engine.sleep,
        mapped=published.engine,
        server=server,
        most_blocks=most_blocks,
    )


def forecast_here(
    recipe: Recipe,
    shape: ModelShape,
    *,
    context: int,
    longest_prompt: int,
    num_held_out: int,
    num_parameters: int = 0,
    is_single_turn: bool = True,
) -> Forecast:
    """`forecast` for this machine. A user's environment may use any number of turns and rollouts, so that only the slots limit
    the KV cache."""
    sizes, device = {"context": context, "longest_prompt": longest_prompt}, choose_device(recipe)
    return forecast(
        recipe,
        shape,
        **sizes,
        on_gpu=device == "cuda",
        transport=choose_transport(recipe),
        free=free_memory(torch.device(device_of(device, "engine"))),
        most_blocks=max_kv_blocks(recipe, **sizes, num_held_out=num_held_out) if is_single_turn else 0,
        num_parameters=num_parameters,
        total=torch.cuda.mem_get_info()[1] if device == "cuda" else 0,
    )


def max_kv_blocks(recipe: Recipe, *, context: int, longest_prompt: int, num_held_out: int) -> int:
    """The most KV blocks an engine can use at once (0: no prompt is known): within its slots, for its share of the rollouts the
    gate admits plus an evaluation, each as long as the longest prompt seen plus `sampling.max_tokens`, with some headroom."""
    if not longest_prompt:
        return 0
    engine, longest = recipe.engine, min(context, longest_prompt + recipe.sampling.max_tokens)
    least = math.ceil(longest / engine.block_size) + 1
    if 0 < engine.kv_blocks < least:
        raise ConfigError(
            f"engine.kv_blocks = {engine.kv_blocks}: one rollout of {longest} tokens (longest prompt {longest_prompt} + "
            f"sampling.max_tokens {recipe.sampling.max_tokens}) needs {least}; raise it, or leave it 0"
        )
    groups = max_untrained_groups(recipe) or engine.slots * recipe.engine.num_engines
    in_flight = groups * recipe.train.group_size + 2 * num_held_out  # each evaluation task is sampled and decoded greedily
    rollouts = max(_FEWEST_ROLLOUTS, min(engine.slots, math.ceil(in_flight / recipe.engine.num_engines)))
    return min(
        blocks_for(rollouts, tokens=longest, block_size=engine.block_size),
        blocks_for(engine.slots, tokens=context, block_size=engine.block_size),
    )


def tokens_per_pass(recipe: Recipe, *, longest: int) -> int:
    """Tokens in the largest forward pass: `train.micro_batch_tokens`, unless a step has fewer or a rollout more."""
    rollouts = math.ceil(recipe.train.groups_per_batch / recipe.train.mini_batches) * recipe.train.group_size
    return max(longest, min(recipe.train.micro_batch_tokens, rollouts * longest))


def longest_prompt(rows: Iterable[Task], encoder: PromptEncoder, *, held_out: Mapping[str, Sequence[Task]]) -> int:
    """Tokens in the longest of these prompts and the first held-out ones. A prompt that cannot be encoded fails when used."""
    lengths = []
    for row in itertools.chain(rows, *(source[:NUM_CHECKED_PROMPTS] for source in held_out.values())):
        prompt: Any = row["prompt"]
        try:
            lengths.append(len(encoder.encode(prompt)))
        except Exception:  # noqa: BLE001  (a template may raise anything)
            continue
    return max(lengths, default=0)


def count_parameters(folder: Path) -> int:
    """From the folder's safetensors headers; 0 if there are none."""
    count = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                names = opened.keys()
                count += sum(math.prod(opened.get_slice(name).get_shape()) for name in names)
        except SafetensorError as error:
            raise ModelError(f"{file}: not a whole safetensors file ({error})") from error
    return count
