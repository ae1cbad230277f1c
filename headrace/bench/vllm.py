"""`headrace bench vllm`: a vLLM server as the engine, beside the native engine, on the same model and work.

The server is a stock one, started as a run starts it, and its command line is printed. Both engines take turns behind the
engine protocol: the value is vLLM's, the column beside it the native engine's. Tokens/s are those of vLLM's best turn and the
native engine's median; other figures are medians. On a CPU both use all cores but one, vLLM's default.

An update's time is that of `load` alone, with every slot decoding and the weights ready on the trainer's side. The engine
itself reports the part spent swapping weights, which includes pausing and resuming a server. The longest time without a token
is observed from outside and includes the usual time between two steps, which has a row of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.bench.harness import Row, default_device, run_parts, say
from headrace.bench.loads import Load
from headrace.bench.mismatch import compare, mismatch_workload, trainer_logprobs
from headrace.bench.vllm_update import RolloutsEndedEarly, Update, update_in_flight
from headrace.config import make_recipe
from headrace.engine import EngineCore, EnginePlace, NativeEngine, VllmEngine, choose_python, engine_kind, find_vllm
from headrace.launch import receiving_device
from headrace.model import ModelError, ModelSettings, build_folder, load_config, load_model, named_tensors
from headrace.observe import ProcessTimeline
from headrace.settings import ConfigError
from headrace.sync import Lineage, MemoryTransport, WeightSync, shared_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from transformers import PreTrainedModel

    from headrace.bench.loads import Workload
    from headrace.engine import Engine
    from headrace.records import Rollout, WeightUpdate

_TRIES = 4
"""Attempts at an update that must find rollouts in flight."""


@dataclass(frozen=True)
class Plan:
    """What to measure on a GPU or a CPU, with a slot for each request of the load."""

    device: str
    dtype: str
    model: ModelSettings
    """The built-in model, if no folder is given."""
    load: Load
    context: int
    """Long enough for rollouts to outlast an update."""
    mismatch: tuple[int, int]
    """Number of requests, and tokens per request."""
    blocks: int = 0
    """In the native engine's KV cache; 0 lets it choose."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Added to vLLM's command line."""
    goal: str = ""
    """For KL against the trainer, native ÷ vLLM."""
    turns: int = 3
    updates: int = 5

    @property
    def slots(self) -> int:
        return len(self.load.lengths)


def make_plan(device: str, *, quick: bool, has_model: bool) -> Plan:
    """For a GPU, or for a CPU with the built-in or a given model; `quick` takes fewer turns, and on a CPU fewer requests."""
    turns, updates = (2, 2) if quick else (3, 5)
    if device == "cuda":
        model, load = ModelSettings(hidden_size=1024, num_layers=28, num_heads=16, context=4096), Load.uniform(256, 64, 256)
        shared = (("gpu_memory_utilization", 0.4),)  # with the native engine and a trainer
        sizes = {"blocks": 24 * 1024, "turns": turns, "updates": updates}
        return Plan(device, "bfloat16", model, load, 4096, (64, 128), arguments=shared, goal="≤ 0.2", **sizes)
    count, length = (4, 16) if quick else (16, 32) if has_model else (64, 64)
    model, load, context = ModelSettings(context=4096), Load.uniform(count, 32, length), 1024 if has_model else 4096
    return Plan(device, "float32", model, load, context, (8, 16) if quick else (16, 64), turns=turns, updates=updates)


def run(*, quick: bool, json_file: Path | None, model: str | None = None) -> int:
    """Returns 1 if a rollout's versions are wrong or the native engine's KL is too large, even with `--quick`: neither depends
    on size. Speeds have no goal here."""
    python = choose_python("")
    try:
        find_vllm(python)
    except ConfigError as error:
        fix = "install vLLM in an environment and name its interpreter in HEADRACE_VLLM_PYTHON"
        raise ConfigError(f"headrace bench vllm: {python} has no vLLM, or does not run; {fix}") from error
    plan = make_plan(default_device(), quick=quick, has_model=model is not None)
    if plan.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    try:
        if model is not None:
            load_config(model)  # rejects a folder without a model before a server starts
    except ModelError as error:
        raise ConfigError(str(error)) from error

    def part() -> Iterator[list[Row]]:
        rows: list[Row] = []
        try:
            asyncio.run(_measure(plan, model, rows))
        finally:  # report what was measured before a failure
            yield rows

    return run_parts("vllm", {"vllm": part}, quick=False, json_file=json_file)


@dataclass(frozen=True)
class Side:
    """One engine, and how weights get to it."""

    name: str
    engine: Engine
    sync: WeightSync
    timeline: ProcessTimeline


async def _measure(plan: Plan, model: str | None, rows: list[Row]) -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        path = model or str(Path(folder) / "model")
        if model is None:
            build_folder(Path(path), plan.model, seed=0)
        source = load_model(path, dtype=plan.dtype, device=plan.device)
        async with _vllm(plan, path, Path(folder) / "vllm.log") as vllm, _native(plan, path) as native:
            sides = [vllm, native]
            for side in sides:
                with offered(side, source, version=0) as update:
                    await side.engine.load(update)
            rows += await _speed_rows(plan, sides, vocabulary=int(source.config.get_text_config().vocab_size))
            rows += await _mismatch_rows(plan, sides, source, path, has_text=model is not None)
            rows += await _update_rows(plan, sides, source)


@contextlib.asynccontextmanager
async def _vllm(plan: Plan, path: str, log: Path) -> AsyncIterator[Side]:
    recipe = make_recipe(
        {
            "tasks": [{"source": "builtin:sort_digits"}],
            "model": {"path": path, "dtype": plan.dtype, "context": plan.context},
            "engine": {"kind": "vllm", "slots": plan.slots, "vllm": {"arguments": dict(plan.arguments)}},
        }
    )
    transport = MemoryTransport(receiving_device(recipe, 0))
    sync, timeline = WeightSync(Lineage("bench"), transport), ProcessTimeline("engine")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=shared_folder()) as shared:
        receives_on = receiving_device(recipe, 0)
        place = EnginePlace(
            name="vllm", index=0, device=plan.device, receives_on=receives_on, log=log, folder=Path(shared) / "weights"
        )
        opened = await engine_kind(recipe.engine).open(recipe, path, place, sync=sync, timeline=timeline)
        opened.engine.start()
        say(f"vLLM: {shlex.join(opened.server_command)}")
        try:
            yield Side("vLLM", opened.engine, sync, timeline)
        finally:
            assert isinstance(opened.engine, VllmEngine)
            await opened.engine.close()
            opened.close()
            sync.close()


@contextlib.asynccontextmanager
async def _native(plan: Plan, path: str) -> AsyncIterator[Side]:
    model = load_model(path, dtype=plan.dtype, device=plan.device)
    core = EngineCore(model, name="native", slots=plan.slots, context=plan.context, num_blocks=plan.blocks)
    core.wait_warm()
    sync, timeline = WeightSync(Lineage("bench"), MemoryTransport(plan.device)), ProcessTimeline("engine")
    engine = NativeEngine(core, sync=sync, timeline=timeline)
    engine.start()
    try:
        yield Side("native", engine, sync, timeline)
    finally:
        engine.close()
        sync.close()


@contextlib.contextmanager
def offered(side: Side, source: PreTrainedModel, *, version: int) -> Iterator[WeightUpdate]:
    """Offer the source's weights for the engine to fetch."""
    update = side.sync.offer(version, named_tensors(source))
    try:
        yield update
    finally:
        side.sync.release(update)


