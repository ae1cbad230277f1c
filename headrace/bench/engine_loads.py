"""What the engine benchmark asks for: model shapes, and loads of requests that every engine gets alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
"""For `--quick`: shows that everything runs, in seconds."""


def write_random_model(shape: dict[str, Any], folder: Path, *, dtype: str, seed: int = 0) -> None:
    """A model of this shape with random weights as a Hugging Face folder, without a tokenizer and without stop tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {name: value for name, value in shape.items() if name != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **given, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Workload:
    """Requests as tokens; no two turns have the same, so that no engine can have them in a cache."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    """Tokens to be drawn for each prompt; nothing else ends a request."""
    is_group: bool = False
    """Whether all requests are siblings on one prompt."""

    @property
    def num_tokens(self) -> int:
        """To be drawn in all."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Load:
    """A kind of workload: what stays the same from turn to turn."""

    name: str
    prompt_tokens: int
    lengths: tuple[int, ...]
    goal: str = ""
    """Of its tokens a second."""
    is_group: bool = False
    """Whether all requests are siblings on one prompt."""

    @classmethod
    def uniform(cls, count: int, prompt_tokens: int, length: int, *, goal: str = "", is_group: bool = False) -> Load:
        """`count` requests of one size."""
        name = f"{count} {'siblings' if is_group else '×'} ({prompt_tokens} + {length})"
        return cls(name, prompt_tokens, (length,) * count, goal=goal, is_group=is_group)

    @classmethod
    def long_tail(cls, count: int, prompt_tokens: int, *, mean: float, cap: int) -> Load:
        """Lengths as completions of one batch have them: most are short, a few are very long."""
        lengths = lognormal_lengths(count, mean=mean, sigma=1.0, cap=cap)
        return cls(f"long tail, {count} × ({prompt_tokens} + {min(lengths)}…{max(lengths)})", prompt_tokens, lengths)

    def shortened(self, length: int) -> Load:
        """As many requests on prompts as long, with few tokens each: enough to load kernels."""
        return replace(self, lengths=tuple(min(length, own) for own in self.lengths))

    def draw(self, *, vocabulary: int, seed: int) -> Workload:
        """The requests of one turn; no prompt begins as one of another turn or load does, so that nothing is cached."""
        random = np.random.default_rng([seed, *self.name.encode()])
        count = len(self.lengths)
        prompts = random.integers(1, vocabulary, size=(1 if self.is_group else count, self.prompt_tokens)).tolist()
        return Workload(tuple(map(tuple, prompts * (count if self.is_group else 1))), self.lengths, is_group=self.is_group)


def lognormal_lengths(count: int, *, mean: float, sigma: float, cap: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of this mean before the cap, the same ones on every machine."""
    center = math.log(mean) - sigma**2 / 2
    drawn = np.random.default_rng(seed).lognormal(center, sigma, size=count)
    return tuple(int(length) for length in np.clip(np.rint(drawn), 1, cap))
