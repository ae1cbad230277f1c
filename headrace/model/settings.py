"""The recipe's `[model]`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.records import NOT_VARIABLES, is_template_variable
from headrace.settings import check, check_least


def bytes_per_number(dtype: str) -> int:
    """Of a `model.dtype`."""
    return 4 if dtype == "float32" else 2


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The policy."""

    path: str = "builtin:tiny"
    """A Hugging Face folder or hub name, or `builtin:tiny`: a character-level Qwen3 made from scratch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and computation, in the engine and in the trainer. `float16` rounds to 11 bits instead of `bfloat16`'s 8, but
    ends at 65,504: the trainer scales the loss, and a model whose activations are larger needs `bfloat16`."""
    context: int = 0
    """The most tokens a rollout may have; 0 takes the model's own limit."""
    chat_template: str = ""
    """A file with a chat template (Jinja) to use instead of the model's own; checkpoints keep it."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template in every prompt, such as `{ enable_thinking = false }`. Checkpoints keep them as the
    template's defaults."""
    hidden_size: int = 96
    """Width of `builtin:tiny`."""
    num_layers: int = 2
    """Depth of `builtin:tiny`."""
    num_heads: int = 3
    """Attention heads of `builtin:tiny`."""

    def __post_init__(self) -> None:
        check_least(0, self, "context")
        check_least(1, self, "hidden_size", "num_layers", "num_heads")
        for name, value in self.chat_template_kwargs.items():
            why = f"a name that a template can use, and none of {', '.join(NOT_VARIABLES)}"
            check(is_template_variable(name), f"chat_template_kwargs.{name}", value, why)
            try:
                json.dumps(value)
            except TypeError:
                check(False, f"chat_template_kwargs.{name}", value, "text, a number, true, false, or lists and tables of them")
