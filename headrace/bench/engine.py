"""`headrace bench engine`: how fast the native engine is, how near its memory's limit, and how true its logprobs.

Every figure that has a peer is measured with it in one run, turn about. Ours is the median of its turns, a peer's tokens a
second those of its best turn; vLLM's settings are printed in full. Time runs from the
first submission to the last result: prefill, scheduling and the making of rollouts are in it. No two turns have the same
prompts. Where a peer is not installed or fails, one line says so, and its column stays empty.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging as transformers_logging

from headrace.bench.engine_loads import QWEN3_0_6B, SMALL, SMOLLM2_135M, Load, Workload, write_random_model
from headrace.bench.engine_native import Turn, copy_bandwidth, generate, roofline_of, scheduling_cost
from headrace.bench.engine_peers import PeerFailed, VllmPeer, continuous_generate, load_plain, padded_generate
from headrace.bench.mismatch import Mismatch, compare, plain_logprobs, text_workload, trainer_logprobs
from headrace.bench.table import Row, report
from headrace.engine import EngineCore
from headrace.model import load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    from headrace.bench.engine_native import Roofline

Peers = dict[str, "Callable[[Workload], float]"]
"""By name, what takes a workload and says how many seconds it took."""
_START_SECONDS = 240.0


@dataclass(frozen=True)
class Plan:
    """What is measured on a kind of machine."""

    device: str
    dtype: str
    shape: dict[str, Any]
    slots: int
    context: int
    loads: tuple[Load, ...]
    """The decode steps of the first have a goal."""
    tail: Load
    group: Load
    """Of siblings."""
    once: Load
    """For peers too slow to be given a load of `loads`."""
    blocks: int
    """Of keys and values; 0 as many as the engine would take by itself."""
    turns: int
    probe_bytes: int
    """Copied to learn the memory's speed."""
    queued: int
    """Requests whose scheduling is measured."""
    mismatch: tuple[int, int]
    """Requests and tokens of each."""
    goals: dict[str, str] = field(default_factory=dict)
    """By the name of a row that `loads` does not have."""


def make_plan(device: str, *, quick: bool) -> Plan:
    """The GPU's, the CPU's, or a few seconds of the CPU's on a small model."""
    if device == "cuda":
        first = Load.uniform(256, 64, 256, goal="≥ 60000")
        tail, once = Load.long_tail(512, 64, mean=400, cap=4096), Load.uniform(256, 64, 64)
        return Plan(
            device=device,
            dtype="bfloat16",
            shape=QWEN3_0_6B,
            slots=1024,
            context=4352,
            loads=(
                first,
                Load.uniform(1024, 64, 256, goal="≥ 90000"),
                Load.uniform(32, 2048, 256, goal="≥ 9000"),
                Load.uniform(8, 64, 256, goal="≥ 5500"),
            ),
            tail=tail,
            group=Load.uniform(8, 1024, 64, is_group=True),
            once=once,
            blocks=24 * 1024,
            turns=2 if quick else 3,
            probe_bytes=2 << 30,
            queued=4096,
            mismatch=(64, 128),
            goals={
                f"{first.name} ÷ vLLM": "≥ 1.5",
                f"{tail.name} ÷ vLLM": "≥ 1",
                f"{once.name} ÷ model.generate": "≥ 20",
                f"{first.name}: decode step, share of the roofline": "≥ 0.6",
                "KL against the trainer ÷ vLLM's": "≤ 0.2",
                "command to first token": "≤ 30",
                "scheduling per request": "≤ 100",
            },
        )
    tail = Load.long_tail(8, 16, mean=12, cap=48) if quick else Load.long_tail(64, 32, mean=48, cap=256)
    return Plan(
        device=device,
        dtype="float32",
        shape=SMALL if quick else SMOLLM2_135M,
        slots=64,
        context=512,
        loads=(Load.uniform(4, 16, 16) if quick else Load.uniform(16, 32, 32),),
        tail=tail,
        group=Load.uniform(4, 64, 8, is_group=True) if quick else Load.uniform(8, 256, 16, is_group=True),
        once=Load.uniform(4, 16, 8) if quick else Load.uniform(8, 32, 16),
        blocks=0,
        turns=2 if quick else 3,
        probe_bytes=1 << 26 if quick else 1 << 28,
        queued=512 if quick else 4096,
        mismatch=(8, 16) if quick else (16, 64),
        goals={
            f"{tail.name} ÷ model.generate": "≥ 2",
            "mean |Δ logprob| against the trainer": "≤ 1e-5",
            "scheduling per request": "≤ 100",
        },
    )


def run(*, quick: bool, json_file: Path | None, model: str | None = None) -> int:
    """Status 1 if a goal is missed; `--quick` takes two turns and judges nothing."""
    transformers_logging.disable_progress_bar()
    plan = make_plan("cuda" if torch.cuda.is_available() else "cpu", quick=quick)
    if model is not None:
        load_config(model)  # a folder that holds no model is refused before anything is measured
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for part in measure(plan, Path(folder), model=model):
                rows += [_with_goal(row, plan.goals) for row in part]
    finally:  # what was measured before a failure is not lost
        status = report("engine", rows, json_file=json_file, quick=quick)
    return status


