"""What is served, and prompts as tokens it can take."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.server.errors import ApiError, bad
from headrace.engine.server.text import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Served:
    """What requests are read against."""

    tokenizer: PreTrainedTokenizerBase
    model_name: str
    context: int
    """The most tokens of a prompt and its completion together."""
    vocabulary: int
    """How many token ids the model has."""
    stop_ids: tuple[int, ...]
    """End a completion unless `ignore_eos`."""

    @functools.cached_property
    def max_characters(self) -> int:
        """No longer text fits the context, were it all of the longest token."""
        return self.context * max(len(token) for token in self.tokenizer.get_vocab())


def encode_prompt(text: str, name: str, served: Served, *, add_special: bool) -> tuple[int, ...]:
    """The tokens of a prompt, which the parameter `name` gave.

    Text that cannot fit is refused unread: megabytes take seconds to tokenize, in which nobody else is answered.
    """
    if len(text) > served.max_characters:
        message = f"{name}: a text of {len(text)} characters is longer than the context of {served.context} tokens can be"
        raise ApiError(400, message, param=name, code="context_length_exceeded")
    ids = encode(served.tokenizer, text, add_special=add_special)
    if ids and max(ids) >= served.vocabulary:
        message = f"the tokenizer gives token id {max(ids)}, which is outside the model's vocabulary of {served.vocabulary}"
        raise bad(name, message)
    return ids
