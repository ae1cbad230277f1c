"""What `headrace serve` offers beyond `Sampling`. Training does not: a trainer could not recompute such a distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, logprob) of the likeliest tokens, the likeliest first."""


class GrammarError(ValueError):
    """The grammar of a call cannot be followed any further: it is too complex, or the model has no token for what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """How a call's own tokens change what it samples next, and how much it tells of the distribution it samples from."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the completion."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the completion."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it is in the completion."""
    grammar: LLMatcher | None = None
    """At its start; every call follows a copy. Once complete, it allows the model's stop tokens only."""
    top_logprobs: int = 0
    """How many of the likeliest tokens come with each sampled one."""
