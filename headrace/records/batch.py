"""What one version is trained on."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.records.validate import Array, check_kind, equal_records, frozen, trusted_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.records.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What one version is trained on. The trainer needs nothing else, and does not know the algorithm."""

    rollouts: tuple[Rollout, ...]
    advantages: tuple[Array, ...]
    """One [T] float32 array per rollout."""
    weights: tuple[Array, ...]
    """One [T] float32 array per rollout: normalisation and whatever else scales a token's loss. Sums, never means, are
    taken over tokens, so that the gradient cannot depend on how they are packed."""
    loss: str
    """A loss of ours by name, or a user's as `module:name`."""
    constants: dict[str, float] = field(default_factory=dict)
    """The loss's keyword arguments."""
    correction: str = "none"
    """How staleness is corrected; see `headrace.staleness`."""
    correction_constants: dict[str, float] = field(default_factory=dict)
    kl: str = "none"
    """How the KL to the reference model, which is added to the loss, is estimated: `k1`, `k2`, `k3`."""
    kl_weight: float = 0.0
    """What it is multiplied by."""
    version: int
    """The version being trained from; training makes version + 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(self.rollouts))
        check_kind(self.version, int, "batch: version")
        if self.version < 0:
            raise ValueError(f"batch: version {self.version}")
        check_kind(self.kl_weight, (int, float), "batch: kl_weight")
        object.__setattr__(self, "kl_weight", float(self.kl_weight))
        if not math.isfinite(self.kl_weight) or self.kl_weight < 0:
            raise ValueError(f"batch: kl_weight = {self.kl_weight} must be finite and ≥ 0")
        for name in ("advantages", "weights"):
            arrays = tuple(frozen(array, np.float32, name) for array in getattr(self, name))
            object.__setattr__(self, name, arrays)
            if len(arrays) != len(self.rollouts):
                raise ValueError(f"batch: {len(arrays)} {name} for {len(self.rollouts)} rollouts")
            for rollout, array in zip(self.rollouts, arrays, strict=True):
                if array.shape != (len(rollout),) or not bool(np.isfinite(array).all()):
                    raise ValueError(f"batch: {name} of rollout {rollout.id!r} must be finite, shaped ({len(rollout)},)")
        for name in ("constants", "correction_constants"):
            object.__setattr__(self, name, {key: float(value) for key, value in getattr(self, name).items()})

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
        """From arrays over the tokens of all rollouts, one after another; they are checked as a whole."""
        stops = np.cumsum([len(rollout) for rollout in rollouts]).tolist()
        columns = {
            "advantages": frozen(advantages, np.float32, "advantages"),
            "weights": frozen(weights, np.float32, "weights"),
        }
        for name, column in columns.items():
            if column.shape != ((stops or [0])[-1],):
                raise ValueError(f"batch: {name} have shape {column.shape} but there are {(stops or [0])[-1]} tokens")
            if not bool(np.isfinite(column).all()):
                at = bisect.bisect_right(stops, int(np.isfinite(column).argmin()))
                raise ValueError(f"batch: {name} of rollout {rollouts[at].id!r} must be finite")
        places = list(map(slice, [0, *stops[:-1]], stops))
        arrays = {name: tuple(map(column.__getitem__, places)) for name, column in columns.items()}
        checked = cls(rollouts=(), advantages=(), weights=(), **settings)
        return trusted_copy(checked, {"rollouts": tuple(rollouts), **arrays})

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout) for rollout in self.rollouts)
