"""The recipe: every setting of a run, one frozen section per room, and the checks that need two rooms at once."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.settings import ConfigError, Origin, apply_overrides, build, load_toml, to_dict

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        _check(self.context >= 0, "context", self.context, "≥ 0")
        for name in ("hidden_size", "num_layers", "num_heads"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")


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
        _check(0 < self.weight < math.inf, "weight", self.weight, "a number above 0")


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
        _check(self.steps >= 0, "steps", self.steps, "≥ 0")
        _check(self.batch >= 1, "batch", self.batch, "≥ 1")
        _check(self.check_every >= 1, "check_every", self.check_every, "≥ 1")
        _check(0 < self.until_success <= 1, "until_success", self.until_success, "a share above 0, at most 1")
        _check(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a number above 0")


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
        _check(self.attempts >= 1, "attempts", self.attempts, "≥ 1")
        _check(0 < self.timeout < math.inf, "timeout", self.timeout, "a number above 0")
        _check(self.workers >= 1, "workers", self.workers, "≥ 1")


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
    """Texts that end a rollout, besides the model's own stop tokens."""

    def __post_init__(self) -> None:
        _check(0 < self.temperature < math.inf, "temperature", self.temperature, "a number above 0 to train")
        _check(self.top_k >= 0, "top_k", self.top_k, "≥ 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)")
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "≥ 1")
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "between 0 and max_tokens")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What generates."""

    kind: Literal["native"] = "native"
    """`native`: the embedded engine, which runs the trainer's own model code."""
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
    """KV blocks in all; 0 takes as many as the slots can use, within 40 % of the free memory. With fewer than the running
    rollouts come to need, those admitted last are retracted and go on later."""
    graphs: bool = True
    """On a GPU: compile the model's layers and capture steps as CUDA graphs, beside serving. False serves eagerly."""
    sleep: Literal["never", "cache", "weights"] = "never"
    """In a synchronous run, what engines give back while the trainer trains, for both to have one GPU in turns: `cache` the KV
    cache's memory, `weights` that of the weights too."""

    def __post_init__(self) -> None:
        _check(self.count >= 1, "count", self.count, "≥ 1")
        _check(self.threads >= 0, "threads", self.threads, "≥ 0")
        _check(self.restarts >= 0, "restarts", self.restarts, "≥ 0")
        _check(self.slots >= 1, "slots", self.slots, "≥ 1")
        _check(self.block_size >= 1, "block_size", self.block_size, "≥ 1")


@dataclass(frozen=True, kw_only=True)
class BufferSettings:
    """Where scored groups wait for the trainer."""

    kind: Literal["auto", "synchronous", "one_ahead", "bounded", "stream"] = "auto"
    """`synchronous`: generate, train, in turn. `one_ahead`, `bounded`: at most one or `depth` batches wait. `stream`: no
    bound of its own. `auto` follows staleness.max_lag: 0 synchronous, 1 one_ahead, more bounded."""
    depth: int = 0
    """Batches that may wait in a `bounded` buffer."""
    order: Literal["completion", "submission"] = "completion"
    """`submission` trains groups in the order they were submitted, waiting for the slow ones; exact mode needs it."""


@dataclass(frozen=True, kw_only=True)
class StalenessSettings:
    """How old a token may be, and what is done about it. The three means combine freely."""

    max_lag: int = 1
    """The most versions between a token's sampling and its training; 0 is synchronous."""
    gate: bool = True
    """Submit no group that could not be trained within max_lag versions if groups were trained in order."""
    reject: bool = True
    """Drop groups with a token older than max_lag when a batch is made, and submit others instead."""
    correct: Literal["none", "tis", "mis", "sequence_tis", "sequence_mis", "geometric_tis", "geometric_mis", "opsm", "m2po"] = (
        "none"
    )
    """`none`: the loss's ratio is taken against the logprobs the engine recorded. `tis`, `mis`: it is taken against the
    policy at the start of the step, and each token weighed by the truncated or masked importance weight; `sequence_` takes
    the product over the rollout, `geometric_` its mean. `opsm`, `m2po`: as none, but rollouts or tokens too far off are left
    out."""
    cap: float = 2.0
    """Largest importance weight (tis), or the largest kept (mis)."""
    floor: float = 0.5
    """Smallest importance weight kept (mis)."""
    limit: float = 0.0
    """How far off is too far. `m2po`: the mean of the squared log ratio that the kept tokens have at most; 0 takes 0.04.
    `opsm`: the mean log ratio by which a rollout of negative advantage has become less likely; 0 takes 1e-4."""

    def __post_init__(self) -> None:
        _check(self.max_lag >= 0, "max_lag", self.max_lag, "≥ 0")
        _check(self.cap >= 1, "cap", self.cap, "≥ 1")
        _check(0 <= self.floor <= 1, "floor", self.floor, "in [0, 1]")
        _check(0 <= self.limit < math.inf, "limit", self.limit, "a number ≥ 0")
        if self.limit and self.correct not in ("opsm", "m2po"):
            raise ConfigError(f"limit = {self.limit:g}: only correct = 'opsm' and 'm2po' have a limit, not '{self.correct}'")