def measure(plan: Plan, folder: Path, *, model: str | None) -> Iterator[list[Row]]:
    """All rows, some at a time. The model given is measured for speed too where no goal is set for another's shape: on CPU."""
    random_folder = str(folder / "model")
    if model is None or plan.device == "cuda":
        write_random_model(plan.shape, Path(random_folder), dtype=plan.dtype)
    speed_folder = random_folder if model is None or plan.device == "cuda" else model
    yield [_startup_row(plan, speed_folder)]
    yield [Row("scheduling per request", scheduling_cost(requests=plan.queued, repetitions=plan.turns), "µs")]
    vllm = _open_vllm(plan, speed_folder, folder)
    try:
        yield from _speed_rows(plan, speed_folder, vllm)
        if vllm is not None and model not in (None, speed_folder):
            vllm.close()
            vllm = _open_vllm(plan, str(model), folder)
        yield _mismatch_rows(plan, model or speed_folder, vllm, has_text=model is not None)
    finally:
        if vllm is not None:
            vllm.close()


def _with_goal(row: Row, goals: dict[str, str]) -> Row:
    return Row(row.name, row.value, row.unit, goals.get(row.name, row.goal), row.bound, row.peers)


def _open_vllm(plan: Plan, model_folder: str, folder: Path) -> VllmPeer | None:
    if plan.device != "cuda":
        return None
    try:
        peer = VllmPeer(model_folder, dtype=plan.dtype, context=plan.context, slots=plan.slots, log=folder / "vllm.log")
    except PeerFailed as failed:
        _say_absent(failed)
        return None
    print(f"vLLM: {peer.settings}; the rest as it comes", flush=True)
    return peer


def _speed_rows(plan: Plan, model_folder: str, vllm: VllmPeer | None) -> Iterator[list[Row]]:
    device = torch.device(plan.device)
    bandwidth = copy_bandwidth(device, num_bytes=plan.probe_bytes)
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    model = load_model(model_folder, dtype=plan.dtype, device=plan.device)
    core = EngineCore(model, name="bench", slots=plan.slots, context=plan.context, num_blocks=plan.blocks)
    core.wait_warm()
    roofline = roofline_of(model, bandwidth=bandwidth)
    plain = load_plain(model_folder, dtype=plan.dtype, device=plan.device)
    vocabulary = int(model.config.get_text_config().vocab_size)
    rivals: Peers = {} if vllm is None else {"vLLM": vllm.generate}
    padded: Peers = {"model.generate": functools.partial(padded_generate, plain)}
    slow: Peers = {**padded, "model.generate_batch": functools.partial(continuous_generate, plain)}

    yield [Row("copy bandwidth", bandwidth / 1e9, "GB/s")]
    take = functools.partial(alternate, core, vocabulary=vocabulary, turns=plan.turns)
    is_cpu = plan.device == "cpu"
    for load in plan.loads:
        found = take(load, peers=rivals, is_slow=is_cpu)
        yield [*found.rows(), *decode_rows(found, roofline)]
    yield take(plan.tail, peers=padded if is_cpu else rivals, is_slow=True).rows()
    yield take(plan.once, peers=slow, is_slow=True, turns=1).rows()
    siblings = take(plan.group, peers={}, is_slow=is_cpu)
    computed = statistics.median(turn.prompt_rows for turn in siblings.turns) / plan.group.prompt_tokens
    yield [Row(f"{plan.group.name}: prompt rows ÷ {plan.group.prompt_tokens}", computed, "ratio", bound=1.0)]


@dataclass(frozen=True)
class Found:
    """All turns of one load."""

    load: Load
    turns: tuple[Turn, ...]
    peers: dict[str, float]
    """Tokens a second, of the best turn, of those that took every turn."""

    def rows(self) -> list[Row]:
        """Tokens a second, and how many times a peer's."""
        ours = statistics.median(turn.tokens_per_second for turn in self.turns)
        rows = [Row(self.load.name, ours, "tokens/s", goal=self.load.goal, peers=self.peers)]
        return rows + [Row(f"{self.load.name} ÷ {peer}", ours / theirs, "ratio") for peer, theirs in self.peers.items()]


def alternate(core: EngineCore, load: Load, *, vocabulary: int, turns: int, peers: Peers, is_slow: bool) -> Found:
    """Ours and each peer in turn, after an untimed turn of all; a peer that fails is taken out of `peers` for good.

    Where a turn is slow, the untimed one has a few tokens only.
    """
    warmup = load.shortened(2) if is_slow else load
    seen: list[Turn] = []
    rates: dict[str, list[float]] = {}
    for number, wanted in enumerate([warmup, *[load] * turns]):
        workload = wanted.draw(vocabulary=vocabulary, seed=number)
        turn = generate(core, workload, seed=number)
        if number:
            seen.append(turn)
        for name, take in list(peers.items()):
            try:
                rate = workload.num_tokens / take(workload)
            except PeerFailed as failed:
                _say_absent(failed)
                del peers[name]
                continue
            if number:
                rates.setdefault(name, []).append(rate)
    found = Found(load, tuple(seen), {name: max(rates[name]) for name in peers})
    said = ", ".join(f"{name} {rate:,.0f}" for name, rate in {"ours": found.rows()[0].value, **found.peers}.items())
    print(f"{load.name}: {said} tokens/s", flush=True)
    return found


