"""The recipe: all settings of a run, and how to load one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from headrace.algorithms import NAMED, FilterSettings
from headrace.buffer import BufferSettings, describe_buffer
from headrace.config.cross_checks import check_across_rooms
from headrace.config.peer_names import peer_answer
from headrace.config.presets import PRESETS, preset_settings
from headrace.config.stream_parts import stream_parts
from headrace.engine import EngineSettings, SamplingSettings
from headrace.envs import EnvironmentSettings, EpisodeSettings
from headrace.launch import ClusterSettings
from headrace.lora import LoraSettings
from headrace.model import ModelSettings
from headrace.observe import ObserveSettings
from headrace.partial import PartialSettings
from headrace.run import CheckpointSettings, EvaluateSettings, SftSettings
from headrace.score import RewardSettings
from headrace.settings import (
    ELASTIC,
    OPERATIONAL,
    ConfigError,
    Origin,
    apply_overrides,
    build,
    check,
    check_least,
    describe,
    flatten,
    identity,
    load_toml,
)
from headrace.staleness import StalenessSettings, make_gate
from headrace.sync import SyncSettings
from headrace.tasks import SamplerSettings, TaskSettings
from headrace.trainer import TrainSettings

if TYPE_CHECKING:
    PresetName: TypeAlias = str
else:
    PresetName = Literal[("none", *PRESETS)]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run; each section is defined in its room."""

    steps: int = field(default=100, metadata=ELASTIC)
    """Versions to train by RL; 0 ends the run after SFT."""
    algorithm: Literal["none", "grpo", "dr_grpo", "dapo", "reinforce++", "rloo", "gspo", "cispo", "ppo"] = field(
        default="none", metadata=OPERATIONAL
    )
    """Sets loss, constants, mean, advantage, KL and the like as the algorithm's paper does, wherever the recipe says nothing
    else; `--dry-run` shows the result. Those settings, not the name, say what a run is."""
    preset: PresetName = field(default="none", metadata=OPERATIONAL)
    """Sets buffer, staleness, partial rollouts, weight sync and the like as the named library has them, wherever neither the
    recipe nor `algorithm` says anything else; `headrace presets` lists them. Those settings, not the name, say what a run
    is."""
    seed: int = 0
    """Of the order of tasks, of sampling and of new weights."""
    exact: bool = False
    """Engine and trainer logprobs bitwise equal at equal weights on CPU, and a resumed run bitwise the uninterrupted one."""
    orchestrate: Literal["local", "ray", "inline"] = field(default="local", metadata=ELASTIC)
    """`local`: engines and trainer in processes of their own. `ray`: the same, where Ray places them. `inline`:
    one process, deterministic under a seed, breakpoints work."""
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=ELASTIC)
    """`auto` takes a GPU where there is one."""
    threads: int = field(default=0, metadata=ELASTIC)
    """Of torch on CPU, in each process; 0 shares the cores among them."""
    deadline: float = field(default=600.0, metadata=OPERATIONAL)
    """Seconds without a token, a score or a version after which the run stops and says what it waits for. An episode that
    makes no generate call for a quarter of that is run again, unless its environment may idle."""
    heartbeat: float = field(default=60.0, metadata=OPERATIONAL)
    """Seconds a process may take to answer the launcher. After that it is killed and restarted. A process that hears nothing
    from the launcher for three times as long ends itself; the trainer saves first."""
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    tasks: tuple[TaskSettings, ...] = ()
    sampler: SamplerSettings = field(default_factory=SamplerSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    episode: EpisodeSettings = field(default_factory=EpisodeSettings)
    filter: FilterSettings = field(default_factory=FilterSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings, metadata=OPERATIONAL)
    buffer: BufferSettings = field(default_factory=BufferSettings)
    staleness: StalenessSettings = field(default_factory=StalenessSettings)
    partial: PartialSettings = field(default_factory=PartialSettings)
    sync: SyncSettings = field(default_factory=SyncSettings, metadata=OPERATIONAL)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings, metadata=OPERATIONAL)

    def __post_init__(self) -> None:
        check(self.steps >= (not self.sft.is_on), "steps", self.steps, "≥ 1, or 0 with sft.steps or sft.epochs")
        check_least(0, self, "seed", "threads")
        for name in ("deadline", "heartbeat"):
            check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        check_across_rooms(self)

    @property
    def is_inline(self) -> bool:
        """Whether launcher, engine and trainer share one process."""
        return self.orchestrate == "inline"

    @property
    def is_on_ray(self) -> bool:
        """Whether Ray places engines and trainer."""
        return self.orchestrate == "ray"

    @property
    def engines_join(self) -> bool:
        """Whether all engines are on hosts that join, and none on the launcher's."""
        return self.is_on_ray or not self.engine.count

    @property
    def trainer_joins(self) -> bool:
        """Whether the trainer's ranks are on hosts that join, and not on the launcher's."""
        return self.is_on_ray or self.cluster.trainer_joins

    @property
    def engines_here(self) -> int:
        """Engines that the launcher starts on its host; Ray places them all, by its own accounts."""
        return 0 if self.engines_join else self.engine.num_engines

    @property
    def ranks_here(self) -> int:
        """Ranks of the trainer that the launcher starts on its host."""
        return 0 if self.trainer_joins else self.train.parallel.ranks

    @property
    def max_lag(self) -> float:
        """`staleness.max_lag` as a number: the most that "auto" can come to."""
        return self.staleness.bound(is_inline=self.is_inline)

    @property
    def stream_parts(self) -> int:
        """`train.stream_parts`, with 0 resolved."""
        return stream_parts(self)

    @property
    def max_tokens(self) -> int:
        """The most new tokens of any rollout, trained or held out."""
        return max(self.sampling.max_tokens, self.evaluate.sampling.max_tokens)

    @property
    def uses_tasks(self) -> bool:
        """Whether the policy answers tasks; without RL only `sft.until_success` asks it to."""
        return self.steps > 0 or self.sft.until_success > 0

    @property
    def fixed_settings(self) -> dict[str, Any]:
        """The settings that say what a run is, by dotted key. The others may change when it is resumed."""
        return flatten(identity(self, is_exact=self.exact))

    @property
    def hash(self) -> str:
        """Of the settings that say what a run is."""
        return hashlib.sha256(json.dumps(self.fixed_settings, sort_keys=True).encode()).hexdigest()[:16]

    def derivation(self) -> list[str]:
        """How a run's sizes follow from its settings, one line each."""
        if not self.steps:
            length = f"{self.sft.steps} steps" if self.sft.steps else f"{self.sft.epochs:g} epochs"
            return [f"sft        {length} of {self.sft.batch} rows, at most, and no RL (steps = 0)"]
        rows = self.train.describe(steps=self.steps, parts=self.stream_parts)
        rows += [make_gate(self).describe(self), describe_buffer(self)]
        rows += self.engine.describe(max_tokens=self.sampling.max_tokens)
        if not self.is_inline:
            parallel = self.train.parallel
            layout = f" of {parallel.replicate} × {parallel.shard} ranks (train.parallel)" if parallel.is_on else ""
            spare = " and a spare one on the trainer's device (engine.lend)" if self.engine.lend else ""
            engines = f"{self.engine.num_engines if self.engine.count else 'joining'} engine(s){spare}"
            rows.append(f"processes  launcher, {engines}, trainer{layout} (orchestrate = '{self.orchestrate}')")
        return rows


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe file and apply overrides (`{"train.learning_rate": 1e-5}`)."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: no such recipe; `ls recipes/` shows ours")
    return parse_recipe(file.read_text(), name=str(path), overrides=overrides)


