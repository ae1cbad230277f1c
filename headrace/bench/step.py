"""`headrace bench step`: whole RL steps, from prompts to new weights in the engine, beside TRL's GRPO on the same steps.

Each variant is a whole run of `headrace.train` in its own processes: a random model with a vocabulary as large as a real one,
groups of siblings, a reward that takes no time, and fixed completion lengths. In turn: the engine waits while the trainer
works. Asleep: it also frees its cache. Lag 1 and 2: side by side. Each runs once with completions of one length and once with a
long tail; where vLLM is installed, some also run on a vLLM server. Warm-up steps do not count, nor the last steps of a run,
which have no generation beside them.

`--lengths 8k` or `32k` measures long completions instead: a long tail up to that length, with a mean of about a quarter of it,
after one warm-up step of short ones. TRL samples to one length only, that mean. On a CPU all lengths are divided by 64.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace.bench.child import PeerFailed
from headrace.bench.harness import Row, default_device, run_parts, say
from headrace.bench.loads import write_random_model
from headrace.bench.measure import GIB, GpuMemory, release
from headrace.bench.step_plan import LONG, make_plan, variants
from headrace.bench.step_trl import measure_steps, missing_modules
from headrace.bench.stubs import PlannedLengths
from headrace.bench.trainer_speed import PEAK_FLOPS, flops_of
from headrace.observe import read_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.bench.harness import Part
    from headrace.bench.step_plan import Plan, Variant

_SHOWN = 0.005
"""Smaller shares of a time budget get no row."""
_QUICK = ("trl", "in-turn", "lag-1-long-tail")
_QUICK_LONG = ("in-turn", "lag-1")
"""What `--quick` measures without `--only`, and with `--lengths`."""
_LOG_LINES = 30
"""Printed of each process's log when a run fails, because its folder is deleted."""


def run(*, quick: bool, json_file: Path | None, only: str | None = None, lengths: str = "") -> int:
    """`--quick` measures a few short steps of TRL and of two variants."""
    plan = make_plan(default_device(), quick=quick, longest=LONG.get(lengths, 0))
    if lengths:
        say(f"{lengths}: {plan.describe()}")
    with tempfile.TemporaryDirectory() as folder:
        parts = make_parts(plan, Path(folder), lengths=lengths)
        if quick and only is None:
            only = ",".join(name for name in (_QUICK_LONG if lengths else _QUICK) if name in parts)
        return run_parts("step", parts, only=only, quick=quick, json_file=json_file)


def make_parts(plan: Plan, folder: Path, *, lengths: str = "") -> dict[str, Part]:
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
    return parts | {name: part_of(variant) for name, variant in variants(lengths).items()}


@dataclass
class Peers:
    """Figures of peers in this run, filled in by the part that measures them: completion tokens/s and GiB of GPU memory."""

    rates: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)


def measure(plan: Plan, variant: Variant, model: str, folder: Path, *, peers: Peers) -> list[Row]:
    """One run, and the figures of its middle steps."""
    environment = PlannedLengths(plan.length_of) if variant.has_tail else None
    given: dict[str, Any] = {"tasks": plan.make_tasks(), "reward": first_word_is_even}
    with tempfile.TemporaryDirectory(dir=folder) as place, GpuMemory() as memory:
        settings = settings_of(plan, variant, model)
        run_dir = Path(place) / "run"
        try:
            headrace.train(settings.pop("model"), environment=environment, run_dir=run_dir, quiet=True, **given, **settings)
        except Exception:
            show_logs(Path(place))
            raise
        seen = read_metrics(run_dir / "metrics.jsonl")
        by_role = json.loads((run_dir / "summary.json").read_text())["memory"]
    say(f"{variant.name}: seconds of each step: {', '.join(format(row['seconds'], '.2f') for row in seen)}")
    check_lengths(plan, variant, seen)
    middle = seen[plan.warmups : plan.warmups + plan.steps]
    return [
        *step_rows(plan, variant, middle, peers=peers),
        *role_rows(plan, variant, middle, model),
        *memory_rows(variant, memory, by_role, peers=peers),
    ]


