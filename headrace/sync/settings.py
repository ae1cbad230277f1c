"""The recipe's `[sync]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.settings import check
from headrace.sync.table import PAYLOADS, TRANSPORTS

if TYPE_CHECKING:
    PayloadName = TransportName = str
else:
    PayloadName = Literal[tuple(PAYLOADS)]
    TransportName = Literal[("auto", *TRANSPORTS)]


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """How weights reach the engines."""

    payload: PayloadName = "full"
    """`full`: all weights. `delta`: what has changed since the version the engines hold, without loss; a hundredth of the
    bytes at RL's learning rates, for the time to find it."""
    transport: TransportName = "auto"
    """`memory`: inside one process. `shared_memory`: between processes of one host. `cuda_ipc`: between processes that share a
    GPU. `collective`: NCCL or gloo. `files`: any shared filesystem. `http`: anywhere, relayed from engine to engine. `auto`:
    memory in one process, cuda_ipc where trainer and engine share the only GPU, otherwise shared_memory."""
    folder: str = ""
    """Where shared memory or files lie; empty takes /dev/shm."""
    host: str = "127.0.0.1"
    """The address that `collective` and `http` listen on, and engine.vllm.handover = "nccl"."""
    deadline: float = 60.0
    """Seconds an update may go without progress before it is given up and sent again."""
    patience: float = 5.0
    """Seconds that engines which hold an update wait for slower ones to hold it; those then begin nothing new until they do."""
    canary_limit: float = 0.0
    """The run stops when engine and trainer, holding the same version, differ by more than this on a fixed prompt (mean
    |Δ logprob| per token); 0 takes 0.01 in float32 and 0.3 in bfloat16."""

    def __post_init__(self) -> None:
        check(self.canary_limit >= 0, "canary_limit", self.canary_limit, "≥ 0")
        check(0 < self.deadline < math.inf, "deadline", self.deadline, "a number above 0")
        check(0 <= self.patience < math.inf, "patience", self.patience, "a number ≥ 0")

    def canary_limit_for(self, dtype: str) -> float:
        """`canary_limit`, with 0 resolved for a `model.dtype`."""
        return self.canary_limit or {"float32": 0.01, "bfloat16": 0.3}[dtype]
