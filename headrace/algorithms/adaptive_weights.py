"""Weights of the KL and of the entropy bonus that adapt. Entropy and KL are measured on the sampled tokens, so they are known
before a version is trained: the mean of −log μ estimates the sampler's entropy, the mean of log μ − log π_ref its KL."""

from __future__ import annotations


def next_kl_weight(weight: float, *, kl: float, target: float, share: float) -> float:
    """Ziegler et al. (2019): β · (1 + clip(KL ÷ target − 1, ±0.2) · share), `share` being the batch ÷ the horizon."""
    return weight * (1 + min(max(kl / target - 1, -0.2), 0.2) * share)


def next_entropy_weight(weight: float, *, entropy: float, target: float, step: float) -> float:
    """Skywork-OR1: a `step` up while the entropy is at most `target`, else down; within [0, 1]."""
    return min(max(weight + (step if entropy <= target else -step), 0.0), 1.0)
