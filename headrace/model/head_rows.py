"""`fused_head` on a GPU: logprob and entropy of a row of logits, and its gradient, reading the logits once each.
Imports Triton: import it only for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from headrace.model.kernels.head import backward_kernel, forward_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.model.fused_head import Scaling

_BLOCK = 4096  # logits that a program holds at once


def forward_rows(
    logits: Tensor, targets: Tensor, temperatures: Tensor, allowed: Tensor | None, scaling: Scaling
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob of each target, entropy, log of the sum of exponentials) of [rows, vocabulary] float32 logits."""
    rows, vocabulary = logits.shape
    found = [logits.new_empty(rows) for _ in range(3)]
    forward_kernel[(rows,)](
        logits, targets, temperatures, logits if allowed is None else allowed, *found, vocabulary, logits.stride(0),
        0 if allowed is None else allowed.stride(0), *scaling.values, **scaling.flags, HAS_MASK=allowed is not None,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip
    return found[0], found[1], found[2]


def backward_rows(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    allowed: Tensor | None,
    totals: Tensor,
    gradients: Tensor,
    scaling: Scaling,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """[rows, vocabulary] of `dtype`: the gradient of Σ gradients · logprobs with respect to the logits."""
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=dtype, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    backward_kernel[(rows, triton.cdiv(vocabulary, block))](
        logits, targets, temperatures, logits if allowed is None else allowed, totals, gradients, out, vocabulary,
        logits.stride(0), 0 if allowed is None else allowed.stride(0), *scaling.values, **scaling.flags,
        HAS_MASK=allowed is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return out
