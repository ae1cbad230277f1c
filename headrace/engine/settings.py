"""The recipe's `[sampling]` and `[engine]`, and the table of engine kinds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace.engine.native.kind import NativeKind
from headrace.engine.vllm.kind import VllmKind
from headrace.engine.vllm.settings import VllmSettings
from headrace.settings import ELASTIC, OPERATIONAL, ConfigError, check, to_dict

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.engine.kind import EngineKind

KINDS: dict[str, EngineKind] = {kind.name: kind for kind in (NativeKind(), VllmKind())}
"""The choices of `engine.kind`: to add one, write its `EngineKind` and name it here."""

if TYPE_CHECKING:
    KindName: TypeAlias = str
else:
    KindName = Literal[tuple(KINDS)]


@dataclass(frozen=True, kw_only=True)
class DistributionSettings:
    """What tokens are sampled from."""

    temperature: float = 1.0
    """Above 0. The trainer applies `sampling.temperature` too; `evaluate.greedy` decodes held-out tasks greedily."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all. In training, any cut-off is recorded and replayed."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens that holds this much probability."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""

    def __post_init__(self) -> None:
        wanted = "a number above 0; evaluate.greedy decodes greedily"
        check(0 < self.temperature < math.inf, "temperature", self.temperature, wanted)
        check(self.top_k >= 0, "top_k", self.top_k, "≥ 0")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        check(0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(DistributionSettings):
    """How training rollouts are sampled."""

    max_tokens: int = 256
    """At most this many new tokens."""
    min_tokens: int = 0
    """No stop token before this many."""
    stop: tuple[str, ...] = ()
    """Texts that end a rollout, besides the model's own stop tokens. Looked for in the text that rewards see, which has no
    special tokens; the text of one such token, alone, stands for the token itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "≥ 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "between 0 and max_tokens")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engines that generate."""

    kind: KindName = "native"
    """`native`: the embedded engine, which runs the trainer's own model code. `vllm`: a stock vLLM server over HTTP, for models
    past one GPU."""
    count: int = field(default=1, metadata=ELASTIC)
    """Engine processes, each with slots of its own. 0, with `cluster.listen`: only those of hosts that join."""
    max_count: int = field(default=0, metadata=ELASTIC)
    """With orchestrate = "ray": the most engines. The run adds engines while it is bound by them, and gives them back, down to
    `count`, while they idle. 0: `count`."""
    threads: int = field(default=0, metadata=ELASTIC)
    """Of torch on CPU in each engine; 0 takes `threads`."""
    restarts: int = field(default=3, metadata=OPERATIONAL)
    """How often within an hour each engine that died or stopped answering is started again. Then the run goes on with the
    others; without any, it ends."""
    slots: int = field(default=256, metadata=ELASTIC)
    """Rollouts decoded at once, by each engine."""
    block_size: int = field(default=16, metadata=ELASTIC)
    """Tokens in a KV block; exact mode needs 16."""
    kv_blocks: int = field(default=0, metadata=ELASTIC)
    """KV blocks in all; 0 takes what the rollouts that can be in flight need (the longest of the first prompts and
    `sampling.max_tokens`), within 40 % of the free memory. If they need more, those admitted last are retracted and continue
    later."""
    graphs: bool = field(default=True, metadata=ELASTIC)
    """On a GPU: compile the model's layers and capture steps as CUDA graphs, beside serving. False serves eagerly."""
    record_routing: bool = field(default=False, metadata=ELASTIC)
    """In models with experts: record which experts each token was sent to, and send it to the same ones in training, so that
    the two sides do not disagree because a router tipped over. A byte or two per token, layer and chosen expert."""
    record_entropy: bool = field(default=False, metadata=OPERATIONAL)
    """Record the entropy of the distribution each token was sampled from, as the rollout's column `sampled_entropy`: in nats,
    after temperature and cut-offs, at the weights that sampled it. For rewards and losses of your own."""
    sleep: Literal["never", "cache", "weights"] = field(default="never", metadata=OPERATIONAL)
    """In a synchronous run, what engines free while the trainer trains, so that both use one GPU in turns: `cache` the KV
    cache's memory, `weights` that of the weights too."""
    lend: bool = field(default=False, metadata=ELASTIC)
    """Keep a spare engine on the trainer's device. It sleeps while the trainer trains, and generates while that waits for
    a batch, if measured rates say that this pays."""
    vllm: VllmSettings = field(default_factory=VllmSettings)

    def __post_init__(self) -> None:
        check(self.count >= 0, "count", self.count, "≥ 0")
        check(not 0 < self.max_count < self.count, "max_count", self.max_count, f"≥ count = {self.count}, or 0")
        check(self.threads >= 0, "threads", self.threads, "≥ 0")
        check(self.restarts >= 0, "restarts", self.restarts, "≥ 0")
        check(self.slots >= 1, "slots", self.slots, "≥ 1")
        check(self.block_size >= 1, "block_size", self.block_size, "≥ 1")
        num_servers = len(self.vllm.urls)
        if num_servers and self.count not in (1, num_servers):
            names = f"engine.vllm.urls names {num_servers} server(s), one engine each"
            raise ConfigError(f"count = {self.count}: {names}; leave it 1 or set it to {num_servers}")

    @property
    def num_engines(self) -> int:
        """The fewest that a run starts with."""
        return max(1, engine_kind(self).num_engines(self))

    @property
    def sleeps(self) -> bool:
        """Whether engines give memory back while the trainer trains."""
        return self.sleep != "never"

    @property
    def gives_back_weights(self) -> bool:
        """Whether they give back the weights' memory too, not only the KV cache's."""
        return self.sleep == "weights"

    def describe(self, *, max_tokens: int) -> list[str]:
        """How much is generated at once, and where, for the summary of a recipe."""
        return engine_kind(self).describe(self, max_tokens=max_tokens)


def engine_kind(settings: EngineSettings) -> EngineKind:
    """The kind that `engine.kind` names."""
    return KINDS[settings.kind]


def check_engine_kind(recipe: Recipe) -> None:
    """Refuse what the chosen engine cannot do, and settings that only another engine reads."""
    engine, kind = recipe.engine, engine_kind(recipe.engine)
    named = f"engine.kind = '{kind.name}'"
    if recipe.exact and not kind.is_exact:
        raise ConfigError(f"{named}: exact = true needs the embedded engine; set it to 'native'")
    if engine.sleeps and not kind.can_sleep:
        raise ConfigError(f"engine.sleep = '{engine.sleep}': {named} cannot sleep; leave it 'never'")
    if engine.lend and recipe.exact:
        raise ConfigError("engine.lend = true: what is lent depends on timing, which exact = true does not allow")
    if engine.lend and (recipe.partial.pausing.waits_for_rollouts or recipe.partial.leases):
        raise ConfigError(
            f"engine.lend = true: rollouts of an engine that is recalled continue on others, whose weights may be newer, which "
            f"partial.interrupt = '{recipe.partial.interrupt}' promises not to happen; set that to 'keep', 'retract' or 'abort'"
        )
    for name, is_wanted, can_record in (
        ("record_routing", engine.record_routing, kind.records_routing),
        ("record_entropy", engine.record_entropy, kind.records_entropy),
    ):
        if is_wanted and not can_record:
            raise ConfigError(f"engine.{name} = true: {named} does not record it; leave it false")
    if recipe.is_inline and not kind.runs_inline:
        raise ConfigError(f"{named}: a server is a process of its own; set orchestrate = 'local'")
    for name, value, can in (
        ("partial.interrupt", recipe.partial.interrupt, kind.interrupts),
        ("sync.payload", recipe.sync.payload, kind.payloads),
    ):
        if can is not None and value not in can:
            raise ConfigError(f"{name} = '{value}': {named} cannot do that; set it to one of {', '.join(sorted(can))}")
    for other in KINDS.values():
        if other.section and other is not kind:
            given, usual = (to_dict(each)[other.section] for each in (engine, EngineSettings()))
            for name, value in given.items():
                if value != usual[name]:
                    raise ConfigError(
                        f"engine.{other.section}.{name} = {value!r}: {named} does not look at it; "
                        f"set engine.kind = '{other.name}'"
                    )
    kind.check(recipe)
