"""`headrace bench step`: whole RL steps, from prompts to new weights in the engine, beside TRL's GRPO on the same steps.

Each variant is a whole run of `headrace.train` in its own processes: a random model with a vocabulary as large as a real one,
groups of siblings, a reward that takes no time, and fixed completion lengths. In turn: the engine waits while the trainer
works. Asleep: it also frees its cache. Lag 1 and 2: side by side. Each runs once with completions of one length and once with a
long tail; where vLLM is installed, some also run on a vLLM server. Warm-up steps do not count, nor the last steps of a run,
which have no generation beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import headrace
from headrace.bench.child import PeerFailed
from headrace.bench.harness import Row, default_device, run_parts, say
from headrace.bench.loads import MEDIUM, QWEN3_0_6B, SMALL, lognormal_lengths, write_random_model
from headrace.bench.measure import GpuMemory, release
from headrace.bench.step_trl import measure_steps, missing_modules
from headrace.engine import choose_python, find_vllm
from headrace.envs import SingleTurn
from headrace.observe import read_metrics
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.bench.harness import Part
    from headrace.envs import Client, EngineClient
    from headrace.records import Episode, Plain

LENGTHS = "lengths"
"""The task column with the number of tokens of each sibling."""
_SHOWN = 0.005
"""Smaller shares of a time budget get no row."""
_QUICK = ("trl", "in-turn", "lag-1-long-tail")
"""What `--quick` measures without `--only`."""
_LOG_LINES = 30
"""Printed of each process's log when a run fails, because its folder is deleted."""


@dataclass(frozen=True)
class Plan:
    """The load for a GPU or a CPU: after the warm-up, `steps` steps of `completions` completions, which have `tokens` tokens
    each, or a long tail of that mean and at most `cap`."""

    device: str
    dtype: str
    shape: dict[str, Any]
    completions: int
    prompt_tokens: int
    tokens: int
    cap: int
    micro_batch_tokens: int
    steps: int
    warmups: int = 2
    siblings: int = 8
    goal: str = ""
    """For our completion tokens/s ÷ TRL's, with completions of one length."""
    orchestrate: str = "local"

    def make_tasks(self, *, has_tail: bool = False) -> list[dict[str, Any]]:
        """Prompts of made-up words, no two alike, some more than the steps need; with a long tail also a length for every
        sibling: most are short, a few are very long."""
        count = self.completions // self.siblings * (self.warmups + self.steps + 4)
        prompts = np.random.default_rng(0).integers(1, int(self.shape["vocab_size"]), size=(count, self.prompt_tokens))
        tasks: list[dict[str, Any]] = [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in prompts]
        if has_tail:
            lengths = lognormal_lengths(count * self.siblings, mean=self.tokens, sigma=1.0, cap=self.cap)
            for task, own in zip(tasks, np.reshape(lengths, (count, self.siblings)).tolist(), strict=True):
                task[LENGTHS] = own
        return tasks