def decode_rows(found: Found, roofline: Roofline) -> list[Row]:
    """The steps that decode every request, against the time to read weights, keys and values once."""
    steps = [step for turn in found.turns for step in turn.full_steps()]
    shares = [share for turn in found.turns if (share := roofline.share(turn)) is not None]
    if not shares:
        print(f"{found.load.name}: no step decoded all requests at once; its decode steps have no figure", flush=True)
        return []
    median = statistics.median(step.seconds for step in steps)
    least = statistics.median(roofline.seconds(step.cached_tokens) for step in steps)
    name = f"{found.load.name}: decode step"
    return [
        Row(name, median * 1e3, "ms", bound=least * 1e3),
        Row(f"{name}, share of the roofline", statistics.median(shares), "share", bound=1.0),
    ]


def _mismatch_rows(plan: Plan, model_folder: str, vllm: VllmPeer | None, *, has_text: bool) -> list[Row]:
    """Ours and vLLM's rollouts, each against the same trainer; ours against a plain forward pass too."""
    requests, length = plan.mismatch
    model = load_model(model_folder, dtype=plan.dtype, device=plan.device)
    core = EngineCore(model, name="bench", slots=requests, context=min(plan.context, 1024))
    core.wait_warm()
    workload = mismatch_workload(model, model_folder, requests=requests, length=length, has_text=has_text)
    ours = list(generate(core, workload, seed=0).rollouts)
    groups = [ours]
    if vllm is not None:
        try:
            groups.append(vllm.rollouts(workload))
        except PeerFailed as failed:
            _say_absent(failed)
    again = trainer_logprobs(model_folder, groups, dtype=plan.dtype, device=plan.device)
    plain = load_plain(model_folder, dtype=plan.dtype, device=plan.device)
    return mismatch_rows(
        against_trainer=[compare(group, values) for group, values in zip(groups, again, strict=True)],
        against_plain=compare(ours, plain_logprobs(plain, ours)),
    )


def mismatch_rows(*, against_trainer: Sequence[Mismatch], against_plain: Mismatch) -> list[Row]:
    """`against_trainer` is ours, then vLLM's where it is there."""
    ours, *others = against_trainer
    means = {"vLLM": others[0].mean_difference} if others else {}
    divergences = {"vLLM": others[0].divergence} if others else {}
    rows = [
        Row("mean |Δ logprob| against the trainer", ours.mean_difference, "nats", peers=means),
        Row("KL against the trainer", ours.divergence, "nats", peers=divergences),
    ]
    rows += [Row("KL against the trainer ÷ vLLM's", ours.divergence / theirs, "ratio") for theirs in divergences.values()]
    return [
        *rows,
        Row("mean |Δ logprob| against a plain forward", against_plain.mean_difference, "nats"),
        Row("KL against a plain forward", against_plain.divergence, "nats"),
    ]


def mismatch_workload(model: PreTrainedModel, folder: str, *, requests: int, length: int, has_text: bool) -> Workload:
    """Text for a real model; random tokens for one that was never trained."""
    if has_text:
        return text_workload(load_tokenizer(folder), siblings=max(1, requests // 8), length=length)
    vocabulary = int(model.config.get_text_config().vocab_size)
    return Load.uniform(requests, 32, length).draw(vocabulary=vocabulary, seed=0)


def _startup_row(plan: Plan, model_folder: str) -> Row:
    """Of a process of its own, the second time: what a first run compiles is on disk then."""
    seconds = [first_token_seconds(model_folder, plan) for _ in range(2)]
    print(f"command to first token: {seconds[0]:.1f} s, then {seconds[1]:.1f} s", flush=True)
    return Row("command to first token", seconds[1], "s")


def first_token_seconds(model_folder: str, plan: Plan) -> float:
    """From the start of a process to the line that says it has drawn a token."""
    options = {"dtype": plan.dtype, "device": plan.device, "slots": min(plan.slots, 256), "context": plan.context}
    command = [sys.executable, "-m", "headrace.bench.first_token", model_folder]
    started = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command + [f"--{name}={value}" for name, value in options.items()],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        deadline = threading.Timer(_START_SECONDS, process.kill)
        deadline.daemon = True
        deadline.start()
        assert process.stdout is not None
        lines = [(line, time.perf_counter() - started) for line in process.stdout]
        deadline.cancel()
        for line, seconds in lines:
            if line.startswith("{") and "token" in json.loads(line):
                return seconds
        errors.seek(0)
        said = errors.read().strip().splitlines() or [f"status {process.wait()} after {_START_SECONDS:.0f} s at most"]
        raise RuntimeError(f"the engine did not start: {said[-1]}")


def _say_absent(failed: PeerFailed) -> None:
    print(f"{failed}; it is absent from the table", flush=True)
