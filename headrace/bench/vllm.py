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
from headrace.bench.measure import KL, compare, mismatch_workload, trainer_logprobs
from headrace.bench.vllm_update import IN_ORDER, LOAD, STILL, SWAP, USUAL, RolloutsEndedEarly, update_in_flight
from headrace.config import make_recipe
from headrace.engine import EnginePlace, NativeEngine, choose_python, engine_kind, find_vllm
from headrace.launch import receiving_device
from headrace.model import ModelSettings, build_folder, load_model, named_tensors
from headrace.observe import ProcessTimeline
from headrace.sync import Lineage, MemoryTransport, WeightSync, shared_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from transformers import PreTrainedModel

    from headrace.bench.loads import Workload
    from headrace.engine import Engine
    from headrace.records import Rollout

VLLM, NATIVE = "vLLM", "native"
_ATTEMPTS = 4
"""At one update, where its rollouts end before it does."""


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
    turns: int
    updates: int
    engines: dict[str, dict[str, Any]]
    """The `[engine]` section of each side, without the slots."""
    goal: str = ""
    """For KL against the trainer, native ÷ vLLM."""


def make_plan(device: str, *, quick: bool, has_model: bool) -> Plan:
    """For a GPU, or for a CPU with the built-in or a given model; `quick` takes fewer turns, and on a CPU fewer requests."""
    turns, updates = (2, 2) if quick else (3, 5)
    vllm: dict[str, Any] = {"kind": "vllm"}
    if device == "cuda":
        model, load = ModelSettings(hidden_size=1024, num_layers=28, num_heads=16, context=4096), Load.uniform(256, 64, 256)
        vllm["vllm"] = {"arguments": {"gpu_memory_utilization": 0.4}}  # shared with the native engine and a trainer
        engines = {VLLM: vllm, NATIVE: {"kv_blocks": 24 * 1024}}
        return Plan(device, "bfloat16", model, load, 4096, (64, 128), turns, updates, engines, goal="≤ 0.2")
    count, length = (4, 16) if quick else (16, 32) if has_model else (64, 64)
    context = 1024 if has_model else 16384 if quick else 4096  # the fewer slots, the sooner a rollout has all its tokens
    model, load = ModelSettings(context=context), Load.uniform(count, 32, length)
    mismatch = (8, 16) if quick else (16, 64)
    return Plan(device, "float32", model, load, context, mismatch, turns, updates, {VLLM: vllm, NATIVE: {}})


def run(*, quick: bool, json_file: Path | None, model: str | None = None) -> int:
    """Returns 1 if a rollout's versions are wrong or the native engine's KL is too large, even with `--quick`: neither depends
    on size. Speeds have no goal here."""
    find_vllm(choose_python(""))
    plan = make_plan(default_device(), quick=quick, has_model=model is not None)
    if plan.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))

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

    engine: Engine
    sync: WeightSync
    timeline: ProcessTimeline


async def _measure(plan: Plan, model: str | None, rows: list[Row]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        path = model or str(folder / "model")
        if model is None:
            build_folder(Path(path), plan.model, seed=0)
        source = load_model(path, dtype=plan.dtype, device=plan.device)
        sides = {name: await stack.enter_async_context(_open(plan, name, path, folder / "log")) for name in plan.engines}
        for side in sides.values():
            await side.engine.load(side.sync.offer(0, named_tensors(source)))
        rows += await _speed_rows(plan, sides, vocabulary=int(source.config.get_text_config().vocab_size))
        rows += await _mismatch_rows(plan, sides, source, path, has_text=model is not None)
        rows += await _update_rows(plan, sides, source)


@contextlib.asynccontextmanager
async def _open(plan: Plan, name: str, path: str, log: Path) -> AsyncIterator[Side]:
    """An engine as a run's process opens it."""
    recipe = make_recipe(
        {
            "device": plan.device,
            "tasks": [{"source": "builtin:sort_digits"}],
            "model": {"path": path, "dtype": plan.dtype, "context": plan.context},
            "engine": {"slots": len(plan.load.lengths), **plan.engines[name]},
        }
    )
    receives_on = receiving_device(recipe, 0)
    sync, timeline = WeightSync(Lineage("bench"), MemoryTransport(receives_on)), ProcessTimeline("engine")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=shared_folder()) as shared:
        files: dict[str, Any] = {"log": log, "folder": Path(shared) / "weights"}
        place = EnginePlace(name=name, index=0, device=plan.device, receives_on=receives_on, **files)
        opened = await engine_kind(recipe.engine).open(recipe, path, place, sync=sync, timeline=timeline)
        engine: Any = opened.engine
        engine.start()
        if opened.server_command:
            say(f"{name}: {shlex.join(opened.server_command)}")
        if isinstance(engine, NativeEngine):
            engine.core.wait_warm()
        try:
            yield Side(engine, sync, timeline)
        finally:
            if (closing := engine.close()) is not None:  # a server's engine closes its connections
                await closing
            opened.close()
            sync.close()


