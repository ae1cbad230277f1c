"""Rollouts laid end to end for one forward pass, and the logprobs of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.model.attention import EXACT_ROWS, PackedContext
from headrace.model.head import AllowedTokens
from headrace.model.load import hidden_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.model.head import Head
    from headrace.types import Array, Rollout


@dataclass(frozen=True)
class Packed:
    """N target tokens among T packed ones; the hidden state one row before a target predicts it."""

    token_ids: Tensor
    positions: Tensor
    lengths: list[int]
    """Of each sequence; in exact mode the last may be padding."""
    targets: Tensor
    """[N] the row of each target token among all rows."""
    sequence: Tensor
    """[N] which rollout a target belongs to."""
    temperatures: Tensor
    allowed: AllowedTokens | None

    def gather(self, arrays: Sequence[Array]) -> Tensor:
        """One value per target from per-token arrays, one array per rollout."""
        flat = torch.from_numpy(np.concatenate(arrays)).to(self.targets.device)
        return flat.index_select(0, self.targets)


def pack(
    rollouts: Sequence[Rollout], is_target: Sequence[Array], *, device: torch.device | str = "cpu", exact: bool = False
) -> Packed:
    """Lay rollouts end to end. `is_target` [T] bool per rollout says which tokens' logprobs are wanted."""
    lengths = [len(rollout) for rollout in rollouts]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    token_ids = np.concatenate([rollout.token_ids for rollout in rollouts]).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    is_wanted = np.concatenate(is_target) & (positions > 0)
    targets = np.flatnonzero(is_wanted)
    sequence = np.searchsorted(starts, targets, side="right") - 1
    temperatures = np.concatenate([rollout.temperatures for rollout in rollouts])[targets]
    temperatures = np.where(temperatures == 0, 1, temperatures).astype(np.float32)  # a greedy draw is scored at 1
    allowed = _allowed(rollouts, targets - starts[sequence], sequence, device=device)
    padding = -len(token_ids) % EXACT_ROWS if exact else 0
    if padding:
        token_ids, positions = np.pad(token_ids, (0, padding)), np.concatenate([positions, np.arange(padding)])
        lengths.append(padding)

    def to_device(array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Packed(
        token_ids=to_device(token_ids),
        positions=to_device(positions),
        lengths=lengths,
        targets=to_device(targets),
        sequence=to_device(sequence),
        temperatures=to_device(temperatures),
        allowed=allowed,
    )


def packed_logprobs(model: PreTrainedModel, head: Head, packed: Packed, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """(logprob, entropy) of every target, one forward pass; differentiable."""
    context = PackedContext(packed.lengths, device=packed.token_ids.device, exact=exact)
    hidden = hidden_states(model, packed.token_ids, packed.positions, context)
    rows = hidden.index_select(0, packed.targets - 1)
    wanted = packed.token_ids.index_select(0, packed.targets)
    return head.logprobs(rows, wanted, packed.temperatures, allowed=packed.allowed)


def micro_batches(lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Members of each forward pass: longest first into the fullest pass they fit, so that few are needed.

    A sequence longer than the budget gets a pass of its own.
    """
    passes: list[list[int]] = []
    room: list[int] = []
    for member in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fits = [index for index, left in enumerate(room) if left >= lengths[member]]
        if fits:
            best = min(fits, key=lambda index: room[index])
            passes[best].append(member)
            room[best] -= lengths[member]
        else:
            passes.append([member])
            room.append(budget - lengths[member])
    return [sorted(members) for members in passes]


def score(
    model: PreTrainedModel,
    head: Head,
    rollouts: Sequence[Rollout],
    *,
    budget: int,
    device: torch.device | str = "cpu",
    exact: bool = False,
) -> list[Array]:
    """[T] float32 per rollout: each token's logprob given those before it; 0 for the first."""
    results = [np.zeros(len(rollout), dtype=np.float32) for rollout in rollouts]
    for members in micro_batches([len(rollout) for rollout in rollouts], budget=budget):
        chosen = [rollouts[member] for member in members]
        packed = pack(chosen, [np.ones(len(rollout), dtype=bool) for rollout in chosen], device=device, exact=exact)
        with torch.no_grad():
            values = packed_logprobs(model, head, packed, exact=exact)[0].cpu().numpy()
        begin = 0
        for member in members:
            results[member][1:] = values[begin : begin + len(rollouts[member]) - 1]
            begin += len(rollouts[member]) - 1
    return results


def _allowed(rollouts: Sequence[Rollout], index: Array, sequence: Array, *, device: torch.device | str) -> AllowedTokens | None:
    masks = [rollout.sampling_mask for rollout in rollouts]
    if all(mask is None for mask in masks):
        return None
    nothing = np.zeros(0, dtype=np.int32)
    pairs = ((masks[which], int(at)) for which, at in zip(sequence, index, strict=True))
    rows = [nothing if mask is None else mask.row(at) for mask, at in pairs]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    ids = np.concatenate([*rows, nothing]).astype(np.int64)
    return AllowedTokens(offsets=torch.from_numpy(offsets).to(device), ids=torch.from_numpy(ids).to(device))
