"""Metrics of a step, summed over its passes so that they do not depend on packing either.

`mismatch` is |Δ logprob| over rollouts sampled entirely by the version being trained: engine and trainer hold the same weights,
so it measures numerics alone. `kl`, `chi2` and `ess` compare the policy with the versions that sampled the tokens: they measure
staleness at its actual lag, with numerics on top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.algorithms import ratio_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.algorithms import Objective, TokenTensors
    from headrace.records import Array, Rollout
    from headrace.trainer.protocol import Metrics

_SUMMED = ("mismatch", "is_current", "ratio_squared")  # not reported as means over all tokens


class Diagnostics:
    """Metrics of one batch. Sums stay on the device, in float64, until `metrics` reads them all: no pass waits for the host."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._loss: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._largest: Tensor | None = None  # maxima of |Δ logprob| at equal version, of versions, and of negated versions

    @torch.no_grad()
    def add(self, objective: Objective, tokens: TokenTensors, *, is_current: Tensor) -> None:
        """Add one pass. `is_current` [N]: the version being trained sampled the token's whole rollout (`is_sampled_by`)."""
        loss = objective.loss.detach().double()
        self._loss = loss if self._loss is None else self._loss + loss
        self._num_tokens += tokens.logprobs.numel()
        if not tokens.logprobs.numel():
            return
        log_ratio = tokens.logprobs - tokens.recorded
        ratio, mismatch = ratio_of(log_ratio), log_ratio.abs() * is_current
        is_masked = objective.correction == 0
        seen = dict(objective.seen)
        if "masked" in seen:
            is_masked = is_masked | (seen.pop("masked") > 0)
        terms = {
            "entropy": tokens.entropy,
            "ratio": ratio,
            "ratio_squared": ratio.double().square(),
            "kl": ratio - 1 - log_ratio,
            "correction": objective.correction,
            "masked": is_masked,
            "mismatch": mismatch,
            "is_current": is_current,
            **seen,
        }
        for name, values in terms.items():
            total = values.sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        versions = tokens.versions.double()
        largest = torch.stack([mismatch.max().double(), versions.max(), (-versions).max()])
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def metrics(self) -> Metrics:
        """Return means over tokens, ESS = (Σρ)²/(n Σρ²), χ² = E[ρ²] − 1 and the spread of versions."""
        if self._loss is None or self._largest is None:
            nothing = dict.fromkeys(("mismatch", "mismatch_max", "ess", "chi2", "version_spread"), 0.0)
            return {"loss": 0.0 if self._loss is None else float(self._loss), "tokens": 0.0, **nothing}
        read = torch.cat([torch.stack([self._loss, *self._sums.values()]), self._largest]).tolist()
        sums = dict(zip(self._sums, read[1:-3], strict=True))
        mismatch_max, newest, oldest = read[-3], read[-2], -read[-1]
        count = self._num_tokens
        means = {name: total / count for name, total in sums.items() if name not in _SUMMED}
        return {
            "loss": read[0],
            "tokens": float(count),
            **means,
            "mismatch": sums["mismatch"] / max(sums["is_current"], 1),
            "mismatch_max": mismatch_max,
            "ess": sums["ratio"] ** 2 / (count * sums["ratio_squared"]) if sums["ratio_squared"] else 0.0,
            "chi2": sums["ratio_squared"] / count - 1,
            "version_spread": newest - oldest,
        }


def is_sampled_by(rollout: Rollout, version: int) -> Array:
    """[T] bool: whether `version` sampled the whole rollout, so that no token was sampled over an older version's KV cache."""
    is_pure = rollout.oldest_version == version and int(rollout.versions.max()) == version
    return np.full(len(rollout), is_pure)