@dataclass(frozen=True)
class Variant:
    """A way to run the same steps."""

    name: str
    settings: dict[str, Any]
    max_lag: int = 0
    has_tail: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether the goal applies: it is set for completions of one length on the native engine."""
        return not self.has_tail and "engine.kind" not in self.settings


VARIANTS = (
    Variant("in turn", {}),
    Variant("in turn, asleep", {"engine.sleep": "cache"}),
    Variant("lag 1", {}, max_lag=1),
    Variant("lag 2", {}, max_lag=2),
)
_VLLM = {"engine.kind": "vllm", "orchestrate": "local", "deadline": 600.0}
"""The deadline allows for a server that takes minutes to start."""
OVER_VLLM = (Variant("in turn, vLLM", _VLLM), Variant("lag 1, vLLM", _VLLM, max_lag=1))


def make_plan(device: str, *, quick: bool) -> Plan:
    """For a GPU or a CPU; `quick` takes fewer steps, and on a CPU a smaller model."""
    if device == "cuda":
        on_gpu = functools.partial(Plan, device, "bfloat16", QWEN3_0_6B, prompt_tokens=64, goal="≥ 6")
        return on_gpu(completions=512, tokens=256, cap=1024, micro_batch_tokens=16_384, steps=2 if quick else 5)
    on_cpu = functools.partial(Plan, device, "float32", prompt_tokens=16, micro_batch_tokens=4096)
    if quick:  # prompt and completion are no shorter than the canary, which a vLLM server must score
        return on_cpu({**SMALL, "num_hidden_layers": 2}, completions=16, tokens=24, cap=48, steps=2)
    return on_cpu(MEDIUM, completions=64, tokens=64, cap=256, steps=6)


def variants() -> dict[str, Variant]:
    """By the names that `--only` takes."""
    tails = [dataclasses.replace(variant, name=f"{variant.name}, long tail", has_tail=True) for variant in VARIANTS]
    found = [*VARIANTS, *(OVER_VLLM if _has_vllm() else ()), *tails]
    return {variant.name.replace(", ", "-").replace(" ", "-"): variant for variant in found}


def _has_vllm() -> bool:
    try:
        find_vllm(choose_python(""))
    except ConfigError:
        return False
    return True


def run(*, quick: bool, json_file: Path | None, only: str | None = None) -> int:
    """`--quick` measures a few short steps of TRL and of two variants."""
    plan = make_plan(default_device(), quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        parts = make_parts(plan, Path(folder))
        if quick and only is None:
            only = ",".join(name for name in _QUICK if name in parts)
        return run_parts("step", parts, only=only, quick=quick, json_file=json_file)


def make_parts(plan: Plan, folder: Path) -> dict[str, Part]:
    """TRL first if it is installed, then every variant, which is compared with it."""
    peers = Peers()

    @functools.cache
    def model() -> str:
        path = write_random_model(plan.shape, folder / "model", dtype=plan.dtype)
        release()  # frees GPU memory
        return path

    def part_of(variant: Variant) -> Part:
        return lambda: [measure(plan, variant, model(), folder, peers=peers)]

    parts: dict[str, Part] = {}
    absent = missing_modules(plan.device)
    if absent:
        say(f"TRL: {' and '.join(absent)} not installed here; it is not measured")
    else:
        parts["trl"] = lambda: measure_trl(plan, model(), folder, peers)
    return parts | {name: part_of(variant) for name, variant in variants().items()}


@dataclass
class Peers:
    """Figures of peers in this run, filled in by the part that measures them: completion tokens/s and GiB of GPU memory."""

    rates: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)


def measure(plan: Plan, variant: Variant, model: str, folder: Path, *, peers: Peers) -> list[Row]:
    """One run, and the figures of its middle steps."""
    environment = OwnLengths() if variant.has_tail else None
    given: dict[str, Any] = {"tasks": plan.make_tasks(has_tail=variant.has_tail), "reward": first_word_is_even}
    with tempfile.TemporaryDirectory(dir=folder) as place, GpuMemory() as memory:
        settings = settings_of(plan, variant, model)
        run_dir = Path(place) / "run"
        try:
            headrace.train(settings.pop("model"), environment=environment, run_dir=run_dir, quiet=True, **given, **settings)
        except Exception:
            show_logs(Path(place))
            raise
        seen = read_metrics(run_dir / "metrics.jsonl")
    say(f"{variant.name}: seconds of each step: {', '.join(format(row['seconds'], '.2f') for row in seen)}")
    check_lengths(plan, variant, seen)
    middle = seen[plan.warmups : plan.warmups + plan.steps]
    return [*step_rows(plan, variant, middle, peers=peers), *memory_rows(variant, memory, peers=peers)]


def show_logs(folder: Path) -> None:
    """Print the last lines of every log in a folder."""
    for log in sorted(folder.rglob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        say("\n  ".join([f"{log.relative_to(folder)}, its last lines:", *lines]))


def check_lengths(plan: Plan, variant: Variant, seen: Sequence[dict[str, Any]]) -> None:
    """Raise if a completion ended early: that is less work than planned."""
    short = [row["completion_tokens"] for row in seen if row["completion_tokens"] != plan.tokens]
    if short and not variant.has_tail:
        raise RuntimeError(f"{variant.name}: {short[0]:g} tokens a completion where {plan.tokens} were asked for")


def settings_of(plan: Plan, variant: Variant, model: str) -> dict[str, Any]:
    """The recipe's settings."""
    longest = plan.cap if variant.has_tail else plan.tokens
    return {
        "model": {"path": model, "dtype": plan.dtype, "context": plan.prompt_tokens + longest},
        "steps": plan.warmups + plan.steps + variant.max_lag,
        "device": plan.device,
        "orchestrate": plan.orchestrate,
        "deadline": 120.0,
        "sampling": {"max_tokens": longest, "temperature": 1.0},
        "engine": {"slots": plan.completions},
        "staleness": {"max_lag": variant.max_lag},
        "train": {
            "batch": plan.completions,
            "group_size": plan.siblings,
            "micro_batch_tokens": plan.micro_batch_tokens,
            "learning_rate": 1e-6,
        },
        "checkpoint": {"every": 1_000_000, "keep": 1},
        "observe": {"keep_rollouts_every": 0, "trace": False},
        **variant.settings,
    }


