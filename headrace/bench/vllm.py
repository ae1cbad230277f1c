"""`headrace bench vllm`: a vLLM server as the engine, beside the native engine, on the same model and the same work.

The server is a stock one, started as a run starts it, and its whole command line is printed; both engines are asked through the
engine protocol, turn about. The value is vLLM's, the column beside it the native engine's. Tokens a second are those of vLLM's
best turn and the median of the native engine's; other figures are medians. On a CPU both compute with all
cores but one, as vLLM does by itself.

An update's time is that of `load` alone, with every slot decoding: the trainer's side has the weights ready before. What of it
is spent exchanging weights, a server's pausing and resuming included, is the engine's own account. How long nothing was drawn
is seen from outside, by the count of tokens: the usual time between two steps is in it, and a row has that alone.
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
from transformers.utils import logging as transformers_logging

from headrace.bench.engine import mismatch_workload
from headrace.bench.engine_loads import Load
from headrace.bench.mismatch import compare, trainer_logprobs
from headrace.bench.table import Row, report
from headrace.bench.vllm_update import Outlasted, UpdateSeen, update_in_flight
from headrace.config import make_recipe
from headrace.engine import EngineCore, EnginePlace, NativeEngine, VllmEngine, choose_python, engine_kind, find_vllm
from headrace.launch import receiving_place
from headrace.model import ModelError, ModelSettings, build_folder, load_config, load_model, named_tensors
from headrace.observe import ProcessTimeline
from headrace.records import Rollout, Sampling
from headrace.settings import ConfigError
from headrace.sync import Lineage, MemoryTransport, WeightSync, shared_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from transformers import PreTrainedModel

    from headrace.bench.engine_loads import Workload
    from headrace.engine import Engine
    from headrace.records import WeightUpdate

_TRIES = 4
"""Of an update that must find rollouts in flight."""


@dataclass(frozen=True)
class Plan:
    """What is measured on a kind of machine; there are as many slots as requests."""

    device: str
    dtype: str
    model: ModelSettings
    """Of the builtin model, where no folder is given."""
    load: Load
    context: int
    """With room for rollouts that outlast an update."""
    mismatch: tuple[int, int]
    """Requests and tokens of each."""
    blocks: int = 0
    """Of the native engine's keys and values; 0 as many as it would take by itself."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """More of vLLM's command line."""
    goal: str = ""
    """Of the native engine's KL against the trainer, over vLLM's."""
    turns: int = 3
    updates: int = 5

    @property
    def slots(self) -> int:
        return len(self.load.lengths)


def make_plan(device: str, *, quick: bool, has_model: bool) -> Plan:
    """The GPU's, the CPU's for the tiny model or for one that is given, or a few requests of it."""
    turns, updates = (2, 2) if quick else (3, 5)
    if device == "cuda":
        return Plan(
            device=device,
            dtype="bfloat16",
            model=ModelSettings(hidden_size=1024, num_layers=28, num_heads=16, context=4096),
            load=Load.uniform(256, 64, 256),
            context=4096,
            mismatch=(64, 128),
            blocks=24 * 1024,
            arguments=(("gpu_memory_utilization", 0.4),),  # both engines and a trainer share the GPU
            goal="≤ 0.2",
            turns=turns,
            updates=updates,
        )
    count, drawn = (4, 16) if quick else (16, 32) if has_model else (64, 64)
    return Plan(
        device=device,
        dtype="float32",
        model=ModelSettings(context=4096),
        load=Load.uniform(count, 32, drawn),
        context=1024 if has_model else 4096,
        mismatch=(8, 16) if quick else (16, 64),
        turns=turns,
        updates=updates,
    )


def run(*, quick: bool, json_file: Path | None, model: str | None = None) -> int:
    """Status 1 if a rollout's versions are wrong or the native engine's KL is too large, with `--quick` too, for neither hangs
    on the size; speeds have no goal here."""
    transformers_logging.disable_progress_bar()
    python = choose_python("")
    try:
        find_vllm(python)
    except ConfigError as error:
        fix = "install vLLM in an environment and name its interpreter in HEADRACE_VLLM_PYTHON"
        raise ConfigError(f"headrace bench vllm: {python} has no vLLM, or does not run; {fix}") from error
    plan = make_plan("cuda" if torch.cuda.is_available() else "cpu", quick=quick, has_model=model is not None)
    if plan.device == "cpu":  # as vLLM has there, which leaves one core to all but the model
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    rows: list[Row] = []
    try:
        if model is not None:
            load_config(model)  # a folder that holds no model is refused before a server is started
        asyncio.run(_measure(plan, model, rows))
    except ModelError as error:
        raise ConfigError(str(error)) from error
    finally:  # what was measured before a failure is not lost
        status = report("vllm", rows, json_file=json_file) if rows else 1
    return status


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
    transport = MemoryTransport(receiving_place(recipe, 0))
    sync, timeline = WeightSync(Lineage("bench"), transport), ProcessTimeline("engine")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=shared_folder()) as shared:
        receives_on = receiving_place(recipe, 0)
        place = EnginePlace(
            name="vllm", index=0, device=plan.device, receives_on=receives_on, log=log, folder=Path(shared) / "weights"
        )
        opened = await engine_kind(recipe.engine).open(recipe, path, place, sync=sync, timeline=timeline)
        opened.engine.start()
        print(f"vLLM: {shlex.join(opened.server_command)}", flush=True)
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
    """The source's weights, ready for one engine to fetch."""
    update = side.sync.offer(version, named_tensors(source))
    try:
        yield update
    finally:
        side.sync.release(update)


