"""What an engine needs from a model's tokenizer: the tokens that end a turn, and the text that stop strings are searched in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig, PreTrainedTokenizerBase


def stop_tokens(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a turn: the tokenizer's, and those of the model's generation config."""
    named = getattr(generation, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    return tuple(sorted({int(token) for token in [tokenizer.eos_token_id, *listed] if token is not None}))


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Turns tokens into the text that stop strings are searched in: the same that rewards see and vLLM searches."""

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode
