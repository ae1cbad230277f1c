"""`headrace bench engine`: how fast the native engine is, how close to memory bandwidth, and how exact its logprobs are.

Peers take turns with ours in the same run. Ours is the median of its turns, a peer's tokens/s those of its best turn; vLLM's
settings are printed in full. Time runs from the first submission to the last result, including prefill, scheduling and building
rollouts. No two turns have the same prompts. A peer that is missing or fails is named in one line and has an empty column.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.child import Child, PeerFailed
from headrace.bench.engine_native import bytes_read, copy_bandwidth, generate, scheduling_cost
from headrace.bench.engine_peers import VllmPeer, continuous_generate, load_plain, padded_generate
from headrace.bench.harness import Row, default_device, run_parts, say, take_turns
from headrace.bench.loads import QWEN3_0_6B, SMALL, SMOLLM2_135M, Load, Workload, write_random_model
from headrace.bench.measure import MEAN, compare, mismatch_workload, release, trainer_logprobs
from headrace.engine import EngineCore
from headrace.model import load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from headrace.bench.engine_native import Turn

Peers = dict[str, "Callable[[Workload], float]"]
"""By name: runs a workload and returns its seconds."""
_START_SECONDS = 240.0


@dataclass(frozen=True)
class Plan:
    """What to measure on a GPU or a CPU."""

    device: str
    dtype: str
    shape: dict[str, Any]
    slots: int
    context: int
    loads: tuple[Load, ...]
    tail: Load
    group: Load
    """Siblings that share one prompt."""
    once: Load
    """For peers too slow for `loads`."""
    turns: int
    mismatch: tuple[int, int]
    """Number of requests, and tokens per request."""
    blocks: int = 0
    """In the KV cache; 0 lets the engine choose."""
    start_goal: str = ""
    logprob_goal: str = ""


def make_plan(device: str, *, quick: bool) -> Plan:
    """For a GPU or a CPU; `quick` takes two turns, and on a CPU a small model."""
    turns = 2 if quick else 3
    if device == "cuda":
        return Plan(
            device=device,
            dtype="bfloat16",
            shape=QWEN3_0_6B,
            slots=1024,
            context=4352,
            loads=(
                Load.uniform(256, 64, 256, goals={"": "≥ 60000", "vLLM": "≥ 1.5", "roofline": "≥ 0.6"}),
                Load.uniform(1024, 64, 256, goals={"": "≥ 90000"}),
                Load.uniform(32, 2048, 256, goals={"": "≥ 9000"}),
                Load.uniform(8, 64, 256, goals={"": "≥ 5500"}),
            ),
            tail=Load.long_tail(512, 64, mean=400, cap=4096, goals={"vLLM": "≥ 1"}),
            group=Load.uniform(8, 1024, 64, is_group=True),
            once=Load.uniform(256, 64, 64, goals={"model.generate": "≥ 20"}),
            blocks=24 * 1024,
            turns=turns,
            mismatch=(64, 128),
            start_goal="≤ 30",
        )
    mean, size = (12, (8, 16)) if quick else (48, (64, 32))
    return Plan(
        device=device,
        dtype="float32",
        shape=SMALL if quick else SMOLLM2_135M,
        slots=64,
        context=512,
        loads=(Load.uniform(4, 16, 16) if quick else Load.uniform(16, 32, 32),),
        tail=Load.long_tail(*size, mean=mean, cap=48 if quick else 256, goals={"model.generate": "≥ 2"}),
        group=Load.uniform(4, 64, 8, is_group=True) if quick else Load.uniform(8, 256, 16, is_group=True),
        once=Load.uniform(4, 16, 8) if quick else Load.uniform(8, 32, 16),
        turns=turns,
        mismatch=(8, 16) if quick else (16, 64),
        logprob_goal="≤ 1e-5",
    )


def run(*, quick: bool, json_file: Path | None, model: str | None = None) -> int:
    """`--quick` takes two turns, and on a CPU a small model."""
    plan = make_plan(default_device(), quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        parts = {"engine": lambda: measure(plan, Path(folder), model=model)}
        return run_parts("engine", parts, quick=quick, json_file=json_file)


def measure(plan: Plan, folder: Path, *, model: str | None) -> Iterator[list[Row]]:
    """All rows. Only on a CPU is the speed of `model` measured: the GPU's goals are for Qwen3-0.6B's shape."""
    speed_folder = model or ""
    if model is None or plan.device == "cuda":
        speed_folder = write_random_model(plan.shape, folder / "model", dtype=plan.dtype)
    startups = [first_token_seconds(speed_folder, plan) for _ in range(2)]
    yield [Row("command to first token", startups[1], "s", plan.start_goal)]  # the first start filled the compile cache
    yield [Row("scheduling per request", scheduling_cost(requests=2048, repetitions=plan.turns), "µs", "≤ 100")]
    yield from _speed_rows(plan, speed_folder, folder / "vllm.log")
    yield _mismatch_rows(plan, model or speed_folder, has_text=model is not None)


def open_vllm(plan: Plan, model_folder: str, log: Path) -> VllmPeer | None:
    """vLLM on a GPU, if it is installed and starts."""
    if plan.device != "cuda":
        return None
    try:
        peer = VllmPeer(model_folder, dtype=plan.dtype, context=plan.context, slots=plan.slots, log=log)
    except PeerFailed as failed:
        say(f"{failed}; it is absent from the table")
        return None
    say(f"vLLM: {peer.settings}; the rest is its default")
    return peer


def _speed_rows(plan: Plan, model_folder: str, log: Path) -> Iterator[list[Row]]:
    with contextlib.ExitStack() as stack:
        vllm = open_vllm(plan, model_folder, log)
        if vllm is not None:
            stack.enter_context(vllm)
        bandwidth = copy_bandwidth(plan.device)
        yield [Row("copy bandwidth", bandwidth / 1e9, "GB/s")]
        release()
        model = load_model(model_folder, dtype=plan.dtype, device=plan.device)
        core = EngineCore(model, name="bench", slots=plan.slots, context=plan.context, num_blocks=plan.blocks)
        core.wait_warm()
        plain = load_plain(model_folder, dtype=plan.dtype, device=plan.device)
        rivals: Peers = {} if vllm is None else {"vLLM": vllm.generate}
        padded: Peers = {"model.generate": functools.partial(padded_generate, plain)}
        slow: Peers = {**padded, "model.generate_batch": functools.partial(continuous_generate, plain)}

        vocabulary, is_cpu = int(model.config.get_text_config().vocab_size), plan.device == "cpu"
        take = functools.partial(alternate, core, vocabulary=vocabulary, turns=plan.turns)
        for load in plan.loads:
            turns, rows = take(load, peers=rivals, is_slow=is_cpu)
            yield [*rows, *decode_rows(load, turns, *bytes_read(model), bandwidth=bandwidth)]
        yield take(plan.tail, peers=padded if is_cpu else rivals, is_slow=True)[1]
        yield take(plan.once, peers=slow, is_slow=True, turns=1)[1]
        turns, _ = take(plan.group, peers={}, is_slow=is_cpu)
        computed = statistics.median(sum(step.prompt_rows for step in turn.steps) for turn in turns) / plan.group.prompt_tokens
        yield [Row(f"{plan.group.name}: prompt rows ÷ {plan.group.prompt_tokens}", computed, "ratio", bound=1.0)]


def alternate(
    core: EngineCore, load: Load, *, vocabulary: int, turns: int, peers: Peers, is_slow: bool
) -> tuple[list[Turn], list[Row]]:
    """Our turns; our tokens/s and the ratio to each peer's.

    Ours and each peer take turns after an untimed one, shortened if `is_slow`; a peer that fails is removed from `peers`.
    """
    warmup = load.shortened(2) if is_slow else load

    def workload(turn: int) -> Workload:
        return (load if turn else warmup).sample(vocabulary=vocabulary, seed=turn)

    def rate_of(peer: Callable[[Workload], float]) -> Callable[[int], float]:
        return lambda turn: workload(turn).num_tokens / peer(workload(turn))

    contestants: dict[str, Callable[[int], Any]] = {"ours": lambda turn: generate(core, workload(turn), seed=turn)}
    seen = take_turns(contestants | {name: rate_of(peer) for name, peer in peers.items()}, turns, warmups=1)
    for name in peers.keys() - seen.keys():
        del peers[name]
    rate, best = statistics.median(turn.tokens_per_second for turn in seen["ours"]), {name: max(seen[name]) for name in peers}
    ratios = [Row(f"{load.name} ÷ {name}", rate / best[name], "ratio", load.goals.get(name, "")) for name in peers]
    return seen["ours"], [Row(load.name, rate, "tokens/s", load.goals.get("", ""), peers=best), *ratios]


def decode_rows(load: Load, turns: Sequence[Turn], weights: int, per_token: int, *, bandwidth: float) -> list[Row]:
    """Steps that decode every request, against the time to read all weights and all cached keys and values once."""
    steps = [step for turn in turns for step in turn.steps if not step.prompt_rows and step.decode_rows == len(load.lengths)]
    if not steps:
        say(f"{load.name}: no step decoded all requests at once; its decode steps have no figure")
        return []
    least = [(weights + per_token * step.cached_tokens) / bandwidth for step in steps]
    shares = [bound / step.seconds for bound, step in zip(least, steps, strict=True)]
    seconds, name = statistics.median(step.seconds for step in steps), f"{load.name}: decode step"
    return [
        Row(name, seconds * 1e3, "ms", bound=statistics.median(least) * 1e3),
        Row(f"{name}, share of the roofline", statistics.median(shares), "share", load.goals.get("roofline", ""), 1.0),
    ]


def _mismatch_rows(plan: Plan, model_folder: str, *, has_text: bool) -> list[Row]:
    """Our rollouts against the trainer; `headrace bench vllm` has vLLM's."""
    requests, length = plan.mismatch
    model = load_model(model_folder, dtype=plan.dtype, device=plan.device)
    core = EngineCore(model, name="bench", slots=requests, context=min(plan.context, 1024))
    core.wait_warm()
    workload = mismatch_workload(model, model_folder, requests=requests, length=length, has_text=has_text)
    rollouts = generate(core, workload, seed=0).rollouts
    (again,) = trainer_logprobs(model_folder, [rollouts], dtype=plan.dtype, device=plan.device)
    found, goals = compare(rollouts, again), {MEAN: plan.logprob_goal}
    return [Row(name, value, "nats", goals.get(name, "")) for name, value in found.items()]


def first_token_seconds(model_folder: str, plan: Plan) -> float:
    """From the start of a process until it has sampled a token."""
    settings = {"folder": model_folder, "dtype": plan.dtype, "device": plan.device, "context": plan.context}
    settings["slots"] = min(plan.slots, 256)
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        Child("the engine", "headrace.bench.engine_native:first_token", settings, log=Path(folder) / "log") as child,
    ):
        child.hear(seconds=_START_SECONDS)
        return time.perf_counter() - started
