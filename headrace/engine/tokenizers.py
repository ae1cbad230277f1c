"""What an engine needs of a model's tokenizer: the tokens that end a turn, and the text of stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig, PreTrainedTokenizerBase


def stop_tokens(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a turn: the tokenizer's, and those the model's generation settings name."""
    named = getattr(generation, "eos_token_id", None)
    listed = named if isinstance(named, list) else [named]
    return tuple(sorted({int(token) for token in [tokenizer.eos_token_id, *listed] if token is not None}))


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """From tokens to the text in which stop strings are looked for: the text that rewards see, and that vLLM searches."""

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode
