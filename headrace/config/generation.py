"""What is generated, and by what: the model, its tasks and rewards, sampling, the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.config.check import check
from headrace.config.vllm import VllmSettings
from headrace.settings import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The policy."""

    path: str = "builtin:tiny"
    """A Hugging Face folder or hub name, or `builtin:tiny`: a character-level Qwen3 made from scratch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation, in the engine and in the trainer."""
    context: int = 0
    """The most tokens a rollout may have; 0 takes the model's own limit."""
    hidden_size: int = 96
    """Width of `builtin:tiny`."""
    num_layers: int = 2
    """Depth of `builtin:tiny`."""
    num_heads: int = 3
    """Attention heads of `builtin:tiny`."""

    def __post_init__(self) -> None:
        check(self.context >= 0, "context", self.context, "≥ 0")
        for name in ("hidden_size", "num_layers", "num_heads"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """One source of tasks; several are mixed by weight."""

    source: str
    """`builtin:NAME`, `reasoning_gym:NAME`, or a JSONL or parquet file with a `prompt` column (text or chat messages)."""
    weight: float = 1.0
    """Its share of the mix, against the other sources' weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of a built-in task, such as max_length, or of a reasoning-gym one: instruction, examples and its generator's own."""

    def __post_init__(self) -> None:
        check(0 < self.weight < math.inf, "weight", self.weight, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class WarmupSettings:
    """Supervised steps before RL on tasks that have an `answer` column; the result is cached."""

    steps: int = 0
    """At most this many; 0 leaves the model as it is."""
    batch: int = 64
    """Examples a step."""
    learning_rate: float = 1e-3
    """Of AdamW, constant after a short rise."""
    until_success: float = 1.0
    """Stop once this share of the run's tasks is solved at temperature 1. Judged on training tasks, never held-out ones."""
    check_every: int = 20
    """Steps between two such checks."""
    tasks: tuple[TaskSettings, ...] = ()
    """What the demonstrations are of; empty takes the run's own tasks."""

    def __post_init__(self) -> None:
        check(self.steps >= 0, "steps", self.steps, "≥ 0")
        check(self.batch >= 1, "batch", self.batch, "≥ 1")
        check(self.check_every >= 1, "check_every", self.check_every, "≥ 1")
        check(0 < self.until_success <= 1, "until_success", self.until_success, "a share above 0, at most 1")
        check(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """What is good."""

    functions: tuple[str, ...] = ()
    """`module:name` or `file.py:name` of each reward function; empty takes the one that comes with the task."""
    weights: tuple[float, ...] = ()
    """One per function; empty weighs each 1."""
    timeout: float = 300.0
    """Seconds one call of a reward may take; later counts as failed. `inline` cannot interrupt a plain function."""
    workers: int = 1
    """Threads that call plain rewards. With more than one, calls overlap and a reward must bear that; `inline` has none."""
    attempts: int = 2
    """How often a reward that raises is asked before its rollouts are counted as failed."""
    max_failures: int = 64
    """Rollouts whose reward failed one after another before the run stops and shows the error."""

    def __post_init__(self) -> None:
        if self.weights and self.functions and len(self.weights) != len(self.functions):
            raise ConfigError(f"weights = {list(self.weights)}: {len(self.functions)} functions need as many weights")
        check(self.attempts >= 1, "attempts", self.attempts, "≥ 1")
        check(0 < self.timeout < math.inf, "timeout", self.timeout, "a number above 0")
        check(self.workers >= 1, "workers", self.workers, "≥ 1")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How training rollouts are drawn."""

    temperature: float = 1.0
    """Above 0: a greedy policy explores nothing. The trainer applies the same temperature."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all. Any cut-off is recorded and replayed by the trainer."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens that holds this much probability."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    max_tokens: int = 256
    """At most this many new tokens."""
    min_tokens: int = 0
    """No stop token before this many."""
    stop: tuple[str, ...] = ()
    """Texts that end a rollout, besides the model's own stop tokens. Looked for in the text that rewards see, which has no
    special tokens in it; the text of one such token, alone, stands for the token itself."""

    def __post_init__(self) -> None:
        check(0 < self.temperature < math.inf, "temperature", self.temperature, "a number above 0 to train")
        check(self.top_k >= 0, "top_k", self.top_k, "≥ 0")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        check(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)")
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "≥ 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "between 0 and max_tokens")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What generates."""

    kind: Literal["native", "vllm"] = "native"
    """`native`: the embedded engine, which runs the trainer's own model code. `vllm`: a stock vLLM server over HTTP, for models
    past one GPU."""
    count: int = 1
    """Engine processes, each with slots of its own."""
    threads: int = 0
    """Of torch on CPU in each engine; 0 takes `threads`."""
    restarts: int = 3
    """How often in a run an engine that died or stopped answering is started again."""
    slots: int = 256
    """Rollouts decoded at once, by each engine."""
    block_size: int = 16
    """Tokens in a KV block; exact mode needs 16."""
    kv_blocks: int = 0
    """KV blocks in all; 0 takes what the rollouts that can be in flight need (the longest of the first prompts and
    `sampling.max_tokens`), within 40 % of the free memory. Where they come to need more, those admitted last are retracted and
    go on later."""
    graphs: bool = True
    """On a GPU: compile the model's layers and capture steps as CUDA graphs, beside serving. False serves eagerly."""
    sleep: Literal["never", "cache", "weights"] = "never"
    """In a synchronous run, what engines give back while the trainer trains, for both to have one GPU in turns: `cache` the KV
    cache's memory, `weights` that of the weights too."""
    vllm: VllmSettings = field(default_factory=VllmSettings)

    def __post_init__(self) -> None:
        check(self.count >= 1, "count", self.count, "≥ 1")
        check(self.threads >= 0, "threads", self.threads, "≥ 0")
        check(self.restarts >= 0, "restarts", self.restarts, "≥ 0")
        check(self.slots >= 1, "slots", self.slots, "≥ 1")
        check(self.block_size >= 1, "block_size", self.block_size, "≥ 1")
        num_servers = len(self.vllm.urls)
        if num_servers and self.count not in (1, num_servers):
            names = f"engine.vllm.urls names {num_servers} server(s), one engine each"
            raise ConfigError(f"count = {self.count}: {names}; leave it 1 or set it to {num_servers}")
