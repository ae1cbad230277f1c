"""Losses by name, the columns they need, and what they must give back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.algorithms.column_names import COMPUTED, PROXIMAL, REFERENCE, RETURNS, TEACHER, VALUES
from headrace.algorithms.losses import apart, policy, value
from headrace.imports import import_name
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from headrace.algorithms.losses.declare import Loss
    from headrace.algorithms.losses.tokens import TokenTensors

LOSSES: dict[str, Loss] = {
    "grpo": policy.grpo,
    "ppo": value.ppo,
    "reinforce": policy.reinforce,
    "gspo": policy.gspo,
    "cispo": policy.cispo,
    "topr": policy.topr,
    "decoupled_ppo": policy.decoupled_ppo,
    "a3po": policy.a3po,
    "dppo": policy.dppo,
    "m2po": policy.m2po,
    "aipo": policy.aipo,
    "distill": apart.distill,
    "supervised": policy.supervised,
}


def needed_columns(loss: str, correction: str = "none", kl: str = "none") -> tuple[str, ...]:
    """The columns that a loss, a correction and a KL look at, by their names, each once."""
    wanted = getattr(resolve_loss(loss), "needs", ())
    if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
        raise ConfigError(f"train.loss = {loss!r}: its `needs` must be a tuple of column names, not {wanted!r}")
    also = [*wanted, *([PROXIMAL] if correction != "none" else []), *([REFERENCE] if kl != "none" else [])]
    return tuple(dict.fromkeys(also))


def call_loss(
    name: str, tokens: TokenTensors, constants: Mapping[str, float]
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Call a loss by name and check the form of what it gives: a mean would silently be weighed a second time. The third is
    the part that no correction weighs, None where there is none."""
    _check_columns(name, tokens)
    result = resolve_loss(name)(tokens, **constants)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ConfigError(
            f"loss {name!r} must return (losses, metrics) or (losses, metrics, uncorrected), not a {type(result).__name__}"
        )
    losses, seen, uncorrected = result if len(result) == 3 else (*result, None)
    for term in (losses, uncorrected):
        if term is not None and term.shape != tokens.logprobs.shape:
            raise ConfigError(
                f"loss {name!r} returned losses of shape {tuple(term.shape)}; one per token is wanted, "
                f"{tuple(tokens.logprobs.shape)}: summing and averaging are the trainer's work"
            )
    return losses, seen, uncorrected


def resolve_loss(name: str) -> Loss:
    """A loss of ours by name, or a user's by `module:name`."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" in name:
        loss: Loss = import_name(name, setting="train.loss")
        return loss
    raise ConfigError(f"train.loss = {name!r}: must be one of {', '.join(LOSSES)}, or your own as module:name")


def missing_column(what: str, column: str) -> ValueError:
    """For a column that is needed and neither came with the rollouts nor was computed."""
    fix = {
        REFERENCE: "the trainer computes it from train.reference",
        TEACHER: "name a model in train.teacher, or have the environment put it on every rollout",
        VALUES: "the trainer computes it with a value head",
        RETURNS: "set train.advantage = 'gae'",
    }.get(column, "the environment must put it on every rollout")
    return ValueError(f"{what} needs the column {column!r}, which the batch does not have: {fix}")


def _check_columns(name: str, tokens: TokenTensors) -> None:
    wanted = needed_columns(name)
    for column in wanted:
        if column != PROXIMAL and column not in tokens.columns:
            raise missing_column(f"loss {name!r}", column)
    if VALUES in wanted and tokens.values is None:
        raise ValueError(f"loss {name!r} trains values, and this trainer has no value head")


def columns_to_bring(loss: str, correction: str = "none", kl: str = "none") -> tuple[str, ...]:
    """Needed columns that no trainer computes."""
    return tuple(column for column in needed_columns(loss, correction, kl) if column not in COMPUTED)
