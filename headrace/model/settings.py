"""The recipe's `[model]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.settings import check


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The policy."""

    path: str = "builtin:tiny"
    """A Hugging Face folder or hub name, or `builtin:tiny`: a character-level Qwen3 made from scratch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation, in the engine and in the trainer."""
    context: int = 0
    """The most tokens a rollout may have; 0 takes the model's own limit."""
    hidden_size: int = 96
    """Width of `builtin:tiny`."""
    num_layers: int = 2
    """Depth of `builtin:tiny`."""
    num_heads: int = 3
    """Attention heads of `builtin:tiny`."""

    def __post_init__(self) -> None:
        check(self.context >= 0, "context", self.context, "≥ 0")
        for name in ("hidden_size", "num_layers", "num_heads"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")
