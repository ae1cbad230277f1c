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

MOST_SCORED = 4096
"""The largest vocabulary whose logprobs are requested for every token of a rollout: an answer has some 50 bytes for each."""
_EVERYTHING = np.zeros(0, np.int32)  # as a mask


async def score(api: VllmApi, rollout: Rollout, *, salt: str, may_ask_for_all: bool, adapter: str = "") -> Array:
    """[T] float32, 0 for the first token; `may_ask_for_all`: the whole vocabulary is few enough to request."""
    token_ids, temperatures, mask = rollout.token_ids.tolist(), rollout.temperatures.tolist(), rollout.sampling_mask
    masks = [_EVERYTHING] * len(token_ids) if mask is None else [mask.row(index) for index in range(len(token_ids))]
    changed = {
        index: (temperature or 1.0, mask_row)  # greedy tokens are scored at 1
        for index, (temperature, mask_row) in enumerate(zip(temperatures, masks, strict=True))
        if index and (temperature not in (0, 1) or len(mask_row))
    }
    if changed and not may_ask_for_all:
        raise VllmRefused(
            f"rollout {rollout.id!r} was sampled at a temperature or from a part of the vocabulary, which has more than "
            f"{MOST_SCORED} tokens: vLLM cannot score it"
        )
    values, rows = await api.prompt_logprobs(token_ids, salt=salt, whole=bool(changed), adapter=adapter)
    for index, (temperature, mask_row) in changed.items():
        row, listed = rows[index - 1], set(mask_row.tolist())
        tokens = listed if any(id >= 0 for id in listed) else [token for token in row if ~token not in listed]
        logits = np.asarray([row[token] for token in tokens]) / temperature
        values[index] = row[token_ids[index]] / temperature - np.logaddexp.reduce(logits)
    return values
