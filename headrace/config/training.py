"""What becomes of rollouts: the buffer, staleness, weights in flight, training, evaluation, and what a run leaves behind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from headrace.config.check import check
from headrace.config.generation import TaskSettings  # noqa: TC001  (`settings.build` reads the hints while it runs)
from headrace.settings import ConfigError


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
        check(self.max_lag >= 0, "max_lag", self.max_lag, "≥ 0")
        check(self.cap >= 1, "cap", self.cap, "≥ 1")
        check(0 <= self.floor <= 1, "floor", self.floor, "in [0, 1]")
        check(0 <= self.limit < math.inf, "limit", self.limit, "a number ≥ 0")
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
        check(1 <= self.oversample < math.inf, "oversample", self.oversample, "a number ≥ 1")


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
    value_learning_rate: float = 0.0
    """Of the value head, on the same schedule; its gradient is clipped apart from the policy's. 0 takes ten times
    learning_rate."""
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
    loss_mean: Literal["auto", "token", "sequence", "constant"] = "auto"
    """Each token of the batch counts the same, or each rollout does. `constant`: the sum is divided by
    batch × sampling.max_tokens, so that no length is favoured (Dr. GRPO). `auto`: `token`, but `sequence` for `gspo`, which is
    defined by it."""
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
        check(self.threads >= 0, "threads", self.threads, "≥ 0")
        fewest = self.fewest_siblings
        why = f"≥ {fewest}" + (f": advantage = '{self.advantage}' compares siblings" if fewest > 1 else "")
        check(self.group_size >= fewest, "group_size", self.group_size, why)
        check(self.batch >= 1, "batch", self.batch, "≥ 1")
        if self.batch % self.group_size:
            fix = f"{max(1, round(self.batch / self.group_size)) * self.group_size}"
            raise ConfigError(f"batch = {self.batch}: not a multiple of group_size = {self.group_size}; try {fix}")
        check(self.mini_batches >= 1, "mini_batches", self.mini_batches, "≥ 1")
        groups = self.batch // self.group_size
        check(groups >= self.mini_batches, "mini_batches", self.mini_batches, f"at most the {groups} groups of a batch")
        check(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a number above 0")
        check(0 <= self.value_learning_rate < math.inf, "value_learning_rate", self.value_learning_rate, "a number ≥ 0")
        if self.value_learning_rate and self.advantage != "gae":
            raise ConfigError(
                f"value_learning_rate = {self.value_learning_rate:g}: advantage = '{self.advantage}' learns no values; set "
                f"it to 'gae' and loss to 'ppo', or leave value_learning_rate out"
            )
        check(0 <= self.beta1 < 1, "beta1", self.beta1, "in [0, 1)")
        check(0 <= self.beta2 < 1, "beta2", self.beta2, "in [0, 1)")
        check(0 <= self.max_grad_norm < math.inf, "max_grad_norm", self.max_grad_norm, "a number ≥ 0")
        check(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "a number ≥ 0")
        check(self.max_skipped >= 0, "max_skipped", self.max_skipped, "≥ 0")
        check(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "≥ 0")
        check(self.micro_batch_tokens >= 16, "micro_batch_tokens", self.micro_batch_tokens, "≥ 16")
        check(len(set(self.offload)) == len(self.offload), "offload", list(self.offload), "a list that names each once")
        check(0 <= self.discount <= 1, "discount", self.discount, "in [0, 1]")
        check(0 <= self.gae_lambda <= 1, "gae_lambda", self.gae_lambda, "in [0, 1]")
        if self.loss == "gspo" and self.mean_over != "sequence":
            raise ConfigError(f"loss_mean = '{self.loss_mean}': loss = 'gspo' counts each rollout the same; leave it 'auto'")
        check(0 <= self.kl < math.inf, "kl", self.kl, "a number ≥ 0")
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
    def mean_over(self) -> str:
        """`loss_mean` with `auto` resolved."""
        return {"auto": "sequence" if self.loss == "gspo" else "token"}.get(self.loss_mean, self.loss_mean)

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
    """Tasks per evaluation, the same ones each time: of each source's rows, shuffled by the seed, an equal share."""
    success_at: float = 1.0
    """A rollout whose reward reaches this is a success."""

    def __post_init__(self) -> None:
        check(self.every >= 0, "every", self.every, "≥ 0")
        check(self.limit >= 0, "limit", self.limit, "≥ 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Hugging Face folders from which the same command resumes."""

    every: int = 50
    """Versions between checkpoints; the last version is always saved."""
    keep: int = 2
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        check(self.every >= 1, "every", self.every, "≥ 1")
        check(self.keep >= 1, "keep", self.keep, "≥ 1")


@dataclass(frozen=True, kw_only=True)
class ObserveSettings:
    """What a run shows and leaves behind."""

    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Besides metrics.jsonl, which is always written."""
    keep_rollouts_every: int = 10
    """Versions between two whose rollouts are kept for `headrace inspect`; 0 keeps none."""
    trace: bool = True
    """Write trace.json."""
