"""The recipe's `[lora]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from headrace.settings import check

if TYPE_CHECKING:
    from headrace.records import Plain

ALL = "all"
FOUR_BITS: Final = "nf4"


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Train a low-rank adapter instead of the weights."""

    rank: int = 0
    """Of the adapter's matrices; 0 trains all weights."""
    alpha: float = 32.0
    """The adapter's output is multiplied by alpha ÷ rank."""
    targets: tuple[str, ...] = (ALL,)
    """The linear layers that get an adapter, by the last parts of their names, such as `q_proj` or `mlp.up_proj`; `all`: every
    one but the head. `experts`, or `experts.down_proj`, names weights of experts, each of which gets matrices of its own."""
    whole: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapter, by the last parts of their names, such as `lm_head` or `embed_tokens`;
    PEFT's `modules_to_save`."""
    rslora: bool = False
    """Multiply by alpha ÷ √rank instead, so that higher ranks learn as fast (rank-stabilised LoRA)."""
    quantize: Literal["none", "nf4"] = "none"
    """`nf4`: the trainer holds the frozen weights of linear layers in 4 bits (QLoRA). They are rounded to such numbers once;
    engines compute with the same numbers in model.dtype. Needs bitsandbytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        object.__setattr__(self, "whole", tuple(self.whole))
        check(self.rank >= 0, "rank", self.rank, "≥ 0")
        check(0 < self.alpha < math.inf, "alpha", self.alpha, "a number above 0")
        others = [target for target in self.targets if target != ALL]
        is_named = bool(self.targets) and all(self.targets)
        is_clear = ALL not in self.targets or all("experts" in target.split(".") for target in others)
        check(self.is_on or self.quantize == "none", "quantize", self.quantize, "'none' without an adapter; set rank")
        check(all(self.whole), "whole", list(self.whole), "names of modules")
        check(is_named and is_clear, "targets", list(self.targets), "names of layers, or 'all', alone or with names of experts")

    @property
    def is_quantized(self) -> bool:
        return self.is_on and self.quantize != "none"

    @property
    def is_on(self) -> bool:
        return self.rank > 0

    @property
    def names_experts(self) -> bool:
        return any("experts" in target.split(".") for target in self.targets)

    def to_plain(self) -> dict[str, Plain] | None:
        """What a weight update says besides the tensors, whose names are the targets; None if it is off."""
        told: dict[str, Plain] = {"rank": self.rank, "alpha": self.alpha, "rslora": self.rslora}
        return told | ({"whole": list(self.whole)} if self.whole else {}) if self.is_on else None

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
