"""Requests whose next distribution depends on the tokens they sampled, or that report more of it than one logprob."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.request import Request
    from headrace.engine.shaping import Shaping, TopLogprobs
    from headrace.records import Array


class Shaper:
    """Shapes the logits of one slot. It is made anew whenever its rollout gets a slot, and reads what was sampled before."""

    def __init__(self, request: Request, shaping: Shaping) -> None:
        rollout = request.rollout
        self.error = ""  # why its grammar cannot be followed
        self.num_top = shaping.top_logprobs
        self._shaping = shaping
        self._num_prompt = rollout.calls[0].start if rollout.calls else len(rollout)
        self._matcher = None if shaping.grammar is None else shaping.grammar.deep_copy()
        self._num_matched = 0

    def shape(self, logits: Tensor, token_ids: Array) -> None:
        """Change the logits [vocabulary] in place, given all tokens so far; the order is vLLM's."""
        shaping, sampled = self._shaping, token_ids[self._num_prompt :]
        if shaping.logit_bias:
            biased, bias = zip(*shaping.logit_bias, strict=True)
            logits[list(biased)] += logits.new_tensor(bias)
        if shaping.repetition_penalty != 1:
            seen = torch.from_numpy(np.unique(token_ids).astype(np.int64)).to(logits.device)
            before, penalty = logits[seen], shaping.repetition_penalty
            logits[seen] = torch.where(before > 0, before / penalty, before * penalty)
        if len(sampled) and (shaping.frequency_penalty or shaping.presence_penalty):
            ids, counts = np.unique(sampled, return_counts=True)
            penalties = shaping.frequency_penalty * counts + shaping.presence_penalty
            logits[torch.from_numpy(ids.astype(np.int64)).to(logits.device)] -= logits.new_tensor(penalties)
        if self._matcher is not None:
            allowed = torch.from_numpy(self._allowed(sampled, vocabulary=len(logits)))
            logits.masked_fill_(~allowed.to(logits.device), float("-inf"))
            if self.error:
                logits.fill_(float("nan"))  # fails the rollout

    def _allowed(self, sampled: Array, *, vocabulary: int) -> Array:
        """[vocabulary] bool: the tokens with which the grammar goes on."""
        assert self._matcher is not None
        self._matcher.consume_tokens(sampled[self._num_matched :].tolist())
        self._num_matched = len(sampled)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=vocabulary, bitorder="little").astype(bool)
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
        elif not allowed.any():
            self.error = "the model has no token to go on with"
        return allowed


def find_top(logprobs: Tensor, count: int) -> TopLogprobs:
    """The likeliest tokens of a distribution [vocabulary]; fewer than `count` if no more can be sampled."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if value > float("-inf"))
