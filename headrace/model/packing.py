"""Rollouts packed end to end for one forward pass, and the logprobs of their tokens.
Siblings may share the rows of their common prefix; its last row predicts the first token of every branch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.model.attention import EXACT_ROWS, Layout, make_context
from headrace.model.fused_head import AllowedTokens
from headrace.model.load import hidden_states
from headrace.model.pass_planning import members_of, plan_passes
from headrace.records import unknown_expert, unknown_routing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.model.head import Head
    from headrace.model.pass_planning import Unit
    from headrace.model.routers import Routers
    from headrace.records import Array, Rollout

_EMPTY_ROWS = 16


@dataclass(frozen=True)
class Packed:
    """One pass: its rows, and N target tokens, in the order of the rollouts and of their tokens. A token's index counts the
    whole rollouts end to end, with shared prefixes repeated."""

    layout: Layout
    token_ids: Tensor  # [rows]
    positions: Tensor  # [rows] in the rollout: a branch continues where its prefix ends
    rows: Tensor  # [N] the row whose hidden state predicts the target
    wanted: Tensor  # [N] the target's token id
    index: Tensor  # [N] the target's index
    sequence: Tensor  # [N] which rollout of the pass the target belongs to
    temperatures: Tensor
    allowed: AllowedTokens | None
    routing: Tensor | None  # [rows, layers with experts, top_k] of int16, as recorded; -1 where unknown

    def gather(self, arrays: Sequence[Array]) -> Tensor:
        """One value per target, from one per-token array per rollout of the pass."""
        flat = torch.from_numpy(np.concatenate(arrays)).to(self.index.device)
        return flat.index_select(0, self.index)


def pack(
    rollouts: Sequence[Rollout],
    is_target: Sequence[Array],
    *,
    units: Sequence[Unit],
    device: torch.device | str = "cpu",
    exact: bool = False,
) -> Packed:
    """Pack rollouts end to end. `is_target` [T] bool per rollout: which tokens' logprobs to compute. `units`: the rollouts of
    this pass and what they share."""
    members = members_of(units)
    rollouts, is_target = [rollouts[member] for member in members], [is_target[member] for member in members]
    lengths = [len(rollout) for rollout in rollouts]
    starts = np.cumsum([0, *lengths])
    layout, origin, row_of = _lay_out(units, starts)
    if exact and len(origin) % EXACT_ROWS:
        padding = -len(origin) % EXACT_ROWS
        layout = Layout([*layout.lengths, padding], [*layout.continues, -1])
        origin = np.pad(origin, (0, padding))  # repeats the first token
    token_ids = np.concatenate([rollout.token_ids for rollout in rollouts]).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    index = np.flatnonzero(np.concatenate(is_target) & (positions > 0))
    sequence = np.searchsorted(starts, index, side="right") - 1
    temperatures = np.concatenate([rollout.temperatures for rollout in rollouts])[index]
    temperatures = np.where(temperatures == 0, 1, temperatures).astype(np.float32)  # greedy tokens are scored at 1
    routing = _routing(rollouts)

    def to_device(array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Packed(
        layout=layout,
        token_ids=to_device(token_ids[origin]),
        positions=to_device(positions[origin]),
        rows=to_device(row_of[index - 1]),
        wanted=to_device(token_ids[index]),
        index=to_device(index),
        sequence=to_device(sequence),
        temperatures=to_device(temperatures),
        allowed=_allowed(rollouts, index - starts[sequence], sequence, device=device),
        routing=None if routing is None else to_device(routing[origin]),
    )


def empty_pass(*, device: torch.device | str, exact: bool = False) -> Packed:
    """A pass over a few tokens without a target, for a rank that has no rollouts while others compute."""
    count = EXACT_ROWS if exact else _EMPTY_ROWS

    def numbers(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return Packed(
        layout=Layout([count], [-1]),
        token_ids=numbers(count),
        positions=torch.arange(count, device=device),
        rows=numbers(0),
        wanted=numbers(0),
        index=numbers(0),
        sequence=numbers(0),
        temperatures=numbers(0, torch.float32),
        allowed=None,
        routing=None,
    )


def packed_hidden(model: PreTrainedModel, packed: Packed, *, exact: bool = False) -> Tensor:
    """[targets, width]: the hidden state that predicts each target."""
    context = make_context(packed.layout, packed.token_ids.device, exact)
    return hidden_states(model, packed.token_ids, packed.positions, context).index_select(0, packed.rows)


def packed_logprobs(model: PreTrainedModel, head: Head, packed: Packed, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """(logprob, entropy) of every target from one forward pass; differentiable. It does not replay routing: its caller does."""
    rows = packed_hidden(model, packed, exact=exact)
    return head.logprobs(rows, packed.wanted, packed.temperatures, allowed=packed.allowed)


def replaying(routers: Routers | None, packed: Packed) -> contextlib.AbstractContextManager[Tensor | None]:
    """Within it, the model with these routers replays the routing of this pass, if it has any: see `Routers.replaying`."""
    if routers is None or packed.routing is None:
        return contextlib.nullcontext()
    return routers.replaying(packed.routing)


def score(
    model: PreTrainedModel,
    head: Head,
    rollouts: Sequence[Rollout],
    *,
    budget: int,
    device: torch.device | str = "cpu",
    exact: bool = False,
    routers: Routers | None = None,
) -> list[Array]:
    """[T] float32 per rollout: each token's logprob; 0 for the first. `budget`: rows per pass. `routers`: the model's, to
    replay the routing that rollouts carry; None routes freely."""
    results = [np.zeros(len(rollout), dtype=np.float32) for rollout in rollouts]
    everything = [np.ones(len(rollout), dtype=bool) for rollout in rollouts]
    for units in plan_passes(rollouts, budget=budget, share=False):
        packed = pack(rollouts, everything, units=units, device=device, exact=exact)
        with torch.no_grad(), replaying(routers, packed):
            values = packed_logprobs(model, head, packed, exact=exact)[0].cpu().numpy()
        sequence = packed.sequence.cpu().numpy()
        for place, member in enumerate(members_of(units)):
            results[member][1:] = values[sequence == place]
    return results


def _lay_out(units: Sequence[Unit], starts: Array) -> tuple[Layout, Array, Array]:
    """The layout, the token index of each row, and the row of each token index. `starts`: of the rollouts, and the end."""
    spans: list[tuple[int, int]] = []  # first and last token index of each segment
    continues: list[int] = []
    repeated: list[tuple[int, int, int]] = []  # (token index, that of the same token in the unit's first rollout, count)
    place = 0
    for unit in units:
        first, prefix = starts[place], -1
        if unit.prefix:
            prefix = len(spans)
            spans.append((first, first + unit.prefix))
            continues.append(-1)
        for start, stop in pairwise(starts[place : place + len(unit.members) + 1]):
            spans.append((start + unit.prefix, stop))
            continues.append(prefix)
            repeated.append((start, first, unit.prefix))
        place += len(unit.members)
    origin = np.concatenate([np.arange(*span) for span in spans])
    row_of = np.empty(starts[-1], dtype=np.int64)
    row_of[origin] = np.arange(len(origin))
    for start, first, count in repeated:
        row_of[start : start + count] = row_of[first : first + count]
    return Layout([int(stop - start) for start, stop in spans], continues), origin, row_of


def _routing(rollouts: Sequence[Rollout]) -> Array | None:
    """[tokens, layers, top_k] int16 of all rollouts, end to end; -1 where unknown. None if none has any."""
    shape = next((each.expert_routing.shape[1:] for each in rollouts if each.expert_routing is not None), None)
    if shape is None:
        return None
    rows = []
    for rollout in rollouts:
        routing = rollout.expert_routing
        if routing is None:
            routing = unknown_routing(len(rollout), num_layers=shape[0], top_k=shape[1], dtype=np.int16)
        rows.append(np.where(routing == unknown_expert(routing.dtype), np.int16(-1), routing))
    return np.concatenate(rows)


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