@dataclass(frozen=True, kw_only=True)
class PartialSettings:
    """What happens to rollouts in flight when the weights change, and to those unfinished when a batch is whole."""

    interrupt: Literal["keep", "retract", "drain", "abort"] = "keep"
    """`keep`: swap between two decode steps and go on. `retract`: swap, drop keys and values, compute each prefix again and go
    on. `drain`: finish them first. `abort`: stop them, swap, and resume each from its prefix."""
    kv: Literal["keep", "recompute"] = "keep"
    """With `keep`: whether rollouts go on over the keys and values they have, or `recompute` them, which is `retract`."""
    cancel: Literal["never", "over_age"] = "never"
    """`over_age`: give up groups in flight that hold a token too old for every batch to come, and submit others instead.
    `never`: let them finish; staleness.reject drops them then."""
    oversample: float = 1.0
    """Groups submitted for each that a batch needs. A batch is trained as soon as it is whole; the unfinished go on before
    anything new begins. In a synchronous run they are stopped, as `interrupt` says, until the new weights are held."""

    def __post_init__(self) -> None:
        _check(1 <= self.oversample < math.inf, "oversample", self.oversample, "a number ≥ 1")


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """How weights reach the engines."""

    payload: Literal["full", "delta"] = "full"
    """`full`: all weights. `delta`: what has changed since the version the engines hold, without loss; a hundredth of the
    bytes at RL's learning rates, for the time to find it."""
    transport: Literal["auto", "memory", "shared_memory", "cuda_ipc", "collective", "files", "http"] = "auto"
    """`memory`: inside one process. `shared_memory`: between processes of one host. `cuda_ipc`: between processes that share a
    GPU. `collective`: NCCL or gloo. `files`: any shared filesystem. `http`: anywhere, relayed from engine to engine. `auto`:
    memory in one process, cuda_ipc where trainer and engine share the only GPU, otherwise shared_memory."""
    folder: str = ""
    """Where shared memory or files lie; empty takes /dev/shm."""
    host: str = "127.0.0.1"
    """The address that `collective` and `http` listen on."""
    deadline: float = 60.0
    """Seconds an update may go without progress before it is given up and sent again."""
    patience: float = 5.0
    """Seconds that engines which hold an update wait for slower ones to hold it; those then begin nothing new until they do."""
    canary_limit: float = 0.0
    """The run stops when engine and trainer, holding the same version, differ by more than this on a fixed prompt (mean
    |Δ logprob| per token); 0 takes 0.01 in float32 and 0.3 in bfloat16."""

    def __post_init__(self) -> None:
        _check(self.canary_limit >= 0, "canary_limit", self.canary_limit, "≥ 0")
        _check(0 < self.deadline < math.inf, "deadline", self.deadline, "a number above 0")
        _check(0 <= self.patience < math.inf, "patience", self.patience, "a number ≥ 0")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The trainer and its algorithm."""

    threads: int = 0
    """Of torch on CPU; 0 takes `threads`."""
    batch: int = 256
    """Rollouts trained per version."""
    group_size: int = 8
    """Rollouts of one task, compared with each other."""
    mini_batches: int = 1
    """Optimizer steps per version."""
    micro_batch_tokens: int = 16384
    """Tokens in one forward pass; changes memory and speed, not the gradient."""
    recompute: Literal["none", "layers"] = "none"
    """`layers`: a pass keeps each layer's input alone, and computes the layer again when its gradient is taken: a third more
    time, a fraction of the memory."""
    offload: tuple[Literal["optimizer", "reference", "activations"], ...] = ()
    """What waits in the host's memory while the GPU does not need it: the optimizer's state, a reference model's weights, what
    a pass keeps for its gradient."""
    share_prefixes: bool = True
    """Siblings' common prompt goes through the model once for all that are in one pass; changes speed, not the gradient."""
    learning_rate: float = 1e-6
    """Of AdamW, at the top of its schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after its rise, until the last step."""
    warmup_steps: int = 0
    """Versions over which the learning rate rises."""
    final_learning_rate: float = 0.0
    """Where `linear` and `cosine` end, as a fraction of the top."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.99
    """Of AdamW."""
    weight_decay: float = 0.0
    """Of AdamW; biases and norms are spared."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    max_skipped: int = 3
    """A step whose gradient is NaN or infinite is skipped, and its rollouts are kept for `headrace inspect`. So many skipped
    one after another stop the run; 0 never does."""
    loss: str = "grpo"
    """`grpo`, `ppo`, `reinforce`, `gspo`, `cispo`, `topr`, `decoupled_ppo`, `a3po`, `dppo`, `m2po`, `aipo`, `distill`, or your
    own as `module:name` or `file.py:name`. docs/losses.md has their formulas and constants."""
    constants: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of the loss, such as clip_low and clip_high."""
    advantage: Literal["group", "group_mean", "leave_one_out", "global", "reward", "gae", "distill"] = "group"
    """`group`: (r − mean) ÷ std over the siblings. `group_mean`: r − mean (Dr. GRPO). `leave_one_out`: r − mean of the
    others (RLOO). `global`: (r − mean) ÷ std over the version's batch (REINFORCE++). `reward`: r itself. `gae`: per token, from
    the values of a loss that learns them (ppo). `distill`: per token, how much likelier the teacher finds it."""
    discount: float = 1.0
    """Of rewards one token later, for `gae`."""
    gae_lambda: float = 0.95
    """Of `gae`: 1 trusts what was rewarded, 0 the values."""
    loss_mean: Literal["token", "sequence", "constant"] = "token"
    """Each token of the batch counts the same, or each rollout does. `constant`: the sum is divided by
    batch × sampling.max_tokens, so that no length is favoured (Dr. GRPO)."""
    kl: float = 0.0
    """Weight β of the KL to the reference model, added to the loss; 0 leaves it out."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of the KL in the loss. With d = log π − log π_ref, `k1`: d, `k2`: d²/2, `k3`: exp(−d) − 1 + d."""
    kl_in_reward: bool = False
    """Take β (log μ − log π_ref) off each token's reward instead of adding the KL to the loss; needs `gae`."""
    reference: str = ""
    """A Hugging Face folder or hub name of the reference model; empty takes the weights that RL begins with."""
    teacher: str = ""
    """A Hugging Face folder or hub name of the teacher that `distill` learns from; its tokens must be the model's."""

    def __post_init__(self) -> None:
        _check(self.threads >= 0, "threads", self.threads, "≥ 0")
        fewest = self.fewest_siblings
        why = f"≥ {fewest}" + (f": advantage = '{self.advantage}' compares siblings" if fewest > 1 else "")
        _check(self.group_size >= fewest, "group_size", self.group_size, why)
        _check(self.batch >= 1, "batch", self.batch, "≥ 1")
        if self.batch % self.group_size:
            fix = f"{max(1, round(self.batch / self.group_size)) * self.group_size}"
            raise ConfigError(f"batch = {self.batch}: not a multiple of group_size = {self.group_size}; try {fix}")
        _check(self.mini_batches >= 1, "mini_batches", self.mini_batches, "≥ 1")
        groups = self.batch // self.group_size
        _check(groups >= self.mini_batches, "mini_batches", self.mini_batches, f"at most the {groups} groups of a batch")
        _check(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a number above 0")
        _check(0 <= self.beta1 < 1, "beta1", self.beta1, "in [0, 1)")
        _check(0 <= self.beta2 < 1, "beta2", self.beta2, "in [0, 1)")
        _check(0 <= self.max_grad_norm < math.inf, "max_grad_norm", self.max_grad_norm, "a number ≥ 0")
        _check(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "a number ≥ 0")
        _check(self.max_skipped >= 0, "max_skipped", self.max_skipped, "≥ 0")
        _check(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "≥ 0")
        _check(self.micro_batch_tokens >= 16, "micro_batch_tokens", self.micro_batch_tokens, "≥ 16")
        _check(len(set(self.offload)) == len(self.offload), "offload", list(self.offload), "a list that names each once")
        _check(0 <= self.discount <= 1, "discount", self.discount, "in [0, 1]")
        _check(0 <= self.gae_lambda <= 1, "gae_lambda", self.gae_lambda, "in [0, 1]")
        _check(0 <= self.kl < math.inf, "kl", self.kl, "a number ≥ 0")
        if self.kl_in_reward and not self.kl:
            raise ConfigError("kl_in_reward = true: there is no KL with kl = 0; set kl to its weight, such as 0.05")
        if self.kl_in_reward and self.advantage != "gae":
            raise ConfigError(
                f"kl_in_reward = true: advantage = '{self.advantage}' has no rewards of single tokens; set it to 'gae', or "
                f"leave kl_in_reward = false to add the KL to the loss"
            )
        if self.reference and not self.kl:
            raise ConfigError(f"reference = {self.reference!r}: it is not looked at with kl = 0; set kl to its weight")

    @property
    def fewest_siblings(self) -> int:
        """Scored rollouts that a group must have to be trained."""
        return 2 if self.advantage in ("group", "group_mean", "leave_one_out") else 1


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """Held-out evaluation, counted apart from training."""

    every: int = 0
    """Versions between evaluations; the first and last are always made if there are tasks. 0: only those two."""
    tasks: tuple[TaskSettings, ...] = ()
    """Held-out sources; built-in and reasoning-gym tasks keep held-out rows of their own."""
    limit: int = 256
    """Tasks per evaluation, the same ones each time."""
    success_at: float = 1.0
    """A rollout whose reward reaches this is a success."""

    def __post_init__(self) -> None:
        _check(self.every >= 0, "every", self.every, "≥ 0")
        _check(self.limit >= 0, "limit", self.limit, "≥ 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Hugging Face folders from which the same command resumes."""

    every: int = 50
    """Versions between checkpoints; the last version is always saved."""
    keep: int = 2
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        _check(self.every >= 1, "every", self.every, "≥ 1")
        _check(self.keep >= 1, "keep", self.keep, "≥ 1")


@dataclass(frozen=True, kw_only=True)
class ObserveSettings:
    """What a run shows and leaves behind."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Besides metrics.jsonl, which is always written."""
    keep_rollouts_every: int = 10
    """Versions between two whose rollouts are kept for `headrace inspect`; 0 keeps none."""
    trace: bool = True
    """Write trace.json."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a run is made of."""

    steps: int = 100
    """Versions to train."""
    seed: int = 0
    """Of tasks, sampling and new weights."""
    exact: bool = False
    """Engine and trainer logprobs bitwise equal at equal weights on CPU, and a resumed run bitwise the uninterrupted one."""
    orchestrate: Literal["local", "inline"] = "local"
    """`local`: engines and trainer in processes of their own. `inline`: one process, deterministic under a seed, breakpoints
    work."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    threads: int = 0
    """Of torch on CPU, in each process; 0 shares the cores among them."""
    deadline: float = 600.0
    """Seconds without a token, a score or a version after which the run stops and says what it waits for."""
    heartbeat: float = 60.0
    """Seconds a process may leave the launcher unanswered before it is named and, an engine, started again."""
    model: ModelSettings = field(default_factory=ModelSettings)
    warmup: WarmupSettings = field(default_factory=WarmupSettings)
    tasks: tuple[TaskSettings, ...] = ()
    reward: RewardSettings = field(default_factory=RewardSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    buffer: BufferSettings = field(default_factory=BufferSettings)
    staleness: StalenessSettings = field(default_factory=StalenessSettings)
    partial: PartialSettings = field(default_factory=PartialSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)

    def __post_init__(self) -> None:
        _check(self.steps >= 1, "steps", self.steps, "≥ 1")
        _check(self.seed >= 0, "seed", self.seed, "≥ 0")
        _check(self.threads >= 0, "threads", self.threads, "≥ 0")
        _check(self.deadline > 0, "deadline", self.deadline, "above 0")
        _check(self.heartbeat > 0, "heartbeat", self.heartbeat, "above 0")
        self._check_across_rooms()
        self._check_processes()

    def _check_across_rooms(self) -> None:
        buffer, lag = self.buffer, self.staleness.max_lag
        if buffer.kind == "bounded" and buffer.depth < 1:
            raise ConfigError(f"buffer.depth = {buffer.depth}: a bounded buffer holds at least 1 batch")
        if buffer.kind != "bounded" and buffer.depth:
            raise ConfigError(f"buffer.depth = {buffer.depth}: only buffer.kind = 'bounded' has a depth, not '{buffer.kind}'")
        bounded = self.staleness.gate or self.staleness.reject
        if buffer.kind == "bounded" and bounded and buffer.depth > max(lag, 1):
            raise ConfigError(
                f"buffer.depth = {buffer.depth}: a batch that waits so long lags more than staleness.max_lag = {lag}; "
                f"raise max_lag to {buffer.depth} or lower the depth"
            )
        if buffer.kind in ("one_ahead", "stream") and lag == 0 and bounded:
            raise ConfigError(f"buffer.kind = '{buffer.kind}': nothing can run ahead with staleness.max_lag = 0; set it to 1")
        self._check_correction()
        if self.exact:
            self._check_exact()
        if self.partial.cancel == "over_age":
            self._check_cancel()
        if self.partial.oversample > 1:
            self._check_oversample()
        if self.engine.sleep != "never":
            self._check_sleep()
        if self.sampling.max_tokens >= self.model.context > 0:
            raise ConfigError(
                f"sampling.max_tokens = {self.sampling.max_tokens}: leaves no room for a prompt in model.context = "
                f"{self.model.context}"
            )

    def _check_correction(self) -> None:
        """A loss that weighs by π_prox/μ itself must not be weighed by it twice."""
        loss, correct = self.train.loss, self.staleness.correct
        if loss in ("decoupled_ppo", "a3po") and correct not in ("none", "opsm", "m2po"):
            raise ConfigError(
                f"staleness.correct = '{correct}': train.loss = '{loss}' has the importance weight in it; leave it 'none'"
            )

    def _check_cancel(self) -> None:
        """It gives up what would be rejected later: where nothing could be, it cannot mean anything."""
        setting, staleness = "partial.cancel = 'over_age'", self.staleness
        if not staleness.reject:
            raise ConfigError(f"{setting}: nothing is over age with staleness.reject = false; set it to true")
        if self.exact:
            raise ConfigError(f"{setting}: what is cancelled depends on timing, which exact = true does not allow")
        if self.order == "submission" and staleness.gate:
            raise ConfigError(
                f"{setting}: trained in submission order behind the gate, no group grows older than staleness.max_lag = "
                f"{staleness.max_lag}; set buffer.order = 'completion'"
            )
        if self.buffer_kind == "synchronous" and self.partial.oversample == 1:
            raise ConfigError(f"{setting}: in a synchronous run nothing is in flight when a batch is trained; leave it 'never'")

    def _check_sleep(self) -> None:
        setting, partial = f"engine.sleep = '{self.engine.sleep}'", self.partial
        if self.buffer_kind != "synchronous":
            raise ConfigError(
                f"{setting}: engines that generate while the trainer trains cannot sleep then; set staleness.max_lag = 0 or "
                f"buffer.kind = 'synchronous', or leave it 'never'"
            )
        if self.stops_when_whole and partial.interrupt == "keep" and partial.kv == "keep":
            raise ConfigError(
                f"{setting}: with partial.oversample = {partial.oversample:g} rollouts are in flight then, and would go on "
                f"over keys and values that were given back; set partial.interrupt = 'retract' or 'abort'"
            )

    def _check_oversample(self) -> None:
        setting, staleness = f"partial.oversample = {self.partial.oversample:g}", self.staleness
        if self.exact:
            raise ConfigError(f"{setting}: which groups are trained depends on timing, which exact = true does not allow")
        if not staleness.gate and self.buffer_kind != "synchronous":
            raise ConfigError(f"{setting}: with staleness.gate = false submission is not counted by batches; set gate = true")
        if self.order == "submission":
            raise ConfigError(f"{setting}: buffer.order = 'submission' waits for the slow groups; set it to 'completion'")
        if self.partial.interrupt == "drain":
            raise ConfigError(
                f"{setting}: partial.interrupt = 'drain' waits for the unfinished; set it to 'keep', 'retract' or 'abort'"
            )
        if staleness.max_lag == 0 and staleness.reject and self.partial.cancel == "never":
            raise ConfigError(
                f"{setting}: what goes on after a batch holds tokens of an older version, and staleness.max_lag = 0 rejects "
                f"them; set max_lag to 1 with buffer.kind = 'synchronous', or give them up with partial.cancel = 'over_age'"
            )

    def _check_processes(self) -> None:
        is_local, transport = self.orchestrate == "local", self.sync.transport
        if transport != "auto" and (transport != "memory") != is_local:
            raise ConfigError(
                f"sync.transport = '{transport}': does not go with orchestrate = '{self.orchestrate}'; leave it auto"
            )
        if transport == "cuda_ipc" and self.device == "cpu":
            raise ConfigError("sync.transport = 'cuda_ipc': device = 'cpu' has no GPU memory to share; leave it auto")
        if self.engine.count > 1 and not is_local:
            raise ConfigError(f"engine.count = {self.engine.count}: orchestrate = 'inline' has one engine; set it to 'local'")

    def _check_exact(self) -> None:
        if self.device == "cuda":
            raise ConfigError("device = 'cuda': exact = true is a promise about the CPU; set device = 'cpu'")
        if self.model.dtype != "float32":
            raise ConfigError(f"model.dtype = '{self.model.dtype}': exact = true needs float32")
        if self.engine.block_size != 16:
            raise ConfigError(f"engine.block_size = {self.engine.block_size}: exact = true needs 16")
        if not self.staleness.gate and self.buffer_kind == "stream":
            raise ConfigError("staleness.gate = false: exact = true with a stream needs the gate to bound what waits")

    @property
    def buffer_kind(self) -> str:
        """`buffer.kind` with `auto` resolved."""
        if self.buffer.kind != "auto":
            return self.buffer.kind
        if not self.staleness.gate and not self.staleness.reject:
            return "stream"
        return {0: "synchronous", 1: "one_ahead"}.get(self.staleness.max_lag, "bounded")

    def threads_of(self, role: str, *, cores: int) -> int:
        """Of torch in the process of a role: what is set for it, or for all, or its share of the cores."""
        own = {"engine": self.engine.threads, "trainer": self.train.threads}.get(role, 0)
        processes = self.engine.count + 1 if self.orchestrate == "local" else 1
        return own or self.threads or max(1, cores // processes)

    @property
    def canary_limit(self) -> float:
        """`sync.canary_limit`, with 0 resolved."""
        return self.sync.canary_limit or {"float32": 0.01, "bfloat16": 0.3}[self.model.dtype]

    @property
    def correction(self) -> str:
        """`staleness.correct`; the loss `m2po` brings the mask of that name with it."""
        is_m2po = self.train.loss == "m2po" and self.staleness.correct == "none"
        return "m2po" if is_m2po else self.staleness.correct

    @property
    def correction_constants(self) -> dict[str, float]:
        """What the correction takes, with `staleness.limit = 0` resolved."""
        usual = {"m2po": 0.04, "opsm": 1e-4}
        if self.correction in usual:
            return {"limit": self.staleness.limit or usual[self.correction]}
        return {} if self.correction == "none" else {"cap": self.staleness.cap, "floor": self.staleness.floor}

    @property
    def groups_per_batch(self) -> int:
        return self.train.batch // self.train.group_size

    @property
    def batches_waiting(self) -> int | None:
        """Batches the buffer holds before feeding stops; None where it has no bound."""
        depth = self.buffer.depth or self.staleness.max_lag
        return {"synchronous": 1, "one_ahead": 1, "bounded": max(depth, 1), "stream": None}[self.buffer_kind]

    @property
    def extra_groups(self) -> int:
        """Groups submitted beyond those that the batches within `gate_depth` need (`partial.oversample`)."""
        return math.ceil(round(self.partial.oversample * self.groups_per_batch, 6)) - self.groups_per_batch

    @property
    def stops_when_whole(self) -> bool:
        """Whether generation stops while a batch is trained: in a synchronous run that has more begun than a batch needs."""
        return self.buffer_kind == "synchronous" and self.extra_groups > 0

    @property
    def takes_turns(self) -> bool:
        """Whether engines stand still while a batch is trained, and are to be told when they may go on."""
        return self.stops_when_whole or self.engine.sleep != "never"

    @property
    def gate_depth(self) -> int | None:
        """Versions that submission may run ahead of training; None where it is not gated."""
        if self.buffer_kind == "synchronous":
            return 0
        return self.staleness.max_lag if self.staleness.gate else None

    @property
    def order(self) -> str:
        """`buffer.order`, with exact mode's need honoured."""
        return "submission" if self.exact else self.buffer.order

    @property
    def hash(self) -> str:
        """Of everything that decides the result, and not of how it is watched over: what an error advises may be changed."""
        settings = to_dict(self)
        for name in ("observe", "orchestrate", "deadline", "heartbeat", "sync"):
            settings.pop(name)
        for name in ("restarts", "sleep"):
            settings["engine"].pop(name)
        for name in ("max_skipped", "recompute", "offload"):
            settings["train"].pop(name)
        for name in ("timeout", "workers", "max_failures"):
            settings["reward"].pop(name)
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def derivation(self) -> list[str]:
        """How the sizes of a run follow from the settings, a line each."""
        train, groups = self.train, self.groups_per_batch
        rows = [
            f"batch      {train.batch} rollouts = {groups} tasks × {train.group_size} siblings (train.batch, train.group_size)",
            f"steps      {self.steps} versions × {train.mini_batches} optimizer step(s); {self.steps * train.batch} rollouts",
            f"micro      at most {train.micro_batch_tokens} tokens a forward pass (train.micro_batch_tokens)",
        ]
        if self.gate_depth is None:
            rows.append("gate       none: submission runs ahead as far as the buffer lets it (staleness.gate = false)")
        else:
            extra = self.extra_groups
            more, most = f" + {extra}" if extra else "", (self.gate_depth + 1) * groups + extra
            why = f"staleness.max_lag = {self.staleness.max_lag}{', partial.oversample' if extra else ''}"
            sizes = f"({self.gate_depth} + 1) × {groups}{more} = {most}"
            rows.append(f"gate       at most {sizes} tasks submitted and untrained ({why})")
        waiting = self.batches_waiting
        held = "no bound" if waiting is None else f"{waiting} × {groups} = {waiting * groups} groups wait at most"
        rows.append(f"buffer     {self.buffer_kind}: {held}, trained in {self.order} order")
        rows.append(
            f"engine     {self.engine.count} × {self.engine.slots} rollouts decoded at once (engine.count, engine.slots), "
            f"{self.sampling.max_tokens} new tokens each at most"
        )
        if self.orchestrate == "local":
            rows.append(f"processes  launcher, {self.engine.count} engine(s), trainer (orchestrate = 'local')")
        return rows


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe file and apply overrides (`{"train.learning_rate": 1e-5}`)."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: no such recipe; `ls recipes/` shows ours")
    return parse_recipe(file.read_text(), name=str(path), overrides=overrides)


def parse_recipe(text: str, *, name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe from TOML text; errors name `name` and the line."""
    data = apply_overrides(load_toml(text, name=name), overrides or {})
    return build(Recipe, data, origin=Origin(name=name, text=text, overrides=frozenset(overrides or {})))


def make_recipe(data: Mapping[str, Any]) -> Recipe:
    """A recipe from nested or dotted plain data."""
    return build(Recipe, apply_overrides({}, data))


def _check(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{name} = {value!r}: must be {wanted}")
