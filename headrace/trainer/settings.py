"""The recipe's `[train]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from headrace.algorithms import ADVANTAGES, loss_traits
from headrace.settings import ELASTIC, OPERATIONAL, ConfigError, check
from headrace.trainer.parallel import ParallelSettings
from headrace.trainer.parameter_groups import ParameterSettings  # noqa: TC001  (`build` reads type hints at run time)
from headrace.trainer.schedule import check_schedule

_LEAST = {
    "threads": 0, "batch": 1, "mini_batches": 1, "stream_parts": 0, "epochs": 1, "reference_every": 0, "max_skipped": 0,
    "restarts": 0, "warmup_steps": 0, "decay_steps": 0, "micro_batch_tokens": 16,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The trainer and its algorithm."""

    parallel: ParallelSettings = field(default_factory=ParallelSettings, metadata=ELASTIC)
    threads: int = field(default=0, metadata=ELASTIC)
    """Of torch on CPU; 0 takes `threads`."""
    batch: int = 256
    """Rollouts trained per version."""
    group_size: int = 8
    """Rollouts of one task, compared with each other."""
    mini_batches: int = 1
    """Optimizer steps per version, or per epoch of it."""
    stream_parts: int = field(default=0, metadata=ELASTIC)
    """Parts of a batch, a multiple of mini_batches. The trainer gets each as soon as its groups are complete, and adds up their
    gradients; a step is made once all parts of its mini-batch are trained. 1 waits for the whole batch. 0 takes 4, fewer of a
    small batch, and 1 with several mini-batches, engine.lend, or what needs the whole batch."""
    epochs: int = 1
    """How often a version trains its batch, each time in other mini-batches. Each epoch adds `mini_batches` optimizer steps;
    ratios stay those to the policy at the version's start."""
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
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw_8bit`: AdamW with moments of 8 bits, which take a quarter of the memory. `muon`: orthogonalised momentum for
    matrices, scaled so that AdamW's learning rate fits, and AdamW for embeddings, head, norms and biases."""
    learning_rate: float = 1e-6
    """At the top of its schedule."""
    value_learning_rate: float = 0.0
    """Of the value head, on the same schedule; its gradient is clipped apart from the policy's. 0 takes ten times
    learning_rate."""
    schedule: str = "constant"
    """What the learning rate does after its rise: `constant`, `linear`, `cosine`, `wsd` (constant, then a linear fall over the
    last decay_steps), or your own as `module:name` or `file.py:name`, a function from (version, steps) to a factor."""
    warmup_steps: int = 0
    """Versions over which the learning rate rises."""
    decay_steps: int = 0
    """Versions over which the rate of `wsd` falls; 0 takes the last tenth of steps."""
    final_learning_rate: float = 0.0
    """Where `linear`, `cosine` and `wsd` end, as a fraction of the top."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.99
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW: added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled, as in AdamW; biases and norms are spared."""
    parameters: tuple[ParameterSettings, ...] = ()
    """Parameters to freeze, or with a learning rate or weight decay of their own."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    max_skipped: int = field(default=3, metadata=OPERATIONAL)
    """A step whose gradient is NaN or infinite is skipped, and its rollouts are kept for `headrace inspect`. So many skipped
    one after another stop the run; 0 never does."""
    restarts: int = field(default=2, metadata=OPERATIONAL)
    """How often a trainer whose process died or stopped answering is started again from the same checkpoint."""
    loss: str = "grpo"
    """`grpo`, `ppo`, `reinforce`, `gspo`, `luspo`, `gmpo`, `cispo`, `sapo`, `vespo`, `kimi`, `topr`, `decoupled_ppo`, `a3po`,
    `dppo`, `m2po`, `aipo`, `distill`, or your own as `module:name` or `file.py:name`. docs/losses.md has their formulas and
    constants."""
    constants: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of the loss, such as clip_low and clip_high."""
    advantage: Literal["group", "leave_one_out", "global", "reward", "gae", "turn", "turn_gae", "distill"] = "group"
    """What a reward r is compared with. `group`: r − mean over the siblings. `leave_one_out`: r − mean of the others (RLOO).
    `global`: r − mean over the version's batch (REINFORCE++). `reward`: r itself. `gae`: per token, from the values of a loss
    that learns them (ppo). `turn`: per turn, its step rewards and all that is still to come, less the mean over the siblings'
    same turn. `turn_gae`: `gae` with turns for tokens. `distill`: per token, how much likelier the teacher finds it."""
    scale_rewards: Literal["auto", "group", "batch", "none"] = "auto"
    """What advantages are divided by: the standard deviation of the rewards over the siblings, over the version's batch, or
    nothing (Dr. GRPO). `auto`: `group` for `group` and `turn`, `batch` for `global`, `gae` and `turn_gae` (for these two of the
    advantages themselves), else `none`."""
    normalize_each_reward: bool = False
    """Normalise each reward function over the siblings, (r − mean) ÷ std, before they are weighted and summed, so that none
    drowns another; `advantage` then starts from the sum. With `advantage = "global"` that is GDPO."""
    mask_truncated: bool = False
    """Completions cut off at their length limit give no loss; their rewards still count in what their siblings are compared
    with."""
    discount: float = 1.0
    """Of rewards one token later, for `gae`; one turn later, for `turn` and `turn_gae`."""
    gae_lambda: float = 0.95
    """Of `gae` and `turn_gae`: 1 trusts what was rewarded, 0 the values."""
    loss_mean: Literal["auto", "token", "sequence", "sum", "constant"] = "auto"
    """Each token of the batch counts the same, or each rollout does. `sum`: each rollout's tokens are summed, and the mean is
    over rollouts (RLOO). `constant`: that, divided by sampling.max_tokens (Dr. GRPO). `auto`: `token`, but `sequence` for
    `gspo` and `gmpo`, `sum` for `luspo` and `kimi`, which are defined by it."""
    kl: float = 0.0
    """Weight β of the KL to the reference model, added to the loss; 0 leaves it out."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of the KL in the loss. With d = log π − log π_ref, `k1`: d, `k2`: d²/2, `k3`: exp(−d) − 1 + d."""
    kl_in_reward: bool = False
    """Take β (log μ − log π_ref) off the reward instead of adding the KL to the loss: of each token for `gae`, `turn_gae` and
    `global`, summed over the episode for the other advantages."""
    kl_target: float = 0.0
    """Nats per token. After each version β is multiplied by 1 + clip(KL ÷ kl_target − 1, ±0.2) · batch ÷ kl_horizon; it starts
    at kl. 0 keeps β fixed."""
    kl_horizon: int = 10_000
    """Rollouts over which β may change by a fifth, for kl_target."""
    reference: str = ""
    """A Hugging Face folder or hub name of the reference model; empty takes the weights that RL begins with."""
    reference_every: int = 0
    """Versions after which the reference becomes the policy, again and again; 0 keeps the first reference. Checkpoints then
    hold the reference too."""
    reference_mix: float = 1.0
    """The policy's share when that happens: reference ← reference_mix · policy + (1 − reference_mix) · reference."""
    entropy: float = 0.0
    """Weight of the entropy bonus: the loss of a token falls by so much times the entropy of its distribution."""
    router_aux: float = 0.0
    """In models with experts: weight of the loss that balances how often each expert is chosen, within each rollout; 0 leaves
    it out."""
    router_z: float = 0.0
    """In models with experts: weight of the mean squared log-sum-exp of the router's logits, which keeps them small; 0 leaves
    it out."""
    entropy_target: float = 0.0
    """Nats per token. The bonus applies while the sampled tokens' entropy is at most this; each version then raises its weight
    by entropy_step, and lowers it otherwise, within [0, 1]. The weight starts at entropy. 0 keeps it fixed."""
    entropy_step: float = 0.005
    """How much a version changes the weight, for entropy_target."""
    entropy_quantile: float = 1.0
    """The share of a version's tokens that have a loss: those of the highest entropy. Below 1 it takes another forward pass."""
    teacher: str = ""
    """A Hugging Face folder or hub name of the teacher that `distill` learns from; its tokens must be the model's."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check(getattr(self, name) >= least, name, getattr(self, name), f"≥ {least}")
        for name in (
            "value_learning_rate", "max_grad_norm", "weight_decay", "kl", "kl_target", "entropy", "entropy_target",
            "router_aux", "router_z",
        ):  # fmt: skip
            check(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "a number ≥ 0")
        for name in ("learning_rate", "eps"):
            check(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a number above 0")
        parts, num_ranks = max(self.mini_batches, self.stream_parts), self.parallel.ranks
        if self.batch // parts < num_ranks:
            one, several = ("part", "parts") if self.stream_parts > self.mini_batches else ("step", "mini-batches")
            given = f"batch = {self.batch}" + (f" in {parts} {several}" if parts > 1 else "")
            fix = f"set it to at least {num_ranks * parts}, or take fewer ranks (train.parallel)"
            raise ConfigError(f"{given}: a {one} has fewer rollouts than the {num_ranks} ranks; {fix}")
        check_schedule(self)
        for name in ("reference_mix", "entropy_quantile", "entropy_step"):
            check(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0, at most 1")
        least = self.batch if self.kl_target else 1
        check(self.kl_horizon >= least, "kl_horizon", self.kl_horizon, f"≥ {least}" + " (batch)" * bool(self.kl_target))
        for name in ("beta1", "beta2"):
            check(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        for name in ("discount", "gae_lambda"):
            check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "in [0, 1]")
        check(len(set(self.offload)) == len(self.offload), "offload", list(self.offload), "a list that names each once")
        fewest = self.fewest_siblings
        what = "normalize_each_reward = true" if self.normalize_each_reward else f"advantage = '{self.advantage}'"
        why = f"≥ {fewest}" + (f": {what} compares siblings" if fewest > 1 else "")
        check(self.group_size >= fewest, "group_size", self.group_size, why)
        if self.batch % self.group_size:
            fix = f"{max(1, round(self.batch / self.group_size)) * self.group_size}"
            raise ConfigError(f"batch = {self.batch}: not a multiple of group_size = {self.group_size}; try {fix}")
        groups = self.groups_per_batch
        least = self.mini_batches * self.group_size
        why = f"at most the {groups} groups of a batch; set batch to {least} or more, or it to {groups} or fewer"
        check(groups >= self.mini_batches, "mini_batches", self.mini_batches, why)
        if self.stream_parts > 1:
            why = f"a multiple of mini_batches = {self.mini_batches}, at most the {groups} groups of a batch; or 1"
            fits = self.stream_parts % self.mini_batches == 0 and self.stream_parts <= groups
            check(fits, "stream_parts", self.stream_parts, why)
        wanted = loss_traits(self.loss).mean
        if wanted and self.mean_over != wanted:
            given = f"loss_mean = '{self.loss_mean}': loss = '{self.loss}' is defined by the mean '{wanted}'"
            raise ConfigError(f"{given}; leave it 'auto'")
        dual_clip = self.constants.get("dual_clip", 0.0)
        check(dual_clip == 0 or dual_clip > 1, "constants.dual_clip", dual_clip, "above 1, such as 3, or 0 for none")
        traits = ADVANTAGES[self.advantage]
        if self.scale not in traits.scales:
            given = f"scale_rewards = '{self.scale_rewards}': advantage = '{self.advantage}'"
            raise ConfigError(f"{given} goes with {' or '.join(repr(name) for name in ('auto', *traits.scales))}")
        if self.normalize_each_reward and traits.made_from:
            given = f"normalize_each_reward = true: advantage = '{self.advantage}'"
            raise ConfigError(f"{given} is per token; set it to 'global' (GDPO), 'group', 'leave_one_out' or 'reward'")
        learns_values = ADVANTAGES[self.advantage].learns_values
        if self.value_learning_rate and not learns_values:
            given = f"value_learning_rate = {self.value_learning_rate:g}: advantage = '{self.advantage}'"
            raise ConfigError(f"{given} learns no values; set it to 'gae' and loss to 'ppo', or leave value_learning_rate out")
        if self.kl_in_reward and not self.kl:
            raise ConfigError("kl_in_reward = true: there is no KL with kl = 0; set kl to its weight, such as 0.05")
        if self.kl_in_reward and not ADVANTAGES[self.advantage].uses_rewards:
            given = f"kl_in_reward = true: advantage = '{self.advantage}'"
            raise ConfigError(f"{given} is not made of rewards; set it to another, such as 'group', or kl_in_reward = false")
        for name in ("reference", "reference_every", "kl_target"):
            if getattr(self, name) and not self.kl:
                given = f"{name} = {getattr(self, name)!r}"
                raise ConfigError(f"{given}: there is no KL with kl = 0; set kl to its weight, such as 0.05")
        if self.reference_mix < 1 and not self.reference_every:
            given = f"reference_mix = {self.reference_mix:g}"
            raise ConfigError(f"{given}: the reference stays as it is with reference_every = 0; set that to some versions")

    @property
    def looks_at_whole_batch(self) -> list[str]:
        """The settings that do, before a version's first step."""
        settings = {
            f"epochs = {self.epochs}": self.epochs > 1,
            f"advantage = '{self.advantage}'": self.advantage == "global",
            f"scale_rewards = '{self.scale}'": self.scale == "batch",
            f"entropy_quantile = {self.entropy_quantile:g}": self.entropy_quantile < 1,
            f"entropy_target = {self.entropy_target:g}": self.entropy_target > 0,
            f"kl_target = {self.kl_target:g}": self.kl_target > 0,
        }
        return [given for given, looks in settings.items() if looks]

    @property
    def mean_over(self) -> str:
        """`loss_mean` with `auto` resolved."""
        if self.loss_mean != "auto":
            return self.loss_mean
        return loss_traits(self.loss).mean or "token"

    @property
    def scale(self) -> str:
        """`scale_rewards` with `auto` resolved."""
        return ADVANTAGES[self.advantage].scales[0] if self.scale_rewards == "auto" else self.scale_rewards

    @property
    def kl_in_loss(self) -> str:
        """The estimator of the KL that is added to the loss, or `none`."""
        return self.kl_estimator if self.kl and not self.kl_in_reward else "none"

    @property
    def fewest_siblings(self) -> int:
        """Scored rollouts that a group must have to be trained."""
        return 2 if ADVANTAGES[self.advantage].compares_siblings or self.normalize_each_reward else 1

    @property
    def groups_per_batch(self) -> int:
        """Tasks whose rollouts make up a batch."""
        return self.batch // self.group_size

    def describe(self, *, steps: int, parts: int) -> list[str]:
        """The sizes of batches and steps, for the summary of a recipe."""
        groups, num_steps = self.groups_per_batch, self.epochs * self.mini_batches
        as_they_come = f", trained in up to {parts} parts as they come (train.stream_parts)" if parts > 1 else ""
        return [
            f"batch      {self.batch} rollouts = {groups} tasks × {self.group_size} siblings{as_they_come}",
            f"steps      {steps} versions × {num_steps} optimizer step(s); {steps * self.batch} rollouts",
            f"micro      at most {self.micro_batch_tokens} tokens a forward pass (train.micro_batch_tokens)",
        ]
