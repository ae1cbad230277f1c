"""The objective of a batch, a pure function of per-token tensors:

Σ weight · (correction · loss + uncorrected loss + β KL − entropy weight · entropy)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from headrace.algorithms.columns import ENTROPY, REFERENCE
from headrace.algorithms.corrections import BATCH_WIDE, MASKS, CorrectedTokens, importance_weights
from headrace.algorithms.losses import KL_ESTIMATORS, call_loss, missing_column
from headrace.algorithms.traits import correction_traits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from headrace.algorithms.tokens import TokenTensors
    from headrace.records import Array, Batch


class Objective(NamedTuple):
    """The objective of one pass: `loss` is a sum over tokens, `correction` [N] are weights, `seen` are metrics of [N] each."""

    loss: Tensor
    correction: Tensor
    seen: dict[str, Tensor]


def objective(
    tokens: TokenTensors, weights: Tensor, batch: Batch, *, batch_wide: Mapping[str, Tensor] | None = None
) -> Objective:
    """Apply the loss, the KL and the corrections that `batch` names; only its names and constants are read. `weights` [N] are
    the batch's. `batch_wide`: [N] of each of its corrections in `BATCH_WIDE`, from `batch_corrections`."""
    losses, seen, uncorrected = call_loss(batch.loss, tokens, batch.constants)
    if batch.kl != "none":
        if REFERENCE not in tokens.columns:
            raise missing_column("the KL (train.kl)", REFERENCE)
        apart = KL_ESTIMATORS[batch.kl](tokens.logprobs, tokens.columns[REFERENCE])
        uncorrected = batch.kl_weight * apart + (0 if uncorrected is None else uncorrected)
        seen = {**seen, "reference_kl": apart.detach()}
    if batch.entropy_weight:
        uncorrected = (0 if uncorrected is None else uncorrected) - batch.entropy_weight * tokens.entropy
    if batch.entropy_floor:
        if ENTROPY not in tokens.columns:
            raise missing_column("train.entropy_quantile", ENTROPY)
        is_kept = (tokens.columns[ENTROPY] >= batch.entropy_floor).float()
        losses, seen = losses * is_kept, {**seen, "masked": torch.maximum(seen.get("masked", 1 - is_kept), 1 - is_kept)}
    found = _corrections(tokens, batch, batch_wide or {})
    correction = torch.ones_like(tokens.recorded)
    for each in found.values():
        correction = correction * each
    if len(found) > 1:
        seen = {**seen, **{f"correction_{name}": each for name, each in found.items()}}
    losses = losses * correction if uncorrected is None else losses * correction + uncorrected
    return Objective((losses * weights).sum(), correction, seen)


def _corrections(tokens: TokenTensors, batch: Batch, batch_wide: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """[N] of each of the batch's corrections."""
    found = {}
    for name, constants in batch.corrections.items():
        if name in BATCH_WIDE:
            assert name in batch_wide, f"{name} is computed over the whole batch"
            found[name] = batch_wide[name]
            continue
        judged = tokens.proximal if correction_traits(name).needs_proximal else tokens.logprobs.detach()
        corrected = CorrectedTokens(
            log_ratio=judged - tokens.recorded,
            versions=tokens.versions,
            sequence=tokens.sequence,
            num_sequences=tokens.num_sequences,
            advantages=tokens.advantages,
            **constants,
        )
        found[name] = importance_weights(name, corrected)
    return found


def ratio_base(corrections: Iterable[str], *, recorded: Tensor, proximal: Tensor) -> Tensor:
    """Return the denominator of ratios: π_prox if one of the corrections contains π_prox/μ, else μ."""
    return recorded if MASKS.issuperset(corrections) else proximal


def batch_corrections(batch: Batch, proximal: Sequence[Array]) -> dict[str, list[Array]]:
    """[T] float32 per rollout of each of the batch's corrections in `BATCH_WIDE`, computed over all its trained tokens at once,
    so that it does not depend on packing; 0 on other tokens. `proximal`: [T] per rollout, logprobs at the start of the
    version."""
    return {name: _over_batch(name, batch, proximal) for name in batch.corrections if name in BATCH_WIDE}


def _over_batch(name: str, batch: Batch, proximal: Sequence[Array]) -> list[Array]:
    masks = [rollout.loss_mask for rollout in batch.rollouts]
    counts = [int(np.count_nonzero(mask)) for mask in masks]

    def joined(arrays: Sequence[Array]) -> Tensor:
        parts = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.float32), *parts]))

    tokens = CorrectedTokens(
        log_ratio=joined(proximal) - joined([rollout.logprobs for rollout in batch.rollouts]),
        sequence=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        num_sequences=len(counts),
        advantages=joined(batch.advantages),
        versions=joined([rollout.versions for rollout in batch.rollouts]),
        **batch.corrections[name],
    )
    weights = importance_weights(name, tokens)
    results = [np.zeros(len(mask), dtype=np.float32) for mask in masks]
    for result, mask, values in zip(results, masks, weights.split(counts), strict=True):
        result[mask] = values.numpy()
    return results
