"""The recipe's `[sync]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.settings import check
from headrace.sync.table import PAYLOADS, TRANSPORTS

if TYPE_CHECKING:
    PayloadName: TypeAlias = str
    TransportName: TypeAlias = str
else:
    PayloadName = Literal[tuple(PAYLOADS)]
    TransportName = Literal[("auto", *TRANSPORTS)]


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """How weights reach the engines."""

    payload: PayloadName = "full"
    """`full`: all weights. `delta`: what has changed since the version that the engines hold, without loss; a hundredth of the
    bytes at RL's learning rates, for the time it takes to find."""
    transport: TransportName = "auto"
    """`memory`: inside one process. `shared_memory`: between processes of one host. `cuda_ipc`: between processes that share a
    GPU. `collective`: NCCL or gloo. `files`: any shared filesystem. `http`: anywhere, relayed from engine to engine.
    `shared_memory+http`, `cuda_ipc+http`: the first to engines on this host, http to those on others. `auto`: memory in one
    process, cuda_ipc where trainer and engine share the only GPU, otherwise shared_memory; with http if engines may join from
    other hosts (cluster.listen), http alone if Ray places them all."""
    folder: str = ""
    """Where shared memory and files lie; empty means /dev/shm."""
    host: str = "127.0.0.1"
    """The address that `collective`, `http` and engine.vllm.handover = "nccl" listen on."""
    deadline: float = 60.0
    """Seconds without progress after which an update is aborted and sent again."""
    patience: float = 5.0
    """How many seconds updated engines wait for slow ones, which then get no new work until they catch up."""
    canary_limit: float = 0.0
    """The run stops when engine and trainer, holding the same version, differ by more than this on a fixed prompt (mean
    |Δ logprob| per token); 0 takes 0.01 in float32, 0.3 in bfloat16 and 0.1 in float16."""

    def __post_init__(self) -> None:
        check(self.canary_limit >= 0, "canary_limit", self.canary_limit, "≥ 0")
        check(0 < self.deadline < math.inf, "deadline", self.deadline, "a number above 0")
        check(0 <= self.patience < math.inf, "patience", self.patience, "a number ≥ 0")

    def canary_limit_for(self, dtype: str) -> float:
        """`canary_limit`, with 0 resolved for a `model.dtype`."""
        return self.canary_limit or {"float32": 0.01, "bfloat16": 0.3, "float16": 0.1}[dtype]
