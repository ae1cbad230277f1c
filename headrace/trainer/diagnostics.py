"""Metrics of a step, summed over its passes so that they do not depend on packing either.

`mismatch` is |Δ logprob| over rollouts sampled entirely by the version being trained: engine and trainer hold the same weights,
so it measures numerics alone. A step without such rollouts has none. `kl`, `chi2` and `ess` compare the policy with the
versions that sampled the tokens: they measure staleness at its actual lag, with numerics on top. `correction`,
`correction_ess` and `masked` are of the product of all corrections. `routing_differs` is the share of recorded choices of
experts, one per target and layer, that live routers would have made differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.algorithms import ratio_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from headrace.algorithms import Objective, TokenTensors
    from headrace.model import Packed
    from headrace.records import Array, Rollout
    from headrace.trainer.protocol import Metrics
    from headrace.trainer.ranks import Ranks


class Diagnostics:
    """Metrics of one step. Sums stay on the device, in float64, until `metrics` reads them all: no pass waits for the host."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._sums: dict[str, Tensor] = {}  # the loss, and metrics over tokens
        self._totals: dict[str, Tensor] = {}  # not means over tokens
        self._largest: Tensor | None = None  # maxima of |Δ logprob| at equal version, of versions, and of negated versions

    @torch.no_grad()
    def add(self, objective: Objective, tokens: TokenTensors, *, is_current: Tensor) -> None:
        """Add one pass. `is_current` [N]: the version being trained sampled the token's whole rollout (`is_sampled_by`)."""
        terms = {"loss": objective.loss.detach()}
        if tokens.logprobs.numel():
            log_ratio = tokens.logprobs - tokens.recorded
            ratio, mismatch = ratio_of(log_ratio), log_ratio.abs() * is_current
            seen = dict(objective.seen)
            is_masked = (objective.correction == 0) | (seen.pop("masked", torch.zeros_like(ratio)) > 0)
            terms |= {
                "entropy": tokens.entropy,
                "ratio": ratio,
                "ratio_squared": ratio.double().square(),
                "kl": ratio - 1 - log_ratio,
                "correction": objective.correction,
                "correction_squared": objective.correction.double().square(),
                "masked": is_masked,
                "mismatch": mismatch,
                "is_current": is_current,
                **seen,
            }
            versions = tokens.versions.double()
            largest = torch.stack([mismatch.max().double(), versions.max(), (-versions).max()])
            self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self._num_tokens += tokens.logprobs.numel()
        for name, values in terms.items():
            total = values.sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    @torch.no_grad()
    def add_routing(self, differs: Tensor, packed: Packed) -> None:
        """Add one pass with replayed routing. `differs` [layers, rows]: where the live choice is another."""
        assert packed.routing is not None
        is_known = (packed.routing >= 0).all(dim=-1).index_select(0, packed.rows)
        self.add_totals(None, differing=(differs.T.index_select(0, packed.rows) & is_known).sum(), recorded=is_known.sum())

    @torch.no_grad()
    def add_totals(self, loss: Tensor | None, **totals: Tensor) -> None:
        """Add what a pass contributes to a loss besides the objective, and to metrics that are sums."""
        if loss is not None:
            self._sums["loss"] = self._sums["loss"] + loss.double()
        for name, total in totals.items():
            self._totals[name] = self._totals.get(name, 0) + total.double()

    def metrics(self, ranks: Ranks | None = None, *, scale: float = 1.0) -> Metrics:
        """Return the loss times `scale`, means over tokens, ESS = (Σρ)²/(n Σρ²), the same of the correction's weights,
        χ² = E[ρ²] − 1 and the spread of versions; of all ranks' tokens, if there are several."""
        sums, totals, largest = self._read(ranks)
        count = sums.pop("tokens")
        if largest is None:
            return {
                "loss": scale * sum(sums.values()),
                **dict.fromkeys(("tokens", "ess", "chi2", "version_spread"), 0.0),
            }
        mismatch_max, newest, minus_oldest = largest
        num_differing, num_recorded = totals.pop("differing", 0.0), totals.pop("recorded", 0.0)
        squared, correction_squared = sums.pop("ratio_squared"), sums.pop("correction_squared")
        mismatch, num_current = sums.pop("mismatch"), sums.pop("is_current")
        return {
            "loss": scale * sums.pop("loss"),
            "tokens": count,
            **{name: total / count for name, total in sums.items()},
            **({"mismatch": mismatch / num_current, "mismatch_max": mismatch_max} if num_current else {}),
            "ess": sums["ratio"] ** 2 / (count * squared) if squared else 0.0,
            "chi2": squared / count - 1,
            "correction_ess": sums["correction"] ** 2 / (count * correction_squared) if correction_squared else 0.0,
            "version_spread": newest + minus_oldest,
            **({"routing_differs": num_differing / num_recorded} if num_recorded else {}),
            **totals,
        }

    def _read(self, ranks: Ranks | None) -> tuple[Metrics, Metrics, list[float] | None]:
        """Sums, totals, maxima and tokens, read from the device at once."""
        tensors = [*self._sums.values(), *self._totals.values(), *([] if self._largest is None else self._largest)]
        read = torch.stack(tensors).tolist() if tensors else []
        num_sums, num_named = len(self._sums), len(self._sums) + len(self._totals)
        sums = {"tokens": float(self._num_tokens), **dict(zip(self._sums, read[:num_sums], strict=True))}
        totals = dict(zip(self._totals, read[num_sums:num_named], strict=True))
        found: dict[str, Any] = {"sums": sums, "totals": totals, "largest": read[num_named:] or None}
        parts = [found] if ranks is None else ranks.exchange(found)
        maxima = [part["largest"] for part in parts if part["largest"] is not None]
        largest = [float(np.max(each)) for each in zip(*maxima, strict=True)] if maxima else None
        return _added(part["sums"] for part in parts), _added(part["totals"] for part in parts), largest


def _added(parts: Iterable[Metrics]) -> Metrics:
    total: Metrics = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def is_sampled_by(rollout: Rollout, version: int) -> Array:
    """[T] bool: whether `version` sampled the whole rollout, so that no token was sampled over an older version's KV cache."""
    is_pure = rollout.oldest_version == version and int(rollout.versions.max()) == version
    return np.full(len(rollout), is_pure)
