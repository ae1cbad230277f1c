"""`engine.kind = "vllm"`: a stock vLLM server over HTTP, for models past one GPU."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from headrace.engine.kind import EngineKind
from headrace.partial import pauses_unfinished
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.engine.kind import EnginePlace, OpenedEngine
    from headrace.engine.native.engine_memory import EngineMemory
    from headrace.engine.settings import EngineSettings
    from headrace.model import ModelShape
    from headrace.observe import Timeline
    from headrace.sync import WeightSync


class VllmKind(EngineKind):
    name = section = "vllm"
    runs_inline = False
    can_sleep = False
    has_server = True

    def num_engines(self, settings: EngineSettings) -> int:
        return len(settings.vllm.urls) or settings.count

    def identity(self, settings: EngineSettings, given: dict[str, Any]) -> dict[str, Any]:
        """What its servers are started with; where they run decides nothing."""
        return {**super().identity(settings, given), "vllm": {"arguments": settings.vllm.arguments}}

    def check(self, recipe: Recipe) -> None:
        temperature, settings = recipe.sampling.temperature, recipe.engine.vllm
        if not 0.01 <= temperature <= 2:
            raise ConfigError(f"sampling.temperature = {temperature}: vLLM samples at temperatures from 0.01 to 2")
        if settings.start_seconds >= recipe.deadline:
            raise ConfigError(
                f"engine.vllm.start_seconds = {settings.start_seconds:g}: a run stops after deadline = {recipe.deadline:g} s "
                f"without news; raise that first"
            )
        if pauses_unfinished(recipe) and recipe.partial.pausing.keeps_kv:
            raise ConfigError(
                "partial.interrupt = 'keep': vLLM cannot score new weights while it keeps unfinished rollouts of a synchronous "
                "run paused; set it to 'abort'"
            )

    def describe(self, settings: EngineSettings, *, max_tokens: int) -> list[str]:
        vllm, count = settings.vllm, self.num_engines(settings)
        started = f"started here {shlex.join(vllm.command_line())}".rstrip()
        return [
            self._sizes(settings, max_tokens=max_tokens, counted="engine.vllm.urls" if vllm.urls else "engine.count"),
            f"vllm       {count} server(s), {'running already' if vllm.urls else started}",
        ]

    def check_machine(self, recipe: Recipe, *, device: str) -> None:
        """A server that is to be started can be, and weights can get into it."""
        from headrace.engine.vllm.placement import choose_handover, cpu_cache_gigabytes
        from headrace.engine.vllm.server import choose_python, find_vllm

        cpu_cache_gigabytes()
        choose_handover(recipe, device=device)
        if not recipe.engine.vllm.urls:
            find_vllm(choose_python(recipe.engine.vllm.python))

    def listens_on_host(self, recipe: Recipe, *, device: str) -> bool:
        from headrace.engine.vllm.placement import choose_handover

        return choose_handover(recipe, device=device) == "nccl"

    def receives_on(self, recipe: Recipe, index: int, *, device: str, trainer: str, engine: str) -> str:
        from headrace.engine.vllm.placement import receiving_device

        return receiving_device(recipe, index, device=device, trainer=trainer, engine=engine)

    def predict_memory(
        self, recipe: Recipe, shape: ModelShape, *, context: int, free: int, most_blocks: int, on_gpu: bool, total: int
    ) -> tuple[EngineMemory, int]:
        from headrace.engine.vllm.placement import predict_memory

        return predict_memory(recipe, shape, context=context, free=free, on_gpu=on_gpu, total=total)

    async def open(
        self, recipe: Recipe, model_path: str, place: EnginePlace, *, sync: WeightSync, timeline: Timeline
    ) -> OpenedEngine:
        from headrace.engine.vllm.open import open_engine

        return await open_engine(recipe, model_path, place, sync=sync, timeline=timeline)
