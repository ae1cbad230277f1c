"""Models to train from random weights: a Hugging Face folder with a tokenizer as large as the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.bench.engine_loads import write_random_model

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np


def build_words(vocabulary: int) -> PreTrainedTokenizerFast:
    """One made-up word for each token, `w0` to `w{vocabulary - 1}`, between spaces.

    No token ends a turn: every completion then has all the tokens it may have, and no `min_tokens` has to forbid one, which
    would cut the distribution and record the cut with every token.
    """
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", clean_up_tokenization_spaces=False)


def write_model(shape: dict[str, Any], folder: Path, *, dtype: str) -> str:
    """The folder, with a model of this shape and its tokenizer in it."""
    write_random_model(shape, folder, dtype=dtype)
    build_words(int(shape["vocab_size"])).save_pretrained(folder)
    return str(folder)


def random_text(random: np.random.Generator, *, words: int, vocabulary: int) -> str:
    """As many tokens as words."""
    return " ".join(f"w{token}" for token in random.integers(1, vocabulary, size=words))
