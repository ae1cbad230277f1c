"""What other rooms must know about losses, corrections and advantages, without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.algorithms.columns import TEACHER, VALUES


@dataclass(frozen=True)
class LossTraits:
    """A user's own loss has the defaults."""

    mean: str = ""  # the `train.loss_mean` that the loss is defined by; empty if it goes with any
    has_importance_weight: bool = False  # it applies π_prox/μ itself
    correction: str = "none"  # the correction that is part of the loss, beside those that `staleness.correct` names


@dataclass(frozen=True)
class CorrectionTraits:
    is_mask: bool = False  # it returns 0 or 1; others contain π_prox/μ, and take `staleness.cap` and `staleness.floor`
    needs_whole_batch: bool = False  # it compares a token with all others of the batch
    needs_proximal: bool = True  # it compares μ with π_prox; if not, with π as each optimizer step finds it, or not at all
    usual_limit: float = 0.0  # the default for `staleness.limit = 0`; 0 if the correction has no limit


@dataclass(frozen=True)
class AdvantageTraits:
    scales: tuple[str, ...]  # the `train.scale_rewards` it goes with; the first is what `auto` means
    compares_siblings: bool = False  # a group needs at least two scored rollouts
    made_from: str = ""  # the column that per-token advantages are computed from; empty if each rollout has one advantage
    uses_rewards: bool = True
    kl_is_per_token: bool = False  # a KL in the reward counts for the tokens up to its own, as in REINFORCE++
    is_per_turn: bool = False  # all tokens of a turn have the same advantage, and another than those of other turns

    @property
    def uses_step_rewards(self) -> bool:
        """Whether it looks at more than the reward of the whole episode."""
        return self.learns_values or self.is_per_turn

    @property
    def learns_values(self) -> bool:
        """Whether it needs a value head."""
        return self.made_from == VALUES


LOSSES_WITH_TRAITS = {
    "gspo": LossTraits(mean="sequence"),
    "gmpo": LossTraits(mean="sequence"),
    "luspo": LossTraits(mean="sum"),
    "kimi": LossTraits(mean="sum"),
    "decoupled_ppo": LossTraits(has_importance_weight=True),
    "a3po": LossTraits(has_importance_weight=True),
    "m2po": LossTraits(correction="m2po"),
}
CORRECTIONS_WITH_TRAITS = {
    "opsm": CorrectionTraits(is_mask=True, needs_proximal=False, usual_limit=1e-4),
    "m2po": CorrectionTraits(is_mask=True, needs_whole_batch=True, usual_limit=0.04),
    "prefix": CorrectionTraits(is_mask=True, needs_proximal=False),
    "trust_region": CorrectionTraits(is_mask=True, usual_limit=0.04),
}
ADVANTAGES = {
    "group": AdvantageTraits(("group", "batch", "none"), compares_siblings=True),
    "leave_one_out": AdvantageTraits(("none", "group", "batch"), compares_siblings=True),
    "global": AdvantageTraits(("batch", "none"), kl_is_per_token=True),
    "reward": AdvantageTraits(("none", "batch")),
    "gae": AdvantageTraits(("batch", "none"), made_from=VALUES, kl_is_per_token=True),
    "turn": AdvantageTraits(("group", "none"), compares_siblings=True, is_per_turn=True),
    "turn_gae": AdvantageTraits(("batch", "none"), made_from=VALUES, kl_is_per_token=True, is_per_turn=True),
    "distill": AdvantageTraits(("none",), made_from=TEACHER, uses_rewards=False),
}


def loss_traits(name: str) -> LossTraits:
    return LOSSES_WITH_TRAITS.get(name, LossTraits())


def correction_traits(name: str) -> CorrectionTraits:
    return CORRECTIONS_WITH_TRAITS.get(name, CorrectionTraits())