async def generate(engine: Engine, workload: Workload, *, seed: int) -> list[Rollout]:
    """Run a whole workload at once; returns rollouts in its order."""
    return await asyncio.gather(*(engine.generate(*request) for request in workload.requests(seed=seed)))


async def _speed_rows(plan: Plan, sides: dict[str, Side], *, vocabulary: int) -> list[Row]:
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(plan.turns + 1):
        workload = (plan.load if turn else plan.load.shortened(4)).sample(vocabulary=vocabulary, seed=turn)
        for name, side in sides.items():
            started = time.perf_counter()
            rollouts = await generate(side.engine, workload, seed=turn)
            seconds = time.perf_counter() - started
            assert tuple(rollout.num_sampled for rollout in rollouts) == workload.lengths
            if turn:
                rates[name].append(workload.num_tokens / seconds)
    return [Row(plan.load.name, max(rates[VLLM]), "tokens/s", peers={NATIVE: statistics.median(rates[NATIVE])})]


async def _mismatch_rows(
    plan: Plan, sides: dict[str, Side], source: PreTrainedModel, path: str, *, has_text: bool
) -> list[Row]:
    requests, length = plan.mismatch
    workload = mismatch_workload(source, path, requests=requests, length=length, has_text=has_text)
    groups = [await generate(side.engine, workload, seed=plan.turns + 1) for side in sides.values()]
    again = await asyncio.to_thread(trainer_logprobs, path, groups, dtype=plan.dtype, device=plan.device)
    vllm, native = (compare(group, values) for group, values in zip(groups, again, strict=True))
    rows = [Row(name, value, "nats", peers={NATIVE: native[name]}) for name, value in vllm.items()]
    return [*rows, Row(f"{KL}, native ÷ vLLM", native[KL] / vllm[KL], "ratio", goal=plan.goal)]


async def _update_rows(plan: Plan, sides: dict[str, Side], source: PreTrainedModel) -> list[Row]:
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(plan.updates):
        with torch.no_grad():
            for _, tensor in named_tensors(source):
                tensor.view(-1)[::97].mul_(1.01)  # by enough that bfloat16 shows it
        for name, side in sides.items():
            seen[name].append(await _update(plan, side, source))
    rows = []
    for figure in (LOAD, SWAP, STILL, USUAL):
        vllm, native = (1e3 * statistics.median(update[figure] for update in seen[name]) for name in (VLLM, NATIVE))
        rows.append(Row(figure, vllm, "ms", peers={NATIVE: native}))
    orders = {name: min(update[IN_ORDER] for update in updates) for name, updates in seen.items()}
    return rows + [Row(f"{name}: {IN_ORDER}", share, "share", "≥ 1") for name, share in orders.items()]


async def _update(plan: Plan, side: Side, source: PreTrainedModel) -> dict[str, float]:
    """One update with rollouts in flight. It is retried if they end before it: a server samples on while this process, which
    has to send the update, waits for a core (docs/negative_results.md)."""
    lengths = (plan.context - plan.load.prompt_tokens,) * len(plan.load.lengths)
    for attempts_left in reversed(range(_ATTEMPTS)):
        version = (await side.engine.state()).version + 1
        load = Load(f"update {version}", plan.load.prompt_tokens, lengths)
        workload = load.sample(vocabulary=int(source.config.get_text_config().vocab_size), seed=version)
        update = side.sync.offer(version, named_tensors(source))
        rolling = asyncio.ensure_future(generate(side.engine, workload, seed=plan.turns + 1 + version))
        try:
            return await update_in_flight(side.engine, update, rolling, timeline=side.timeline)
        except RolloutsEndedEarly:
            if not attempts_left:
                raise
        finally:
            side.sync.release(update)
    raise AssertionError
