"""How much memory an engine takes, predicted from the model's sizes and the settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.model import bytes_per_number

if TYPE_CHECKING:
    from headrace.engine.settings import EngineSettings
    from headrace.model import ModelShape
    from headrace.partial import PartialSettings

ADAPTER_PLACES = 8
"""Versions of an adapter that a GPU holds for the rows of a step, where rollouts keep theirs."""
MEMORY_SHARE = 0.4
"""The most an automatic KV cache takes of the memory left after the weights; the rest is for the trainer and for computing."""
_MAX_PROMPT_TOKENS = 8192  # computed in one step, next to the decoding
_STEP_BYTES = {"hidden": 12, "intermediate": 6, "routed_hidden": 6, "routed_intermediate": 6}
"""Temporaries of a step: bytes per prompt token and number of each width."""
_LOGIT_COPIES = 3  # float32, of the rows that are sampled from
_PROCESS_BYTES = 500_000_000  # of a process without a model; counted on a CPU, where the size of the whole process is measured


@dataclass(frozen=True)
class EngineMemory:
    """Bytes at the peak."""

    weights: int
    staging: int  # new weights are received beside the running ones: as much again
    cache: int  # keys and values, and recorded routing
    steps: int  # temporaries of a step
    process: int  # of a CPU process before it has a model
    host: int = 0  # besides, of the host's memory, if the engine is on a GPU

    @property
    def total(self) -> int:
        return self.weights + self.staging + self.cache + self.steps + self.process

    def asleep(self, sleep: str) -> int:
        """What the engine still takes while it sleeps (`engine.sleep`)."""
        kept = self.steps + self.process
        return {"never": self.total, "cache": self.total - self.cache, "weights": kept}[sleep]


def adapter_places(partial: PartialSettings) -> int:
    """Versions of an adapter that a run's engines hold at first; more are made room for when rollouts keep more."""
    return ADAPTER_PLACES if partial.leases else 1


def blocks_for(rollouts: int, *, tokens: int, block_size: int) -> int:
    """KV blocks with which `rollouts` of `tokens` each run at once without a retraction: their own, those the scheduler keeps
    free when it admits another, and the scratch block."""
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
    """`free`: bytes free when the engine starts; `most_blocks`: KV blocks that can be in use, 0 if unknown."""
    width = bytes_per_number(dtype)
    weights = width * shape.matrices + 4 * shape.vectors
    routing = shape.routing_bytes if settings.record_routing else 0
    block = settings.block_size * (shape.cached_numbers * width + routing)
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