def step_rows(plan: Plan, variant: Variant, seen: Sequence[dict[str, Any]], *, peers: Peers) -> list[Row]:
    """Medians over steps, the time budget over all of them, and their mean lag."""
    name, others = variant.name, {} if variant.has_tail else peers.rates
    goal = plan.goal if variant.is_judged else ""
    rate = statistics.median(row["tokens_per_second"] for row in seen)
    return [
        Row(f"{name}: step", statistics.median(row["seconds"] for row in seen), "s"),
        Row(f"{name}: completions", rate, "tokens/s", peers=others),
        *(Row(f"{name}: completions ÷ {who}", rate / theirs, "ratio", goal=goal) for who, theirs in others.items()),
        Row(f"{name}: mean lag", statistics.fmean(row["lag_mean"] for row in seen), "versions"),
        Row(f"{name}: exchange of weights", statistics.median(row.get("seconds/engine/swap", 0.0) for row in seen), "s"),
        *(Row(f"{name}: {state}", share, "share") for state, share in budget_of(seen).items() if share >= _SHOWN),
    ]


def budget_of(seen: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The share of each state in the time of engine and trainer, over these steps."""
    budget: dict[str, float] = {}
    for role in ("engine", "trainer"):
        prefix, totals = f"seconds/{role}/", Counter[str]()
        for row in seen:
            totals.update({key: seconds for key, seconds in row.items() if key.startswith(prefix)})
        whole = max(sum(totals.values()), 1e-9)
        budget |= {f"{role}, {key.removeprefix(prefix)}": seconds / whole for key, seconds in totals.items()}
    return budget


def memory_rows(variant: Variant, memory: GpuMemory, *, peers: Peers) -> list[Row]:
    """GPU memory of all processes; the goal is to take no more than a peer for the same work."""
    others = peers.peaks if variant.is_judged else {}
    goal = f"≤ {min(others.values()):.3g}" if others else ""
    return [] if memory.peak is None else [Row(f"{variant.name}: peak GPU memory", memory.peak, "GiB", goal, peers=others)]


def measure_trl(plan: Plan, model: str, folder: Path, peers: Peers) -> Iterator[list[Row]]:
    """TRL's GRPO on the same tasks; yields nothing if it fails."""
    work: dict[str, Any] = {"model": model, "tasks": plan.make_tasks(), "siblings": plan.siblings, "tokens": plan.tokens}
    steps = plan.warmups + plan.steps
    with GpuMemory() as memory:
        try:
            found = measure_steps(folder, device=plan.device, completions=plan.completions, steps=steps, **work)
        except PeerFailed as failed:
            say(f"{failed}; it is absent from the table")
            return
    step, title = statistics.median(found.seconds[plan.warmups :]), f"{found.name} ({found.settings})"
    rate = peers.rates[found.name] = plan.completions * plan.tokens / step
    yield [Row(f"{title}: step", step, "s"), Row(f"{title}: completions", rate, "tokens/s")]
    if memory.peak is not None:
        peers.peaks[found.name] = memory.peak
        yield [Row(f"{title}: peak GPU memory", memory.peak, "GiB")]


def first_word_is_even(completions: list[str], **_: object) -> list[float]:
    """A reward that takes no time and differs between siblings."""
    return [float(text.partition(" ")[0].removeprefix("w")[-1:] in tuple("02468")) for text in completions]


class OwnLengths(SingleTurn):
    """The built-in environment, with the length that the task gives this sibling."""

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        engine = cast("EngineClient", client)
        engine.sampling = dataclasses.replace(engine.sampling, max_tokens=cast("list[int]", task[LENGTHS])[engine.index])
        return await super().run(task, client)