def show_logs(folder: Path) -> None:
    """Print the last lines of every log in a folder."""
    for log in sorted(folder.rglob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        say("\n  ".join([f"{log.relative_to(folder)}, its last lines:", *lines]))


def check_lengths(plan: Plan, variant: Variant, seen: Sequence[dict[str, Any]]) -> None:
    """Raise if a completion ended early: that is less work than planned."""
    short = [row["completions/mean_length"] for row in seen if row["completions/mean_length"] != plan.tokens]
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
    """Medians over steps (on a long tail, tokens/s over all of them), the time budget over all of them, and their mean lag."""
    name, others = variant.name, {} if variant.has_tail else peers.rates
    goal = plan.goal if variant.is_judged else ""
    rate = statistics.median(row["tokens_per_second"] for row in seen)
    if variant.has_tail:  # side by side, steps differ in their tokens
        rate = sum(row["tokens_per_second"] * row["seconds"] for row in seen) / sum(row["seconds"] for row in seen)
    mismatch = [row["train/mismatch"] for row in seen if "train/mismatch" in row]
    return [
        Row(f"{name}: step", statistics.median(row["seconds"] for row in seen), "s"),
        Row(f"{name}: completions", rate, "tokens/s", peers=others),
        *(Row(f"{name}: completions ÷ {who}", rate / theirs, "ratio", goal=goal) for who, theirs in others.items()),
        *([Row(f"{name}: mean |Δ logprob| at equal version", statistics.fmean(mismatch), "nats")] if mismatch else []),
        Row(f"{name}: mean lag", statistics.fmean(row["lag_mean"] for row in seen), "versions"),
        Row(f"{name}: rejected as too old", statistics.fmean(row.get("rejected", 0.0) for row in seen), "share"),
        Row(f"{name}: exchange of weights", statistics.median(row.get("seconds/engine/swap", 0.0) for row in seen), "s"),
        *(Row(f"{name}: {state}", share, "share") for state, share in budget_of(seen).items() if share >= _SHOWN),
    ]


def role_rows(plan: Plan, variant: Variant, seen: Sequence[dict[str, Any]], model: str) -> list[Row]:
    """Trained tokens by the time that engine and trainer were at work, and on a GPU the trainer's MFU. Side by side a step may
    train other lengths than the plan's: its FLOPs are then in proportion to its tokens."""
    name, lengths = variant.name, [plan.prompt_tokens + length for length in plan.lengths(has_tail=variant.has_tail)]
    completions = plan.completions * sum(row["completions/mean_length"] for row in seen)
    tokens = completions + plan.completions * plan.prompt_tokens * len(seen)

    def seconds(*states: str) -> float:
        return max(sum(float(row.get(f"seconds/{state}", 0.0)) for row in seen for state in states), 1e-9)

    training = seconds("trainer/compute")
    rows = [
        Row(f"{name}: engine at work", completions / seconds("engine/decode", "engine/prefill"), "tokens/s"),
        Row(f"{name}: trainer at work, prompts included", tokens / training, "tokens/s"),
    ]
    if plan.device == "cuda":
        flops = flops_of(model, lengths, is_frozen="lora.rank" in variant.settings) * tokens / sum(lengths)
        rows.append(Row(f"{name}: trainer at work, MFU", flops / training / PEAK_FLOPS, "share", bound=1.0))
    return rows


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


def memory_rows(variant: Variant, memory: GpuMemory, by_role: dict[str, dict[str, int | None]], *, peers: Peers) -> list[Row]:
    """GPU memory of all processes, whose goal is to take no more than a peer for the same work; then each role's peak and what
    the run had predicted (`by_role`)."""
    others = peers.peaks if variant.is_judged else {}
    goal = f"≤ {min(others.values()):.3g}" if others else ""
    rows = [] if memory.peak is None else [Row(f"{variant.name}: peak GPU memory", memory.peak, "GiB", goal, peers=others)]
    for role, sizes in by_role.items():
        known = {kind: size for kind, size in sizes.items() if size is not None}  # there may be no prediction
        rows += [Row(f"{variant.name}: memory of the {role}, {kind}", size / GIB, "GiB") for kind, size in known.items()]
    return rows


def measure_trl(plan: Plan, model: str, folder: Path, peers: Peers, **more: Any) -> Iterator[list[Row]]:  # noqa: ANN401
    """TRL's GRPO on the same tasks; yields nothing if it fails. `more`: of `measure_steps`."""
    work: dict[str, Any] = {"model": model, "tasks": plan.make_tasks(), "siblings": plan.siblings, "tokens": plan.tokens}
    steps = plan.warmups + plan.steps
    with GpuMemory() as memory:
        try:
            found = measure_steps(folder, device=plan.device, completions=plan.completions, steps=steps, **work, **more)
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
