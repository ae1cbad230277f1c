"""The trainer's input for one optimizer step, or for a part of one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records.validate import Array, check_kind, equal_records, frozen, unchecked_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.records.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The input of one optimizer step, or of a part of one. The trainer needs nothing else, and does not know the algorithm."""

    rollouts: tuple[Rollout, ...]
    advantages: tuple[Array, ...]
    """One [T] float32 array per rollout."""
    weights: tuple[Array, ...]
    """One [T] float32 array per rollout: each token's factor in the loss, normalisation included. Losses are summed over
    tokens, never averaged, so that the gradient does not depend on packing."""
    loss: str
    """The name of a built-in loss, or `module:name` of a user's."""
    constants: dict[str, float] = field(default_factory=dict)
    """The loss's keyword arguments."""
    corrections: dict[str, dict[str, float]] = field(default_factory=dict)
    """How staleness is corrected: the constants of each correction by its name; their weights multiply."""
    kl: str = "none"
    """Estimator of the KL to the reference model that is added to the loss: `k1`, `k2`, `k3` or `none`."""
    kl_weight: float = 0.0
    entropy_weight: float = 0.0
    """Of the entropy bonus, which is subtracted from the loss."""
    entropy_floor: float = 0.0
    """Tokens whose column `entropy` is below have no loss; KL and entropy bonus apply to them too."""
    reference_mix: float = 0.0
    """The share of the new weights in the reference model after this step; 0 leaves the reference as it is."""
    part: int = 0
    """Its place among the parts of its step, whose gradients add up. The first forgets those of a step that was given up."""
    is_last: bool = True
    """The step is made after this part."""
    gradient_scale: float = 1.0
    """What the step's whole gradient is multiplied by. Earlier parts had to be weighted before the number of tokens was
    known."""
    version: int
    """The version trained from; the result is version + 1."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("loss", str), ("corrections", dict), ("kl", str), ("version", int), ("part", int), ("is_last", bool)
        ):  # fmt: skip
            check_kind(getattr(self, name), kind, f"batch: {name}")
        values: dict[str, Any] = {"rollouts": tuple(self.rollouts)}
        for name in ("kl_weight", "entropy_weight", "entropy_floor", "reference_mix", "gradient_scale"):
            value = getattr(self, name)
            check_kind(value, (int, float), f"batch: {name}")
            if not 0 <= value < math.inf:
                raise ValueError(f"batch: {name} = {value} must be finite and ≥ 0")
            values[name] = float(value)
        for name in ("version", "part"):
            if getattr(self, name) < 0:
                raise ValueError(f"batch: {name} {getattr(self, name)} must be ≥ 0")
        values["constants"] = _numbers(self.constants)
        values["corrections"] = {str(name): _numbers(constants) for name, constants in self.corrections.items()}
        shapes = [(len(rollout),) for rollout in self.rollouts]
        for name in ("advantages", "weights"):
            arrays = getattr(self, name)
            if [np.shape(array) for array in arrays] != shapes:
                raise ValueError(f"batch: {name} must be one array per rollout, of the shapes {shapes}")
            values[name] = _split(np.concatenate(arrays), self.rollouts, name) if shapes else ()
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return equal_records(self, other)

    @classmethod
    def from_columns(
        cls,
        rollouts: Sequence[Rollout],
        *,
        advantages: Array,
        weights: Array,
        **settings: Any,  # noqa: ANN401  (the other fields)
    ) -> Batch:
        """From arrays over the concatenated tokens of all rollouts, checked as a whole."""
        arrays = {"advantages": _split(advantages, rollouts, "advantages"), "weights": _split(weights, rollouts, "weights")}
        checked = cls(rollouts=(), advantages=(), weights=(), **settings)
        return unchecked_copy(checked, {"rollouts": tuple(rollouts), **arrays})

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout) for rollout in self.rollouts)


def _numbers(constants: dict[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in constants.items()}


def _split(column: Array, rollouts: Sequence[Rollout], name: str) -> tuple[Array, ...]:
    """A column over all tokens as one array per rollout."""
    column = frozen(column, np.float32, name)
    offsets = np.cumsum([0, *map(len, rollouts)])
    if column.shape != (offsets[-1],):
        raise ValueError(f"batch: {name} have shape {column.shape} but there are {offsets[-1]} tokens")
    is_finite = np.isfinite(column)
    if not is_finite.all():
        row = int(np.searchsorted(offsets, is_finite.argmin(), side="right")) - 1
        raise ValueError(f"batch: {name} of rollout {rollouts[row].id!r} must be finite")
    return tuple(map(column.__getitem__, map(slice, offsets[:-1].tolist(), offsets[1:].tolist())))
