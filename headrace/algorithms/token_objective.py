"""The objective of a batch, a pure function of per-token tensors:

Σ weight · (correction · loss + uncorrected loss + β KL − entropy weight · entropy)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from headrace.algorithms.columns import ENTROPY, REFERENCE
from headrace.algorithms.corrections import BATCH_WIDE, JUDGES_CURRENT, MASKS, CorrectedTokens, importance_weights
from headrace.algorithms.losses import KL_ESTIMATORS, call_loss, missing_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.algorithms.tokens import TokenTensors
    from headrace.records import Array, Batch


class Objective(NamedTuple):
    """The objective of one pass: `loss` is a sum over tokens, `correction` [N] are weights, `seen` are metrics of [N] each."""

    loss: Tensor
    correction: Tensor
    seen: dict[str, Tensor]


def objective(tokens: TokenTensors, weights: Tensor, batch: Batch, *, correction: Tensor | None = None) -> Objective:
    """Apply the loss, the KL and the correction that `batch` names; only its names and constants are read. `weights` [N] are
    the batch's. `correction` [N], from `batch_correction`, is required for corrections in `BATCH_WIDE`."""
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
    if correction is None:
        assert batch.correction not in BATCH_WIDE, f"{batch.correction} is computed over the whole batch"
        judged = tokens.logprobs.detach() if batch.correction in JUDGES_CURRENT else tokens.proximal
        corrected = CorrectedTokens(
            log_ratio=judged - tokens.recorded,
            sequence=tokens.sequence,
            num_sequences=tokens.num_sequences,
            advantages=tokens.advantages,
            **batch.correction_constants,
        )
        correction = importance_weights(batch.correction, corrected)
    losses = losses * correction if uncorrected is None else losses * correction + uncorrected
    return Objective((losses * weights).sum(), correction, seen)


def ratio_base(correction: str, *, recorded: Tensor, proximal: Tensor) -> Tensor:
    """Return the denominator of ratios: π_prox if the correction contains π_prox/μ, else μ."""
    return recorded if correction == "none" or correction in MASKS else proximal


def batch_correction(batch: Batch, proximal: Sequence[Array]) -> list[Array]:
    """[T] float32 per rollout: the batch's correction, computed over all its trained tokens at once; 0 on other tokens.
    `proximal`: [T] per rollout, logprobs at the start of the version. For corrections in `BATCH_WIDE` only this is independent
    of packing; for others it equals what `objective` computes."""
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
        **batch.correction_constants,
    )
    weights = importance_weights(batch.correction, tokens)
    results = [np.zeros(len(mask), dtype=np.float32) for mask in masks]
    for result, mask, values in zip(results, masks, weights.split(counts), strict=True):
        result[mask] = values.numpy()
    return results