def parse_recipe(text: str, *, name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe from TOML text; errors name `name` and the line."""
    data, presets = _with_named(apply_overrides(load_toml(text, name=name), overrides or {}))
    return _build(data, Origin(name=name, text=text, overrides=frozenset(overrides or {}), presets=presets, advise=advise))


def make_recipe(data: Mapping[str, Any]) -> Recipe:
    """A recipe from a dict, nested or with dotted keys."""
    settings, presets = _with_named(apply_overrides({}, data))
    return _build(settings, Origin(presets=presets, advise=lambda name: advise(name, is_python=True)))


def _build(data: Mapping[str, Any], origin: Origin) -> Recipe:
    """The recipe. An error about two settings also tells which of them the user did not write."""
    try:
        return build(Recipe, data, origin=origin)
    except ConfigError as error:
        text = str(error)
        unwritten = [key for key in origin.presets if f"{key} = " in text and f"{origin.presets[key]}: {key}" not in text]
        notes = "".join(f" ({key} comes from {origin.presets[key]})" for key in unwritten)
        raise ConfigError(text + notes) from None


def _with_named(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """`data` over the settings of the algorithm it names, both over those of its preset; and where each setting comes from that
    `data` does not have."""
    origins: dict[str, str] = {}
    algorithm, preset = data.get("algorithm", "none"), data.get("preset", "none")
    layers = {"algorithm": NAMED.get(algorithm, {}) if isinstance(algorithm, str) else {}}
    places, cluster = data.get("orchestrate"), data.get("cluster")
    has_hosts = places == "ray" or (isinstance(cluster, Mapping) and bool(cluster.get("listen")))
    layers["preset"] = preset_settings(preset, leaves_transport=has_hosts or places == "inline")
    for name, settings in layers.items():
        data, added = _over(settings, data)
        origins |= dict.fromkeys(added, f"{name} = {data.get(name)!r}")
    return data, origins


def _over(settings: Mapping[str, Any], data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`data` over `settings`, and the keys that `data` does not have. With another loss than that of `settings`, the constants
    in them are left out."""
    written = flatten(data)
    if "train.loss" in written and written["train.loss"] != settings.get("train.loss"):
        settings = {key: value for key, value in settings.items() if not key.startswith("train.constants.")}
    added = [key for key in settings if key not in written]
    return apply_overrides(apply_overrides({}, settings), data), added


def advise(name: str, *, is_python: bool = False) -> str:
    """What to write instead of a name that is a peer's or another section's; "" if it is neither."""
    keys = [key for key, *_ in describe(Recipe) if key.rpartition(".")[2] == name] or [peer_answer(name)]
    keys = [key for key in keys if ".N." not in key] or keys  # a list's only if no other has the name
    if not keys[0] or " " in keys[0]:
        return keys[0]
    keys.sort(key=lambda key: key.startswith("sft."))  # rarely what the user means
    section, _, leaf = keys[0].rpartition(".")
    example = f" In Python: {section}={{'{leaf}': …}}" if is_python and section and "." not in section else ""
    return f"did you mean {' or '.join(keys)}?{example}"
