"""`headrace bench step`: whole steps of RL, from prompts to new weights in the engine, as TRL's GRPO makes them.

Whole runs of `headrace.trainer` in processes of their own: a model with random weights and as large a vocabulary as a real one,
groups of siblings, a reward that takes no time. No token ends a completion, so that all have the length they are to have.
In turn: the engine waits while the trainer works. Asleep: it gives back its cache meanwhile. Lag 1 and 2: side by side.
Each once with completions of one length and once with a long tail; where vLLM is installed, some with a vLLM server as the
engine. Figures are of the steps after two that warm up, and before those that have nothing generated beside them because the
run ends. TRL makes the same steps in the same run, where it is installed. Every part has folders of its own, and MPS of its own
where that is asked for: one that fails is in nobody's way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging as transformers_logging

import headrace
from headrace.bench.engine_loads import QWEN3_0_6B, SMALL
from headrace.bench.gauge import release
from headrace.bench.gpu_watch import GpuMemory, check_service, multi_process_service
from headrace.bench.parts import run_parts, say
from headrace.bench.step_loads import OwnLengths, first_word_is_even, make_tasks, with_lengths
from headrace.bench.table import Row
from headrace.bench.trainer_loads import CPU_SHAPE
from headrace.bench.trl_peer import TrlFailed, measure_steps, missing_modules
from headrace.bench.words import write_model
from headrace.engine import EngineSettings, choose_python, find_vllm
from headrace.observe import read_metrics
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.bench.parts import Part

EARLIER = Row(
    "TRL 1.16 + vLLM 0.26: completions. Not of this run: another H200, 2026-11-16, commit 92e7b96, 9.89 s a step, 98.8 GiB; "
    "micro-batches of 64, gradient checkpointing off, importance sampling correction off",
    13_260.0,
    "tokens/s",
)
"""Shown on a GPU where TRL cannot be measured; nothing is divided by it."""
_SECONDS = 390.0
"""After which no variant begins: a command has eight minutes where GPUs are lent."""
_SHOWN = 0.005
"""The least share of a time budget that has a row."""


@dataclass(frozen=True)
class Plan:
    """The load of a kind of machine."""

    device: str
    dtype: str
    shape: dict[str, Any]
    completions: int
    """Of one step."""
    siblings: int
    prompt_tokens: int
    tokens: int
    """Of every completion, or of the mean one of a long tail."""
    cap: int
    """Of a long tail."""
    micro_batch_tokens: int
    warmups: int
    steps: int
    """Measured."""
    goal: str = ""
    """Of completions of one length a second, over TRL's in the same run."""
    orchestrate: str = "local"

    @property
    def num_tasks(self) -> int:
        return self.completions // self.siblings * (self.warmups + self.steps + 4)

    def longest(self, variant: Variant) -> int:
        """Tokens of a completion at most."""
        return self.cap if variant.has_tail else self.tokens


@dataclass(frozen=True)
class Variant:
    """A way to run the same steps."""

    name: str
    settings: dict[str, Any]
    max_lag: int = 0
    has_tail: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether the goal, which is for completions of one length on the native engine, holds for it."""
        return not self.has_tail and "engine.kind" not in self.settings


VARIANTS = (
    Variant("in turn", {}),
    Variant("in turn, asleep", {"engine.sleep": "cache"}),
    Variant("lag 1", {}, max_lag=1),
    Variant("lag 2", {}, max_lag=2),
)
_VLLM = {"engine.kind": "vllm", "orchestrate": "local", "deadline": 600.0}
"""A server may take minutes to come up."""
OVER_VLLM = (Variant("in turn, vLLM", _VLLM), Variant("lag 1, vLLM", _VLLM, max_lag=1))
_SLEEP, _SWAP = "engine.sleep", "seconds/engine/swap"
_QUICK = ("trl", "in-turn", "lag-1-long-tail")
"""What `--quick` takes unless `--only` names others."""
_LOG_LINES = 30
"""Shown of each process's log where a run fails: its folder is gone afterwards."""


def make_plan(device: str, *, quick: bool) -> Plan:
    """The GPU's, the CPU's, or a few seconds of the CPU's on a small model."""
    if device == "cuda":
        return Plan(
            device=device,
            dtype="bfloat16",
            shape=QWEN3_0_6B,
            completions=512,
            siblings=8,
            prompt_tokens=64,
            tokens=256,
            cap=1024,
            micro_batch_tokens=16_384,
            warmups=2,
            steps=2 if quick else 5,
            goal="≥ 6",
        )
    return Plan(
        device=device,
        dtype="float32",
        shape={**SMALL, "num_hidden_layers": 2} if quick else CPU_SHAPE,
        completions=16 if quick else 64,
        siblings=8,
        prompt_tokens=16,
        tokens=24 if quick else 64,  # with the prompt no fewer than the canary, which a vLLM server is asked to score
        cap=48 if quick else 256,
        micro_batch_tokens=4096,
        warmups=2,
        steps=2 if quick else 6,
    )


