"""The trainer's input for one optimizer step."""

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
    """One optimizer step's input. The trainer needs nothing else, and does not know the algorithm."""

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
    correction: str = "none"
    """How staleness is corrected; see `headrace.staleness`."""
    correction_constants: dict[str, float] = field(default_factory=dict)
    kl: str = "none"
    """Estimator of the KL to the reference model that is added to the loss: `k1`, `k2`, `k3` or `none`."""
    kl_weight: float = 0.0
    version: int
    """The version trained from; the result is version + 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(self.rollouts))
        for name in ("loss", "correction", "kl"):
            check_kind(getattr(self, name), str, f"batch: {name}")
        check_kind(self.version, int, "batch: version")
        if self.version < 0:
            raise ValueError(f"batch: version {self.version}")
        check_kind(self.kl_weight, (int, float), "batch: kl_weight")
        object.__setattr__(self, "kl_weight", float(self.kl_weight))
        if not math.isfinite(self.kl_weight) or self.kl_weight < 0:
            raise ValueError(f"batch: kl_weight = {self.kl_weight} must be finite and ≥ 0")
        for name in ("constants", "correction_constants"):
            object.__setattr__(self, name, {key: float(value) for key, value in getattr(self, name).items()})
        shapes = [(len(rollout),) for rollout in self.rollouts]
        for name in ("advantages", "weights"):
            arrays = tuple(frozen(array, np.float32, name) for array in getattr(self, name))
            object.__setattr__(self, name, arrays)
            if [array.shape for array in arrays] != shapes:
                raise ValueError(f"batch: {name} must be one array per rollout, of the shapes {shapes}")
            if arrays:
                _check_finite(np.concatenate(arrays), self.rollouts, name)

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
        checked = cls(rollouts=(), advantages=(), weights=(), **settings)
        offsets = np.cumsum([0, *map(len, rollouts)]).tolist()
        slices = list(map(slice, offsets[:-1], offsets[1:]))
        arrays = {}
        for name, values in (("advantages", advantages), ("weights", weights)):
            column = frozen(values, np.float32, name)
            if column.shape != (offsets[-1],):
                raise ValueError(f"batch: {name} have shape {column.shape} but there are {offsets[-1]} tokens")
            _check_finite(column, rollouts, name)
            arrays[name] = tuple(map(column.__getitem__, slices))
        return unchecked_copy(checked, {"rollouts": tuple(rollouts), **arrays})

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout) for rollout in self.rollouts)


def _check_finite(column: Array, rollouts: Sequence[Rollout], name: str) -> None:
    is_finite = np.isfinite(column)
    if not is_finite.all():
        stops = np.cumsum([len(rollout) for rollout in rollouts])
        rollout = rollouts[int(np.searchsorted(stops, is_finite.argmin(), side="right"))]
        raise ValueError(f"batch: {name} of rollout {rollout.id!r} must be finite")
