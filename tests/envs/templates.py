"""Chat templates of public models, as the package trl ships them, each with a small tokenizer that knows its special tokens."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(trl.__file__).parent / "chat_templates"
_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜]+｜>|</?(?:start_of_turn|end_of_turn|bos|eos|s)>|\[/?(?:gMASK|INST|TOOL_CALLS)\]|<sop>"
)


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a few hundred merges, learned from the template's own text."""
    template = (FOLDER / f"{name}.jinja").read_text()
    special = sorted({*_SPECIAL.findall(template), "<bos>", "<eos>"})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_SPECIAL.sub(" ", template)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=special,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
