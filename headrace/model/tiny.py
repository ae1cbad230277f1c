"""`builtin:tiny`: a Qwen3 of a few hundred thousand parameters and a character tokenizer, built from scratch."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.model.settings import ModelSettings

NAME = "builtin:tiny"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; its chat template only appends."""
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(_SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|unknown|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_config(settings: ModelSettings, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        head_dim=32,
        max_position_embeddings=settings.context or 256,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_folder(folder: Path, settings: ModelSettings, *, seed: int) -> None:
    """Write a freshly initialised model and its tokenizer as a Hugging Face folder."""
    tokenizer = build_tokenizer()
    config = build_config(settings, tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
