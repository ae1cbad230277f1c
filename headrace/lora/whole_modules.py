"""Modules that are trained whole beside an adapter, which holds a copy of their parameters: PEFT's `modules_to_save`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.lora.peft_folder import AdapterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class WholeModule:
    module: nn.Module
    name: str

    def parameters(self) -> dict[str, Tensor]:
        """By their names in the adapter, which are those in the model."""
        return {f"{self.name}.{each}": parameter for each, parameter in self.module.named_parameters()}


def find_whole_modules(model: PreTrainedModel, wanted: Sequence[str]) -> dict[str, WholeModule]:
    """Those that `lora.whole` names, by name."""
    found: dict[str, WholeModule] = {}
    modules = {name: module for name, module in model.named_modules() if next(module.parameters(), None) is not None}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    is_tied = ends[0].weight is ends[1].weight
    for target in wanted:
        matched = [name for name in modules if f".{name}".endswith(f".{target}")]
        if not matched:
            near = ", ".join(difflib.get_close_matches(target, {name.rpartition(".")[2] for name in modules}, n=3, cutoff=0.0))
            raise AdapterError(f"lora.whole = {target!r}: the model has no such module (nearest: {near})")
        if is_tied and any(modules[name] in ends for name in matched):
            raise AdapterError(f"lora.whole = {target!r}: the model's head is tied to its embedding; leave it out")
        found |= {name: WholeModule(modules[name], name) for name in matched}
    return found
