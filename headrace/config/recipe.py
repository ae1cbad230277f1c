"""The recipe: all sections of a run, what follows from them, and how a recipe is read."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.buffer import BufferSettings
from headrace.config.across_rooms import check_across_rooms
from headrace.config.other_names import TRL
from headrace.engine import EngineSettings, SamplingSettings
from headrace.model import ModelSettings
from headrace.observe import ObserveSettings
from headrace.partial import PartialSettings
from headrace.run import CheckpointSettings, EvaluateSettings, WarmupSettings
from headrace.score import RewardSettings
from headrace.settings import ConfigError, Origin, apply_overrides, build, check, describe, load_toml, to_dict
from headrace.staleness import StalenessSettings
from headrace.sync import SyncSettings
from headrace.tasks import TaskSettings  # noqa: TC001  (`build` reads the hints while it runs)
from headrace.trainer import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a run is made of."""

    steps: int = 100
    """Versions to train."""
    seed: int = 0
    """Of tasks, sampling and new weights."""
    exact: bool = False
    """Engine and trainer logprobs bitwise equal at equal weights on CPU, and a resumed run bitwise the uninterrupted one."""
    orchestrate: Literal["local", "inline"] = "local"
    """`local`: engines and trainer in processes of their own. `inline`: one process, deterministic under a seed, breakpoints
    work."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    threads: int = 0
    """Of torch on CPU, in each process; 0 shares the cores among them."""
    deadline: float = 600.0
    """Seconds without a token, a score or a version after which the run stops and says what it waits for."""
    heartbeat: float = 60.0
    """Seconds a process may leave the launcher unanswered before it is named and, an engine, started again. A process that
    hears nothing from the launcher for three times as long ends itself; the trainer saves first."""
    model: ModelSettings = field(default_factory=ModelSettings)
    warmup: WarmupSettings = field(default_factory=WarmupSettings)
    tasks: tuple[TaskSettings, ...] = ()
    reward: RewardSettings = field(default_factory=RewardSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    buffer: BufferSettings = field(default_factory=BufferSettings)
    staleness: StalenessSettings = field(default_factory=StalenessSettings)
    partial: PartialSettings = field(default_factory=PartialSettings)
    sync: SyncSettings = field(default_factory=SyncSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)

    def __post_init__(self) -> None:
        check(self.steps >= 1, "steps", self.steps, "≥ 1")
        check(self.seed >= 0, "seed", self.seed, "≥ 0")
        check(self.threads >= 0, "threads", self.threads, "≥ 0")
        check(self.deadline > 0, "deadline", self.deadline, "above 0")
        check(self.heartbeat > 0, "heartbeat", self.heartbeat, "above 0")
        check_across_rooms(self)

    @property
    def is_inline(self) -> bool:
        """Whether launcher, engine and trainer share one process."""
        return self.orchestrate == "inline"

    @property
    def buffer_kind(self) -> str:
        """`buffer.kind` with `auto` resolved."""
        if self.buffer.kind != "auto":
            return self.buffer.kind
        if not self.staleness.gate and not self.staleness.reject:
            return "stream"
        return {0: "synchronous", 1: "one_ahead"}.get(self.staleness.max_lag, "bounded")

    @property
    def num_engines(self) -> int:
        """One for each server of `engine.vllm.urls`, or `engine.count`."""
        return len(self.engine.vllm.urls) or self.engine.count

    def threads_of(self, role: str, *, cores: int) -> int:
        """Of torch in the process of a role: what is set for it, or for all, or its share of the cores."""
        own = {"engine": self.engine.threads, "trainer": self.train.threads}.get(role, 0)
        processes = self.num_engines + 1 if self.orchestrate == "local" else 1
        return own or self.threads or max(1, cores // processes)

    @property
    def canary_limit(self) -> float:
        """`sync.canary_limit`, with 0 resolved."""
        return self.sync.canary_limit or {"float32": 0.01, "bfloat16": 0.3}[self.model.dtype]

    @property
    def correction(self) -> str:
        """`staleness.correct`; the loss `m2po` brings the mask of that name with it."""
        is_m2po = self.train.loss == "m2po" and self.staleness.correct == "none"
        return "m2po" if is_m2po else self.staleness.correct

    @property
    def correction_constants(self) -> dict[str, float]:
        """What the correction takes, with `staleness.limit = 0` resolved."""
        usual = {"m2po": 0.04, "opsm": 1e-4}
        if self.correction in usual:
            return {"limit": self.staleness.limit or usual[self.correction]}
        return {} if self.correction == "none" else {"cap": self.staleness.cap, "floor": self.staleness.floor}

    @property
    def groups_per_batch(self) -> int:
        return self.train.batch // self.train.group_size

    @property
    def batches_waiting(self) -> int | None:
        """Batches the buffer holds before feeding stops; None where it has no bound."""
        depth = self.buffer.depth or self.staleness.max_lag
        return {"synchronous": 1, "one_ahead": 1, "bounded": max(depth, 1), "stream": None}[self.buffer_kind]

    @property
    def extra_groups(self) -> int:
        """Groups submitted beyond those that the batches within `gate_depth` need (`partial.oversample`)."""
        return math.ceil(round(self.partial.oversample * self.groups_per_batch, 6)) - self.groups_per_batch

    @property
    def stops_when_whole(self) -> bool:
        """Whether generation stops while a batch is trained: in a synchronous run that has more begun than a batch needs."""
        return self.buffer_kind == "synchronous" and self.extra_groups > 0

    @property
    def takes_turns(self) -> bool:
        """Whether engines stand still while a batch is trained, and are to be told when they may go on."""
        return self.stops_when_whole or self.engine.sleep != "never"

    @property
    def gate_depth(self) -> int | None:
        """Versions that submission may run ahead of training; None where it is not gated."""
        if self.buffer_kind == "synchronous":
            return 0
        return self.staleness.max_lag if self.staleness.gate else None

    @property
    def order(self) -> str:
        """`buffer.order`, with exact mode's need honoured."""
        return "submission" if self.exact else self.buffer.order

    @property
    def hash(self) -> str:
        """Of everything that decides the result, and not of how it is watched over: what an error advises may be changed."""
        settings = to_dict(self)
        for name in ("observe", "orchestrate", "deadline", "heartbeat", "sync"):
            settings.pop(name)
        for name in ("restarts", "sleep"):
            settings["engine"].pop(name)
        settings["engine"]["count"] = self.num_engines
        vllm = settings["engine"].pop("vllm")
        if self.engine.kind == "vllm":  # where its servers run decides nothing
            settings["engine"]["vllm"] = {"arguments": vllm["arguments"]}
        for name in ("max_skipped", "recompute", "offload"):
            settings["train"].pop(name)
        for name in ("timeout", "workers", "max_failures"):
            settings["reward"].pop(name)
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def derivation(self) -> list[str]:
        """How the sizes of a run follow from the settings, a line each."""
        train, groups = self.train, self.groups_per_batch
        rows = [
            f"batch      {train.batch} rollouts = {groups} tasks × {train.group_size} siblings (train.batch, train.group_size)",
            f"steps      {self.steps} versions × {train.mini_batches} optimizer step(s); {self.steps * train.batch} rollouts",
            f"micro      at most {train.micro_batch_tokens} tokens a forward pass (train.micro_batch_tokens)",
        ]
        if self.gate_depth is None:
            rows.append("gate       none: submission runs ahead as far as the buffer lets it (staleness.gate = false)")
        else:
            extra = self.extra_groups
            more, most = f" + {extra}" if extra else "", (self.gate_depth + 1) * groups + extra
            why = f"staleness.max_lag = {self.staleness.max_lag}{', partial.oversample' if extra else ''}"
            sizes = f"({self.gate_depth} + 1) × {groups}{more} = {most}"
            rows.append(f"gate       at most {sizes} tasks submitted and untrained ({why})")
        waiting = self.batches_waiting
        held = "no bound" if waiting is None else f"{waiting} × {groups} = {waiting * groups} groups wait at most"
        rows.append(f"buffer     {self.buffer_kind}: {held}, trained in {self.order} order")
        counted = "engine.vllm.urls" if self.engine.vllm.urls else "engine.count"
        rows.append(
            f"engine     {self.num_engines} × {self.engine.slots} rollouts decoded at once ({counted}, engine.slots), "
            f"{self.sampling.max_tokens} new tokens each at most"
        )
        if self.engine.kind == "vllm":
            started = f"started here {shlex.join(self.engine.vllm.command_line())}".rstrip()
            rows.append(f"vllm       {self.num_engines} server(s), {'running already' if self.engine.vllm.urls else started}")
        if self.orchestrate == "local":
            rows.append(f"processes  launcher, {self.num_engines} engine(s), trainer (orchestrate = 'local')")
        return rows


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe file and apply overrides (`{"train.learning_rate": 1e-5}`)."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: no such recipe; `ls recipes/` shows ours")
    return parse_recipe(file.read_text(), name=str(path), overrides=overrides)


def parse_recipe(text: str, *, name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe from TOML text; errors name `name` and the line."""
    data = apply_overrides(load_toml(text, name=name), overrides or {})
    return build(Recipe, data, origin=Origin(name=name, text=text, overrides=frozenset(overrides or {}), advise=advise))


def make_recipe(data: Mapping[str, Any]) -> Recipe:
    """A recipe from nested or dotted plain data."""
    return build(Recipe, apply_overrides({}, data), origin=Origin(advise=lambda name: advise(name, is_python=True)))


def advise(name: str, *, is_python: bool = False) -> str:
    """What to write instead of a name that is TRL's, or that stands in another section; "" if it is neither."""
    keys = [TRL[name]] if name in TRL else [key for key, *_ in describe(Recipe) if key.rpartition(".")[2] == name]
    if not keys or " " in keys[0]:
        return "".join(keys)
    keys.sort(key=lambda key: key.startswith("warmup."))  # rarely what is meant
    section, _, leaf = keys[0].rpartition(".")
    example = f" In Python: {section}={{'{leaf}': …}}" if is_python and section and "." not in section else ""
    return f"did you mean {' or '.join(keys)}?{example}"