async def generate(engine: Engine, workload: Workload, *, seed: int) -> list[Rollout]:
    """All of it at once, in its order."""
    pairs = zip(workload.prompts, workload.lengths, strict=True)
    return await asyncio.gather(
        *(
            engine.generate(
                Rollout.from_prompt(list(prompt), id=f"{seed}/{number}"),
                Sampling(temperature=1.0, max_tokens=length, seed=seed * 1_000_003 + number),
            )
            for number, (prompt, length) in enumerate(pairs)
        )
    )


async def _speed_rows(plan: Plan, sides: list[Side], *, vocabulary: int) -> list[Row]:
    """After an untimed turn of each; no two turns have the same prompts."""
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(plan.turns + 1):
        workload = (plan.load if turn else plan.load.shortened(4)).draw(vocabulary=vocabulary, seed=turn)
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
    return [
        Row("mean |Δ logprob| against the trainer", vllm.mean_difference, "nats", peers={"native": native.mean_difference}),
        Row(
            "max |Δ logprob| against the trainer", vllm.largest_difference, "nats", peers={"native": native.largest_difference}
        ),
        Row("KL against the trainer", vllm.divergence, "nats", peers={"native": native.divergence}),
        Row("KL against the trainer, native ÷ vLLM", native.divergence / vllm.divergence, "ratio", goal=plan.goal),
    ]


async def _update_rows(plan: Plan, sides: list[Side], source: PreTrainedModel) -> list[Row]:
    seen: dict[str, list[UpdateSeen]] = {side.name: [] for side in sides}
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
    return [
        *(
            _medians(name, {side: [1e3 * getattr(one, part) for one in seen[side]] for side in seen}, "ms")
            for part, name in parts.items()
        ),
        *(
            Row(f"{side}: rollouts with versions in order", min(one.in_order for one in seen[side]), "share", "≥ 1")
            for side in seen
        ),
    ]


async def _update(plan: Plan, side: Side, source: PreTrainedModel, versions: Iterator[int]) -> UpdateSeen:
    """One with rollouts in flight: tried again where a busy machine was so late with it that none was left."""
    prompt_tokens = plan.load.prompt_tokens
    for tries_left in reversed(range(_TRIES)):
        version = next(versions)
        load = Load(f"update {version}", prompt_tokens, (plan.context - prompt_tokens,) * plan.slots)
        workload = load.draw(vocabulary=int(source.config.get_text_config().vocab_size), seed=version)
        with offered(side, source, version=version) as update:
            rolling = asyncio.ensure_future(generate(side.engine, workload, seed=plan.turns + 1 + version))
            try:
                return await update_in_flight(side.engine, update, rolling, timeline=side.timeline)
            except Outlasted:
                if not tries_left:
                    raise
    raise AssertionError


def nudge(model: PreTrainedModel) -> None:
    """Change every tensor a little, and by enough that bfloat16 has it."""
    with torch.no_grad():
        for _, tensor in named_tensors(model):
            tensor.view(-1)[::97].mul_(1.01)


def _medians(name: str, values: dict[str, list[float]], unit: str) -> Row:
    return Row(name, statistics.median(values["vLLM"]), unit, peers={"native": statistics.median(values["native"])})