def variants() -> dict[str, Variant]:
    """By the name to ask for them with. An engine sleeps only where there is the setting."""
    can_sleep = any(field.name == "sleep" for field in dataclasses.fields(EngineSettings))
    plain = [variant for variant in VARIANTS if can_sleep or _SLEEP not in variant.settings]
    tails = [dataclasses.replace(variant, name=f"{variant.name}, long tail", has_tail=True) for variant in plain]
    found = [*plain, *(OVER_VLLM if has_vllm() else ()), *tails]
    return {variant.name.replace(", ", "-").replace(" ", "-"): variant for variant in found}


def has_vllm() -> bool:
    """Whether a server can be started here."""
    try:
        find_vllm(choose_python(""))
    except ConfigError:
        return False
    return True


def run(*, quick: bool, json_file: Path | None, only: str | None = None, mps: bool = False) -> int:
    """Status 1 if a goal is missed or a variant fails; `--quick` judges nothing."""
    transformers_logging.disable_progress_bar()
    plan = make_plan("cuda" if torch.cuda.is_available() else "cpu", quick=quick)
    if mps:
        check_service()
    with tempfile.TemporaryDirectory() as folder:
        parts = make_parts(plan, Path(folder), mps=mps)
        if quick and only is None:
            only = ",".join(name for name in _QUICK if name in parts)
        return run_parts("step", parts, only=only, quick=quick, json_file=json_file, seconds=_SECONDS)


def make_parts(plan: Plan, folder: Path, *, mps: bool = False) -> dict[str, Part]:
    """TRL first where it is installed, then every variant, which is set against it."""
    peers = Peers()

    @functools.cache
    def model() -> str:
        path = write_model(plan.shape, folder / "model", dtype=plan.dtype)
        release()  # of what the GPU was asked for to draw it
        return path

    def part_of(variant: Variant) -> Part:
        return lambda: [measure(plan, variant, model(), folder, peers=peers, mps=mps)]

    parts: dict[str, Part] = {}
    absent = missing_modules(plan.device)
    if not absent:
        parts["trl"] = lambda: measure_trl(plan, model(), folder, peers)
    else:
        say(f"TRL: {' and '.join(absent)} not here; it is not measured")
        if plan.device == "cuda":
            parts["trl"] = lambda: [[EARLIER]]
    return parts | {name: part_of(variant) for name, variant in variants().items()}


@dataclass
class Peers:
    """Figures of others, of this run; filled by the part that measures them."""

    rates: dict[str, float] = field(default_factory=dict)
    """Completion tokens a second."""
    peaks: dict[str, float] = field(default_factory=dict)
    """GiB of GPU memory."""


