"""Which correction a run applies to tokens sampled by older versions. What each computes: `headrace.algorithms`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.algorithms import correction_traits, loss_traits
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.config import Recipe


def correction_of(recipe: Recipe) -> str:
    """`staleness.correct`, or if that is "none" the loss's own correction."""
    correct = recipe.staleness.correct
    return loss_traits(recipe.train.loss).correction if correct == "none" else correct


def correction_constants(recipe: Recipe) -> dict[str, float]:
    """The constants of the recipe's correction, with `staleness.limit = 0` resolved."""
    name, staleness = correction_of(recipe), recipe.staleness
    if name == "none":
        return {}
    usual_limit = correction_traits(name).usual_limit
    if usual_limit:
        return {"limit": staleness.limit or usual_limit}
    return {"cap": staleness.cap, "floor": staleness.floor}


def check_correction(recipe: Recipe) -> None:
    """Refuse a correction that would apply the loss's own importance weight twice, or replace the loss's own mask."""
    correct, loss = recipe.staleness.correct, recipe.train.loss
    if correct == "none":
        return
    traits = loss_traits(loss)
    if traits.has_importance_weight and not correction_traits(correct).is_mask:
        raise ConfigError(
            f"staleness.correct = '{correct}': train.loss = '{loss}' has the importance weight in it; leave it 'none'"
        )
    if traits.correction not in ("none", correct):
        raise ConfigError(
            f"staleness.correct = '{correct}': train.loss = '{loss}' brings a mask, which this would replace; leave it 'none'"
        )