async def generate(engine: Engine, workload: Workload, *, seed: int) -> list[Rollout]:
    """Run a whole workload at once; returns rollouts in its order."""
    return await asyncio.gather(*(engine.generate(*request) for request in workload.requests(seed=seed)))


async def _speed_rows(plan: Plan, sides: list[Side], *, vocabulary: int) -> list[Row]:
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(plan.turns + 1):
        workload = (plan.load if turn else plan.load.shortened(4)).sample(vocabulary=vocabulary, seed=turn)
        for side in sides:
            started = time.perf_counter()
            rollouts = await generate(side.engine, workload, seed=turn)
            seconds = time.perf_counter() - started
            assert tuple(rollout.num_sampled for rollout in rollouts) == workload.lengths
            if turn:
                rates[side.name].append(workload.num_tokens / seconds)
    rates["vLLM"] = [max(rates["vLLM"])]
    row = _medians(plan.load.name, rates, "tokens/s")
    return [row, Row(f"{plan.load.name}: vLLM ÷ native", row.value / row.peers["native"], "ratio")]


async def _mismatch_rows(plan: Plan, sides: list[Side], source: PreTrainedModel, path: str, *, has_text: bool) -> list[Row]:
    requests, length = plan.mismatch
    workload = mismatch_workload(source, path, requests=requests, length=length, has_text=has_text)
    groups = [await generate(side.engine, workload, seed=plan.turns + 1) for side in sides]
    again = await asyncio.to_thread(trainer_logprobs, path, groups, dtype=plan.dtype, device=plan.device)
    vllm, native = (compare(group, values) for group, values in zip(groups, again, strict=True))
    figures = {"mean |Δ logprob|": "mean_difference", "max |Δ logprob|": "largest_difference", "KL": "divergence"}
    return [
        *(
            Row(f"{name} against the trainer", getattr(vllm, figure), "nats", peers={"native": getattr(native, figure)})
            for name, figure in figures.items()
        ),
        Row("KL against the trainer, native ÷ vLLM", native.divergence / vllm.divergence, "ratio", goal=plan.goal),
    ]


