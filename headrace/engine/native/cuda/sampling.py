"""Samples tokens on the GPU and updates lengths and ends (stop tokens, limits) there.

`sample` reads the logits once, for the maximum and sum of exponentials of each chunk of the vocabulary. One program per row
then inverts the cumulative distribution at the row's random number: over the chunks, then within the one chunk it falls into.
If some row is restricted (top-k, top-p, min-p, too early for a stop token), `restrict` first finds by bisection the last token
to keep, in order of falling logit and rising id, and sets the rest to -inf.

The arithmetic is that of `native.sampling.sample`; both pass the same tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from headrace.engine.native.cuda.kernels.sampling import chunk_kernel, restrict_kernel, sample_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.native.cuda.slot_state import SlotState
    from headrace.model import Scaling

_CHUNK = 4096  # logits a program reads at once


def restrict(logits: Tensor, slots: Tensor, state: SlotState, scaling: Scaling, allowed: Tensor) -> Tensor:
    """Set the logits a row may not sample to -inf, in place; returns `allowed` [rows, vocabulary] bool, filled."""
    rows, vocabulary = logits.shape
    restrict_kernel[(rows,)](
        logits, allowed, slots, state.sampling, state.lengths, state.floors, state.stops, vocabulary, logits.stride(0),
        state.stops.shape[1], *scaling.values, **scaling.flags,
        CHUNK=min(_CHUNK, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip
    return allowed


def sample(
    logits: Tensor,
    slots: Tensor,
    state: SlotState,
    scaling: Scaling,
    out_tokens: Tensor,
    out_logprobs: Tensor,
    out_entropies: Tensor | None = None,
) -> None:
    """Write each row's token to `out_tokens` (-1 where the rollout had ended), its logprob and, if there is room for it, the
    entropy of what it was sampled from, and update its slot."""
    rows, vocabulary = logits.shape
    size = min(_CHUNK, triton.next_power_of_2(vocabulary))
    chunks = triton.cdiv(vocabulary, size)
    tops = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    sums, bests = torch.empty_like(tops), torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    moments = sums if out_entropies is None else torch.empty_like(tops)
    chunk_kernel[(chunks, rows)](
        logits, slots, state.sampling, tops, sums, bests, moments, vocabulary, logits.stride(0),
        *scaling.values, **scaling.flags, CHUNKS=chunks, CHUNK=size, HAS_ENTROPY=out_entropies is not None, num_warps=4,
    )  # fmt: skip
    sample_kernel[(rows,)](
        logits, slots, state.sampling, state.seeds, state.lengths, state.limits, state.alive, state.tokens, state.stops,
        tops, sums, bests, moments, out_tokens, out_logprobs, out_logprobs if out_entropies is None else out_entropies,
        vocabulary, logits.stride(0), state.stops.shape[1],
        *scaling.values, **scaling.flags, CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), CHUNK=size,
        STOPS_PAD=triton.next_power_of_2(state.stops.shape[1]), HAS_ENTROPY=out_entropies is not None, num_warps=4,
    )  # fmt: skip
