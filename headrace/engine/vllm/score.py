"""Logprobs of given tokens under the weights of a vLLM server.

The server returns a prompt's logprobs under the model's own distribution. For another temperature or a sampling mask, they are
computed from the logprobs of all tokens that could have been sampled, whose differences are those of the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.vllm.api import VllmRefused

if TYPE_CHECKING:
    from headrace.engine.vllm.api import VllmApi
    from headrace.records import Array, Rollout


async def score(api: VllmApi, rollout: Rollout, *, salt: str, may_ask_for_all: bool) -> Array:
    """[T] float32, 0 for the first token; `may_ask_for_all`: the server gives the logprobs of the whole vocabulary."""
    changed = _changed(rollout)
    if changed and not may_ask_for_all:
        raise VllmRefused(
            f"rollout {rollout.id!r} was sampled at a temperature or from a part of the vocabulary, and this vLLM does not "
            f"give the logprobs of all of it (--max-logprobs): it cannot be scored there"
        )
    values, rows = await api.prompt_logprobs(rollout.token_ids.tolist(), salt=salt, whole=bool(changed))
    for index, temperature in changed.items():
        mask = None if rollout.sampling_mask is None else rollout.sampling_mask.row(index)
        values[index] = _logprob(rows[index - 1], int(rollout.token_ids[index]), temperature, mask)
    return values


def _changed(rollout: Rollout) -> dict[int, float]:
    """The temperatures of tokens not sampled from the model's own distribution, by index; greedy tokens are scored at 1."""
    mask, changed = rollout.sampling_mask, {}
    for index, temperature in enumerate(np.where(rollout.temperatures == 0, 1.0, rollout.temperatures).tolist()):
        if index and (temperature != 1 or (mask is not None and len(mask.row(index)))):
            changed[index] = temperature
    return changed


def _logprob(row: dict[int, float], token: int, temperature: float, mask: Array | None) -> float:
    logits = (
        np.fromiter((row[int(each)] for each in (row if mask is None or not len(mask) else mask)), np.float64) / temperature
    )
    highest = logits.max()
    return float(row[token] / temperature - highest - np.log(np.exp(logits - highest).sum()))
