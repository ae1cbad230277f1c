"""What an engine kind tells the rest of Headrace about itself, and how its engines are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from headrace.partial import Interrupt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.engine.native.engine_memory import EngineMemory
    from headrace.engine.protocol import InlineEngine, ProcessEngine
    from headrace.engine.settings import EngineSettings
    from headrace.model import ModelShape
    from headrace.observe import Timeline
    from headrace.sync import WeightSync


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """Which of a run's engines to open, and where. Made by the process it will run in."""

    name: str
    index: int
    device: str
    receives_on: str
    """Where it receives new weights (`EngineKind.receives_on`)."""
    log: Path
    """For the output of a server started for it."""
    folder: Path
    """Where to write new weights for a server that reads files."""
    prefix: str = "headrace"
    """Of names in shared places (`leftovers.py`)."""
    most_blocks: int = 0
    """The most KV blocks in use at once; 0 if unknown."""
    is_far: bool = False
    """On a host that has joined the run, where `device` is for this engine."""


@dataclass(frozen=True, kw_only=True)
class OpenedEngine:
    """A loaded engine in its own process, not yet started."""

    engine: ProcessEngine
    stop_ids: tuple[int, ...]
    """The model's own stop tokens."""
    server_command: tuple[str, ...] = ()
    """Of the server that was started for it, if any."""
    close: Callable[[], None] = lambda: None
    """Stops what was started for it. Called when the process ends."""


class EngineKind:
    """One choice of `engine.kind`. The defaults describe an engine that does everything in the process it runs in."""

    name: ClassVar[str]
    section: ClassVar[str] = ""
    """Its own section of `[engine]`, which recipes with another kind must leave alone."""
    interrupts: ClassVar[frozenset[Interrupt]] = frozenset(Interrupt)
    """What it can do with rollouts in flight when new weights come (`partial.interrupt`)."""
    payloads: ClassVar[frozenset[str] | None] = None
    """In what form it takes new weights (`sync.payload`); None takes every form."""
    runs_inline: ClassVar[bool] = True
    """Whether it also runs on the launcher's event loop (`orchestrate = "inline"`)."""
    can_sleep: ClassVar[bool] = True
    """Whether it can give memory back while the trainer trains (`engine.sleep`)."""
    records_routing: ClassVar[bool] = False
    """Whether it can tell which experts each token was sent to (`engine.record_routing`)."""
    records_entropy: ClassVar[bool] = False
    """Whether it can tell the entropy of each token's distribution (`engine.record_entropy`)."""
    is_exact: ClassVar[bool] = False
    """Whether its logprobs equal the trainer's bitwise (`exact`)."""
    has_server: ClassVar[bool] = False
    """Whether a server computes, and the engine's process only passes rollouts and weights on."""

    # From the recipe alone; nothing is loaded

    def num_engines(self, settings: EngineSettings) -> int:
        return settings.count

    def check(self, recipe: Recipe) -> None:
        """Raise `ConfigError` for settings this engine cannot follow."""

    def describe(self, settings: EngineSettings, *, max_tokens: int) -> list[str]:
        """Lines of the dry run."""
        return [self._sizes(settings, max_tokens=max_tokens, counted="engine.count")]

    def _sizes(self, settings: EngineSettings, *, max_tokens: int, counted: str) -> str:
        count = self.num_engines(settings) or "each that joins"
        return (
            f"engine     {count} × {settings.slots} rollouts decoded at once ({counted}, engine.slots), "
            f"{max_tokens} new tokens each at most"
        )

    def gpus_for_itself(self, recipe: Recipe) -> int:
        """How many GPUs an engine shares with no other on a host that joins; 0 if it may share one."""
        return 0

    # From the recipe and this machine; `device` is "cpu" or "cuda"

    def check_machine(self, recipe: Recipe, *, device: str) -> None:
        """Raise `ConfigError` if this machine lacks what the engine needs."""

    def check_model(self, recipe: Recipe, shape: ModelShape) -> None:
        """Raise `ConfigError` for a model that the engine cannot divide among its GPUs. Only called if it has several."""

    def listens_on_host(self, recipe: Recipe, *, device: str) -> bool:
        """Whether the engine's process listens on `sync.host` to pass weights on."""
        return False

    def receives_on(self, recipe: Recipe, index: int, *, device: str, trainer: str, engine: str) -> str:
        """The device on which an engine's process receives new weights; `trainer` and `engine` are the devices of these two."""
        return engine

    def versions_in_folder(self, recipe: Recipe, *, device: str) -> int:
        """How many versions of the weights engines keep in `sync.folder` for their servers."""
        return 0

    def predict_memory(
        self, recipe: Recipe, shape: ModelShape, *, context: int, free: int, most_blocks: int, on_gpu: bool, total: int
    ) -> tuple[EngineMemory, int]:
        """(bytes of the engine's process, of its server). `free` is available at its start, `total` the size of its GPU."""
        from headrace.engine.native.engine_memory import predict_engine_memory

        dtype = recipe.model.dtype
        memory = predict_engine_memory(
            shape, recipe.engine, dtype=dtype, context=context, free=free, most_blocks=most_blocks, on_gpu=on_gpu
        )
        return memory, 0

    def gpu_memory(self, recipe: Recipe, shape: ModelShape, *, context: int) -> EngineMemory:
        """On each GPU of an engine, wherever that is; without a KV cache whose size is still to be chosen there."""
        from headrace.engine.native.engine_memory import predict_engine_memory

        return predict_engine_memory(shape, recipe.engine, dtype=recipe.model.dtype, context=context, free=0)

    # Engines

    def make_inline(
        self, recipe: Recipe, model_path: str, *, device: str, sync: WeightSync, timeline: Timeline, most_blocks: int
    ) -> tuple[InlineEngine, tuple[int, ...]]:
        """(the engine, the model's stop tokens). Only called for kinds that run inline."""
        raise NotImplementedError

    async def open(
        self, recipe: Recipe, model_path: str, place: EnginePlace, *, sync: WeightSync, timeline: Timeline
    ) -> OpenedEngine:
        """Load the engine. Called in the process that will run it."""
        raise NotImplementedError
