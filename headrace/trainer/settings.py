"""The recipe's `[train]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from headrace.algorithms import ADVANTAGES, loss_traits
from headrace.settings import ELASTIC, OPERATIONAL, ConfigError, check

_LEAST = {
    "threads": 0, "batch": 1, "mini_batches": 1, "max_skipped": 0, "restarts": 0, "warmup_steps": 0, "micro_batch_tokens": 16,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The trainer and its algorithm."""

    threads: int = field(default=0, metadata=ELASTIC)
    """Of torch on CPU; 0 takes `threads`."""
    batch: int = 256
    """Rollouts trained per version."""
    group_size: int = 8
    """Rollouts of one task, compared with each other."""
    mini_batches: int = 1
    """Optimizer steps per version."""
    micro_batch_tokens: int = field(default=16384, metadata=ELASTIC)
    """Tokens in one forward pass; changes memory and speed, not the gradient."""
    recompute: Literal["none", "layers"] = field(default="none", metadata=OPERATIONAL)
    """`layers`: a pass keeps each layer's input alone, and computes the layer again when its gradient is taken: a third more
    time, a fraction of the memory."""
    offload: tuple[Literal["optimizer", "reference", "activations"], ...] = field(default=(), metadata=OPERATIONAL)
    """What waits in the host's memory while the GPU does not need it: the optimizer's state, a reference model's weights, what
    a pass keeps for its gradient."""
    share_prefixes: bool = field(default=True, metadata=ELASTIC)
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
    max_skipped: int = field(default=3, metadata=OPERATIONAL)
    """A step whose gradient is NaN or infinite is skipped, and its rollouts are kept for `headrace inspect`. So many skipped
    one after another stop the run; 0 never does."""
    restarts: int = field(default=2, metadata=OPERATIONAL)
    """How often a trainer whose process died or stopped answering is started again from the same checkpoint."""
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
        for name, least in _LEAST.items():
            check(getattr(self, name) >= least, name, getattr(self, name), f"≥ {least}")
        for name in ("value_learning_rate", "max_grad_norm", "weight_decay", "kl"):
            check(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "a number ≥ 0")
        check(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a number above 0")
        for name in ("beta1", "beta2"):
            check(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        for name in ("discount", "gae_lambda"):
            check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "in [0, 1]")
        check(len(set(self.offload)) == len(self.offload), "offload", list(self.offload), "a list that names each once")
        fewest = self.fewest_siblings
        why = f"≥ {fewest}" + (f": advantage = '{self.advantage}' compares siblings" if fewest > 1 else "")
        check(self.group_size >= fewest, "group_size", self.group_size, why)
        if self.batch % self.group_size:
            fix = f"{max(1, round(self.batch / self.group_size)) * self.group_size}"
            raise ConfigError(f"batch = {self.batch}: not a multiple of group_size = {self.group_size}; try {fix}")
        groups = self.groups_per_batch
        check(groups >= self.mini_batches, "mini_batches", self.mini_batches, f"at most the {groups} groups of a batch")
        if loss_traits(self.loss).is_per_sequence and self.mean_over != "sequence":
            given = f"loss_mean = '{self.loss_mean}'"
            raise ConfigError(f"{given}: loss = '{self.loss}' counts each rollout the same; leave it 'auto'")
        learns_values = ADVANTAGES[self.advantage].learns_values
        if self.value_learning_rate and not learns_values:
            given = f"value_learning_rate = {self.value_learning_rate:g}: advantage = '{self.advantage}'"
            raise ConfigError(f"{given} learns no values; set it to 'gae' and loss to 'ppo', or leave value_learning_rate out")
        if self.kl_in_reward and not self.kl:
            raise ConfigError("kl_in_reward = true: there is no KL with kl = 0; set kl to its weight, such as 0.05")
        if self.kl_in_reward and not learns_values:
            given = f"kl_in_reward = true: advantage = '{self.advantage}'"
            raise ConfigError(f"{given} has no rewards of single tokens; set it to 'gae', or kl_in_reward = false")
        if self.reference and not self.kl:
            raise ConfigError(f"reference = {self.reference!r}: it is not looked at with kl = 0; set kl to its weight")

    @property
    def mean_over(self) -> str:
        """`loss_mean` with `auto` resolved."""
        if self.loss_mean != "auto":
            return self.loss_mean
        return "sequence" if loss_traits(self.loss).is_per_sequence else "token"

    @property
    def fewest_siblings(self) -> int:
        """Scored rollouts that a group must have to be trained."""
        return 2 if ADVANTAGES[self.advantage].compares_siblings else 1

    @property
    def groups_per_batch(self) -> int:
        """Tasks whose rollouts make up a batch."""
        return self.batch // self.group_size

    def describe(self, *, steps: int) -> list[str]:
        """The sizes of batches and steps, for the summary of a recipe."""
        groups = self.groups_per_batch
        return [
            f"batch      {self.batch} rollouts = {groups} tasks × {self.group_size} siblings (train.batch, train.group_size)",
            f"steps      {steps} versions × {self.mini_batches} optimizer step(s); {steps * self.batch} rollouts",
            f"micro      at most {self.micro_batch_tokens} tokens a forward pass (train.micro_batch_tokens)",
        ]


def learning_rate(settings: TrainSettings, *, version: int, steps: int) -> float:
    """The rate of the step from `version` to the next: a function of the version, so that a resumed run needs no state."""
    rise = min(1.0, (version + 1) / (settings.warmup_steps + 1))
    left = max(0.0, (steps - version) / max(1, steps - settings.warmup_steps)) if version >= settings.warmup_steps else 1.0
    if settings.schedule == "constant":
        return settings.learning_rate * rise
    shape = left if settings.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)
    return settings.learning_rate * rise * (settings.final_learning_rate + (1 - settings.final_learning_rate) * shape)
