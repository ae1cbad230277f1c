"""How much memory an engine takes, predicted from the model's sizes and the settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.engine.settings import EngineSettings
    from headrace.model import ModelShape

MEMORY_SHARE = 0.4
"""The most an automatic KV cache takes of the memory that is free once the weights are loaded; the rest is for the trainer
and for computing."""
_MAX_PROMPT_TOKENS = 8192
"""Computed in one step next to the decoding."""
_STEP_BYTES = {"hidden": 12, "intermediate": 6, "routed_hidden": 6, "routed_intermediate": 6}
"""Temporaries of a step, per prompt token and number of each width."""
_LOGIT_COPIES = 3
"""float32, of the rows that are sampled from."""
_PROCESS_BYTES = 500_000_000
"""Of a process before it has a model; counted on a CPU, where the process's own size is what is measured."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes at the peak."""

    weights: int
    staging: int
    """New weights are received next to those that run: as much again."""
    cache: int
    """Keys and values."""
    steps: int
    """Temporaries of a step."""
    process: int
    """Of a CPU's process before it has a model."""

    @property
    def total(self) -> int:
        return self.weights + self.staging + self.cache + self.steps + self.process

    def asleep(self, sleep: str) -> int:
        """What it still takes while it sleeps (`engine.sleep`)."""
        kept = self.steps + self.process
        return {"never": self.total, "cache": self.total - self.cache, "weights": kept}[sleep]


def blocks_for(rollouts: int, *, tokens: int, block_size: int) -> int:
    """KV blocks with which so many rollouts of so many tokens run at once and none is retracted: their own, those that must be
    free for the scheduler to admit another, and the scratch block."""
    return rollouts * math.ceil(tokens / block_size) + rollouts // 4 + 2


def predict_engine_memory(
    shape: ModelShape,
    settings: EngineSettings,
    *,
    dtype: str,
    context: int,
    free: int,
    most_blocks: int = 0,
    on_gpu: bool = True,
) -> EngineMemory:
    """`free`: bytes free when the engine starts; `most_blocks`: KV blocks that can be in use, where that is known."""
    width = 2 if dtype == "bfloat16" else 4
    weights = width * shape.matrices + 4 * shape.vectors
    block = settings.block_size * shape.cached_numbers * width
    fitting = int(MEMORY_SHARE * max(0, free - weights)) // max(block, 1)
    usable = most_blocks or settings.slots * math.ceil(context / settings.block_size) + 1
    blocks = settings.kv_blocks or min(usable, fitting)
    widths = shape.widths()
    prompts = min(_MAX_PROMPT_TOKENS, settings.slots * context)
    temporaries = prompts * sum(widths[name] * each for name, each in _STEP_BYTES.items())
    return EngineMemory(
        weights=weights,
        staging=weights,
        cache=blocks * block,
        steps=int(temporaries + settings.slots * shape.vocabulary * 4 * _LOGIT_COPIES),
        process=0 if on_gpu else _PROCESS_BYTES,
    )
