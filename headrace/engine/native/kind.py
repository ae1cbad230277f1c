"""`engine.kind = "native"`: the embedded engine, which runs the trainer's own model code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.engine.kind import EngineKind, OpenedEngine
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.engine.kind import EnginePlace
    from headrace.engine.native.core import EngineCore
    from headrace.engine.native.engine import NativeEngine
    from headrace.observe import Timeline
    from headrace.sync import WeightSync


class NativeKind(EngineKind):
    name = "native"
    is_exact = records_routing = records_entropy = True

    def check_machine(self, recipe: Recipe, *, device: str) -> None:
        has_kernels, lora = device == "cuda" and not recipe.exact, recipe.lora
        if has_kernels and recipe.partial.leases and lora.is_on and lora.names_experts:
            raise ConfigError(
                f"partial.interrupt = {recipe.partial.interrupt!r}: a batch on a GPU has one version of experts' adapters "
                f"(lora.targets = {list(lora.targets)}); set it to 'keep'"
            )

    def make_inline(
        self, recipe: Recipe, model_path: str, *, device: str, sync: WeightSync, timeline: Timeline, most_blocks: int
    ) -> tuple[NativeEngine, tuple[int, ...]]:
        from headrace.engine.native.engine import NativeEngine

        core, stop_ids = build_core(recipe, model_path, name="engine-0", device=device, most_blocks=most_blocks)
        return NativeEngine(core, sync=sync, timeline=timeline), stop_ids

    async def open(
        self, recipe: Recipe, model_path: str, place: EnginePlace, *, sync: WeightSync, timeline: Timeline
    ) -> OpenedEngine:
        from headrace.engine.native.engine import NativeEngine

        core, stop_ids = await asyncio.to_thread(
            build_core, recipe, model_path, name=place.name, device=place.device, most_blocks=place.most_blocks
        )
        return OpenedEngine(engine=NativeEngine(core, sync=sync, timeline=timeline), stop_ids=stop_ids)


def build_core(
    recipe: Recipe, model_path: str, *, name: str, device: str, most_blocks: int = 0
) -> tuple[EngineCore, tuple[int, ...]]:
    """(the engine's core, the model's stop tokens). `most_blocks`: KV blocks that can be in use at once, 0 if unknown."""
    from headrace.engine.native.core import EngineCore
    from headrace.engine.native.engine_memory import adapter_places
    from headrace.engine.stop_strings import decoder_of, stop_tokens
    from headrace.model import ModelError, context_limit, load_model, load_tokenizer

    model = load_model(model_path, dtype=recipe.model.dtype, device=device, exact=recipe.exact, lora=recipe.lora)
    tokenizer = load_tokenizer(model_path)
    core = EngineCore(
        model,
        name=name,
        slots=recipe.engine.slots,
        context=context_limit(model, recipe.model.context),
        block_size=recipe.engine.block_size,
        num_blocks=recipe.engine.kv_blocks,
        most_blocks=most_blocks,
        max_tokens=recipe.max_tokens,
        exact=recipe.exact,
        decode=decoder_of(tokenizer),
        graphs=recipe.engine.graphs,
        record_routing=recipe.engine.record_routing,
        record_entropy=recipe.engine.record_entropy,
        adapter_places=adapter_places(recipe.partial),
        keeps_leases=recipe.partial.leases,
    )
    if recipe.engine.record_routing:
        named = f"engine.record_routing = true: {model_path}"
        if core.routers is None:
            raise ModelError(f"{named} has no experts whose routing can be read; leave it false")
        try:
            core.routers.check_replay(model)
        except ModelError as error:
            raise ModelError(f"{named} cannot be replayed: {error}; leave it false") from error
    return core, stop_tokens(model.generation_config, tokenizer)