async def _update_rows(plan: Plan, sides: list[Side], source: PreTrainedModel) -> list[Row]:
    seen: dict[str, list[Update]] = {side.name: [] for side in sides}
    versions = itertools.count(1)
    for _ in range(plan.updates):
        nudge(source)
        for side in sides:
            seen[side.name].append(await _update(plan, side, source, versions))
    parts = {
        "load": "update with all slots decoding: load",
        "swap": "update: of that, the exchange of weights",
        "still": "update: longest time without a token",
        "usual": "without an update: longest time without a token",
    }
    rows = [
        _medians(name, {side: [1e3 * getattr(update, part) for update in updates] for side, updates in seen.items()}, "ms")
        for part, name in parts.items()
    ]
    orders = {side: min(update.in_order for update in updates) for side, updates in seen.items()}
    return rows + [Row(f"{side}: rollouts with versions in order", share, "share", "≥ 1") for side, share in orders.items()]


async def _update(plan: Plan, side: Side, source: PreTrainedModel, versions: Iterator[int]) -> Update:
    """One update with rollouts in flight; retried if all of them end before it, as they may on a busy machine."""
    prompt_tokens = plan.load.prompt_tokens
    for tries_left in reversed(range(_TRIES)):
        version = next(versions)
        load = Load(f"update {version}", prompt_tokens, (plan.context - prompt_tokens,) * plan.slots)
        workload = load.sample(vocabulary=int(source.config.get_text_config().vocab_size), seed=version)
        with offered(side, source, version=version) as update:
            rolling = asyncio.ensure_future(generate(side.engine, workload, seed=plan.turns + 1 + version))
            try:
                return await update_in_flight(side.engine, update, rolling, timeline=side.timeline)
            except RolloutsEndedEarly:
                if not tries_left:
                    raise
    raise AssertionError


def nudge(model: PreTrainedModel) -> None:
    """Change some values of every tensor, by enough that bfloat16 shows it."""
    with torch.no_grad():
        for _, tensor in named_tensors(model):
            tensor.view(-1)[::97].mul_(1.01)


def _medians(name: str, values: dict[str, list[float]], unit: str) -> Row:
    return Row(name, statistics.median(values["vLLM"]), unit, peers={"native": statistics.median(values["native"])})
