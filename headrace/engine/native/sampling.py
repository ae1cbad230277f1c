"""Sampling tokens: temperature, top-k, top-p, min-p, and a random number that depends on the request alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.records import Array


class Sampled(NamedTuple):
    token_ids: Tensor
    logprobs: Tensor  # under the distribution sampled from; 0 where the choice was greedy
    allowed: Tensor | None  # [rows, vocabulary] bool, if some row was restricted
    distribution: Tensor  # [rows, vocabulary] logprobs; of greedy rows at temperature 1


def entropies_of(sampled: Sampled, temperatures: Tensor) -> Tensor:
    """[rows] nats, of the distribution that each row was sampled from: 0 for a greedy one, which is certain."""
    entropies = torch.special.entr(sampled.distribution.exp()).sum(dim=-1)
    return torch.where(temperatures == 0, 0.0, entropies)


def uniform(seeds: Array, positions: Array) -> Array:
    """One number in [0, 1) per row, a hash of (request seed, token position): the same in any batch, on any resume."""
    with np.errstate(over="ignore"):
        state = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    numbers: Array = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def sample(
    logits: Tensor, parameters: Tensor, numbers: Tensor, *, forbidden: list[tuple[int, int]], is_restricted: bool
) -> Sampled:
    """Invert the cumulative distribution of each row at its number. `parameters` [rows, 4]: temperature, top-k, top-p, min-p;
    `forbidden`: (row, token id) that cannot be sampled; `is_restricted`: whether some row cannot sample every token."""
    temperature, top_k, top_p, min_p = parameters.unsqueeze(2).unbind(dim=1)
    is_greedy = temperature[:, 0] == 0
    logits = logits / torch.where(temperature == 0, 1.0, temperature)
    allowed = None
    if is_restricted:
        allowed = _allowed(logits, top_k, top_p, min_p, forbidden)
        logits = logits.masked_fill(~allowed, float("-inf"))
    logprobs = torch.log_softmax(logits, dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    threshold = (numbers.to(cumulative) * cumulative[:, -1]).unsqueeze(1)
    sampled = torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_max(logits.shape[1] - 1)
    token_ids = torch.where(is_greedy, logits.argmax(dim=-1), sampled)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    is_certain = is_greedy & ~chosen.isnan()  # a NaN stays one: it fails the rollout
    return Sampled(token_ids, torch.where(is_certain, 0.0, chosen), allowed, logprobs)


def _allowed(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, forbidden: list[tuple[int, int]]) -> Tensor:
    """Restricts in the order other libraries use: forbidden tokens, top-k, top-p of what is left, min-p."""
    if forbidden:
        index = torch.tensor(forbidden, device=logits.device)
        logits = logits.index_put((index[:, 0], index[:, 1]), logits.new_tensor(float("-inf")))
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    keep = (ranks < torch.where(top_k > 0, top_k, logits.shape[1])) & (ordered > float("-inf"))
    probabilities = torch.softmax(ordered.masked_fill(~keep, float("-inf")), dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep &= (before < top_p) | (top_p >= 1)
    keep &= probabilities >= min_p * probabilities[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(1, order, keep)