def measure(plan: Plan, variant: Variant, model: str, folder: Path, *, peers: Peers, mps: bool = False) -> list[Row]:
    """One run, and what its metrics say of the steps in the middle."""
    tasks = make_tasks(plan.num_tasks, prompt_tokens=plan.prompt_tokens, vocabulary=int(plan.shape["vocab_size"]))
    if variant.has_tail:
        tasks = with_lengths(tasks, siblings=plan.siblings, mean=plan.tokens, cap=plan.cap)
    with contextlib.ExitStack() as around:
        place = Path(around.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        run_dir = place / "run"
        if mps:
            around.enter_context(multi_process_service(place / "mps"))
        memory = around.enter_context(GpuMemory())
        try:
            headrace.train(
                {
                    "path": model,
                    "dtype": plan.dtype,
                    "context": plan.prompt_tokens + (plan.cap if variant.has_tail else plan.tokens),
                },
                tasks=tasks,
                reward=first_word_is_even,
                environment=OwnLengths() if variant.has_tail else None,
                run_dir=run_dir,
                quiet=True,
                **settings_of(plan, variant),
            )
        except Exception:
            show_logs(place)
            raise
        seen = read_metrics(run_dir / "metrics.jsonl")
    say(f"{variant.name}: seconds of each step: {', '.join(format(row['seconds'], '.2f') for row in seen)}")
    check_lengths(plan, variant, seen)
    middle = seen[plan.warmups : plan.warmups + plan.steps]
    return [*step_rows(plan, variant, middle, peers=peers), *memory_rows(variant, memory, peers=peers)]


def show_logs(folder: Path) -> None:
    """The last lines of every log below a folder, MPS's too."""
    for log in sorted(folder.rglob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        say("\n  ".join([f"{log.relative_to(folder)}, its last lines:", *lines]))


def check_lengths(plan: Plan, variant: Variant, seen: Sequence[dict[str, Any]]) -> None:
    """A completion that ended early would be another's work."""
    short = [row["completion_tokens"] for row in seen if row["completion_tokens"] != plan.tokens]
    if short and not variant.has_tail:
        raise RuntimeError(f"{variant.name}: {short[0]:g} tokens a completion where {plan.tokens} were asked for")


def settings_of(plan: Plan, variant: Variant) -> dict[str, Any]:
    """What a recipe would say, the model apart."""
    return {
        "steps": plan.warmups + plan.steps + variant.max_lag,
        "device": plan.device,
        "orchestrate": plan.orchestrate,
        "deadline": 120.0,
        "sampling": {"max_tokens": plan.longest(variant), "temperature": 1.0},
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
    """Medians over steps, the time budget over all of them, and the lag of their tokens."""
    name = variant.name
    rate = statistics.median(row["tokens_per_second"] for row in seen)
    seconds = statistics.median(row["seconds"] for row in seen)
    lag = statistics.fmean(row["lag_mean"] for row in seen)
    others = {} if variant.has_tail else peers.rates
    goal = plan.goal if variant.is_judged else ""
    budget = budget_of(seen)
    busy = ", ".join(f"{role} {state} {share:.0%}" for (role, state), share in budget.items() if share >= 0.05)
    say(f"{name}: {seconds:.2f} s a step, {rate:,.0f} completion tokens/s, lag {lag:.2f}; {busy}")
    return [
        Row(f"{name}: step", seconds, "s"),
        Row(f"{name}: completions", rate, "tokens/s", peers=others),
        *(Row(f"{name}: completions ÷ {who}", rate / theirs, "ratio", goal=goal) for who, theirs in others.items()),
        Row(f"{name}: mean lag", lag, "versions"),
        Row(f"{name}: exchange of weights", statistics.median(row.get(_SWAP, 0.0) for row in seen), "s"),
        *(Row(f"{name}: {role}, {state}", share, "share") for (role, state), share in budget.items() if share >= _SHOWN),
    ]


def budget_of(seen: Sequence[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """The share of each state in its role's time, engine and trainer, over these steps."""
    totals: Counter[tuple[str, str]] = Counter()
    for row in seen:
        for key, seconds in row.items():
            place, _, rest = key.partition("/")
            role, _, state = rest.partition("/")
            if place == "seconds" and role in ("engine", "trainer"):
                totals[role, state] += seconds
    whole = {role: sum(seconds for (of, _), seconds in totals.items() if of == role) for role in ("engine", "trainer")}
    return {place: seconds / max(whole[place[0]], 1e-9) for place, seconds in totals.items()}


def memory_rows(variant: Variant, memory: GpuMemory, *, peers: Peers) -> list[Row]:
    """The GPU's, of all processes together and of each; no more than a peer takes for the same work."""
    if memory.peak is None:
        return []
    say(f"{variant.name}: {memory.peak:.1f} GiB of GPU memory at most; {memory.peak_of or 'not known by process'}")
    others = peers.peaks if variant.is_judged else {}
    goal = f"≤ {min(others.values()):.3g}" if others else ""
    return [
        Row(f"{variant.name}: peak GPU memory", memory.peak, "GiB", goal=goal, peers=others),
        *(Row(f"{variant.name}: peak GPU memory, {name}", peak, "GiB") for name, peak in memory.peak_of.items()),
    ]


def measure_trl(plan: Plan, model: str, folder: Path, peers: Peers) -> Iterator[list[Row]]:
    """TRL's GRPO on the same tasks; what it cannot do is one line."""
    tasks = make_tasks(plan.num_tasks, prompt_tokens=plan.prompt_tokens, vocabulary=int(plan.shape["vocab_size"]))
    with GpuMemory() as memory:
        try:
            found = measure_steps(
                model,
                folder,
                device=plan.device,
                completions=plan.completions,
                steps=plan.warmups + plan.steps,
                tasks=tasks,
                siblings=plan.siblings,
                tokens=plan.tokens,
            )
        except TrlFailed as failed:
            say(f"{failed}; it is absent from the table")
            return
    step = statistics.median(found.seconds[plan.warmups :])
    rate = peers.rates[found.name] = plan.completions * plan.tokens / step
    title = f"{found.name} ({found.settings})"
    say(f"{title}: {step:.2f} s a step, {rate:,.0f} completion tokens/s")
    rows = [Row(f"{title}: step", step, "s"), Row(f"{title}: completions", rate, "tokens/s")]
    if memory.peak is not None:
        peers.peaks[found.name] = memory.peak
        rows.append(Row(f"{title}: peak GPU memory", memory.peak, "GiB"))
    yield rows
