"""How much memory a run will take. The doctor reports it, and a run compares it with what it really took."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.engine import blocks_for, engine_kind, free_memory
from headrace.launch.placement import choose_device, choose_transport, place_of
from headrace.settings import ConfigError
from headrace.staleness import max_untrained_groups
from headrace.sync import transport_class
from headrace.trainer import TrainerMemory, predict_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headrace.config import Recipe
    from headrace.engine import EngineMemory
    from headrace.envs import PromptEncoder
    from headrace.model import ModelShape
    from headrace.records import Plain

    Task = dict[str, Plain]

LOOKED_AT = 64
"""Tasks whose prompts stand for all of their kind: the first of training, and of each held-out source."""
_FEWEST_ROLLOUTS = 16
"""That the KV cache has room for, however few the slots: a prompt much longer than those looked at fits too, though others may
have to wait."""


@dataclass(frozen=True)
class Forecast:
    """The memory of one run, in bytes."""

    trainer: TrainerMemory
    engine: EngineMemory
    exported: int
    """Weights published in memory that the driver allocates, outside torch's."""
    is_one_process: bool
    sleep: str
    """`engine.sleep`."""
    mapped: int = 0
    """Published weights mapped into an engine's process: on a CPU they count towards its size."""
    server: int = 0
    """What the vLLM server behind an engine's process takes, of the same memory."""

    @property
    def trainer_process(self) -> int:
        """The size of the trainer's process, which inline is the engine's too."""
        together = self.engine.total - self.engine.process if self.is_one_process else 0
        return self.trainer.total + together

    @property
    def engine_process(self) -> int:
        """The size of the engine's process, without a server behind it."""
        return self.trainer_process if self.is_one_process else self.engine.total + self.mapped

    def together(self, num_engines: int) -> int:
        """Trainer and engines in the same memory: the larger of training, where engines may sleep, and generating."""
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
    """`context`: the most tokens a rollout may have; `free`: the memory there is when the engine begins; `most_blocks`: what
    `most_kv_blocks` gives; `total`: of the GPU of a vLLM server."""
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
    )


def forecast_here(
    recipe: Recipe,
    shape: ModelShape,
    *,
    context: int,
    longest_prompt: int,
    free: int,
    most_blocks: int = 0,
    num_parameters: int = 0,
) -> Forecast:
    """On this machine."""
    return forecast(
        recipe,
        shape,
        context=context,
        longest_prompt=longest_prompt,
        on_gpu=choose_device(recipe) == "cuda",
        transport=choose_transport(recipe),
        free=free,
        most_blocks=most_blocks,
        num_parameters=num_parameters,
        total=torch.cuda.mem_get_info()[1] if choose_device(recipe) == "cuda" else 0,
    )


def most_kv_blocks(recipe: Recipe, *, context: int, longest_prompt: int, num_held_out: int) -> int:
    """The most KV blocks an engine can use at once: for its share of what the gate lets be in flight and of an evaluation at
    the same time, within its slots, each rollout as long as the longest prompt seen plus `sampling.max_tokens`, with some room
    for longer ones. 0 where no prompt is known."""
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
    in_flight = groups * recipe.train.group_size + 2 * num_held_out  # an evaluation samples each task, and decodes it greedily
    rollouts = max(_FEWEST_ROLLOUTS, min(engine.slots, math.ceil(in_flight / recipe.engine.num_engines)))
    return min(
        blocks_for(rollouts, tokens=longest, block_size=engine.block_size),
        blocks_for(engine.slots, tokens=context, block_size=engine.block_size),
    )


def free_here(recipe: Recipe) -> int:
    """Free bytes of the memory that an engine takes its KV cache from."""
    return free_memory(torch.device(place_of(choose_device(recipe), "engine")))


def tokens_per_pass(recipe: Recipe, *, longest: int) -> int:
    """Tokens of the largest forward pass: `train.micro_batch_tokens`, unless a step has fewer or a rollout more."""
    rollouts = math.ceil(recipe.train.groups_per_batch / recipe.train.mini_batches) * recipe.train.group_size
    return max(longest, min(recipe.train.micro_batch_tokens, rollouts * longest))


def longest_prompt(rows: Iterable[Task], encoder: PromptEncoder, *, held_out: Mapping[str, Sequence[Task]]) -> int:
    """Tokens of the longest of these prompts and the first of each held-out source. One that cannot be encoded is reported when
    it is used."""
    lengths = []
    for row in itertools.chain(rows, *(source[:LOOKED_AT] for source in held_out.values())):
        prompt: Any = row["prompt"]
        try:
            lengths.append(len(encoder.encode(prompt)))
        except Exception:  # noqa: BLE001  (a template raises what it likes)
            continue
    return max(lengths, default=0)
