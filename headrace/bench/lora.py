"""`headrace bench lora`: what an adapter costs in decoding and publishing, and how far engine and trainer differ with one.

decode: the native engine's tokens a second with one adapter, and with eight versions of it in a batch, beside the model alone.
publish: from the trainer's weights to what an engine has received and checked, within one process through shared memory,
beside all weights; and between two (`bench/sync.py`), an adapter for the shape of Qwen3-0.6B.
mismatch: an adapter is trained; at three versions rollouts of an engine that applies it live, or has it merged into float32
weights or into weights that are then rounded to bfloat16, are scored by the trainer. The model's own weights are bfloat16
numbers. On a CPU all is computed in float32, so that what differs is the merging alone; on a GPU in bfloat16, so that live and
merged differ from the trainer by their kernels too.
quantize: a trainer with its frozen weights in 4 bits beside one that holds them whole (`bench/qlora.py`).
step-8b, on a GPU: whole training steps of a model of 8 billion parameters, with its adapter; step-8b-nf4: the trainer's
weights in 4 bits; trl-8b: the same steps by TRL, vLLM and PEFT, where these are installed.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.bench.engine_native import Turn, generate
from headrace.bench.harness import Row, default_device, run_parts, say, take_turns
from headrace.bench.loads import QWEN3_0_6B, QWEN3_8B, Load, write_random_model
from headrace.bench.measure import KL, compare, make_batch, release, wait
from headrace.bench.qlora import measure_quantized
from headrace.bench.step import Peers, measure, measure_trl
from headrace.bench.step_plan import Variant, make_plan as step_plan
from headrace.bench.step_trl import TRIED_8B, missing_modules
from headrace.bench.sync import Paths, publish_rows
from headrace.engine import EngineCore, HeldAdapter
from headrace.lora import FOUR_BITS, LoraSettings, adapter_of, has_bitsandbytes, merge_adapter
from headrace.model import ModelSettings, StagedWeights, build_folder, load_model, load_tokenizer, narrow
from headrace.sync import Lineage, MemoryTransport, SharedMemoryTransport, WeightSync
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    from headrace.bench.harness import Part
    from headrace.records import Rollout

LORA, VERSIONS = LoraSettings(rank=32, alpha=64.0), 8
SIZES = ModelSettings(hidden_size=512, num_layers=8, num_heads=8, context=256)
JUDGED = (1, 10, 100)
_RATE = 1e-4


@dataclass(frozen=True)
class Plan:
    """What to measure on a GPU or a CPU."""

    folder: str
    device: str
    load: Load
    turns: int
    judged: Load
    versions: tuple[int, ...]
    context: int = 384

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"


def run(*, quick: bool, json_file: Path | None, only: str | None = None) -> int:
    """`--quick` takes a small model on a CPU, and few steps."""
    device = default_device()
    if device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        if device == "cuda":
            write_random_model(QWEN3_0_6B, Path(folder), dtype="bfloat16")
            load = Load.uniform(256, 64, 256, goals={"one": "≥ 0.9", "eight": "≥ 0.8"})
        else:
            build_folder(Path(folder), ModelSettings(context=384) if quick else SIZES, seed=0)
            load = Load.uniform(16, 16, 16) if quick else Load.uniform(64, 16, 64)
        judged = Load.uniform(8 if quick else 32, 16, 32)
        plan = Plan(folder, device, load, 1 if quick else 5, judged, JUDGED[:2] if quick else JUDGED)
        parts: dict[str, Part] = {name: partial(part, plan) for name, part in PARTS.items()}
        if device == "cuda":
            parts |= _steps(Path(folder) / "8b", quick=quick)
        return run_parts("lora", parts, quick=quick, json_file=json_file, only=only)


def _decode(plan: Plan) -> Iterator[list[Row]]:
    load = plan.load
    plain = _engine(plan, load_model(plan.folder, device=plan.device, dtype=plan.dtype), load)
    adapted, leased = (_engine(plan, _with_adapter(plan), load, places=places) for places in (1, VERSIONS))
    assert leased.adapter is not None
    own = leased.adapter.own
    held = [
        HeldAdapter(version, {name: tensor + version * 1e-3 for name, tensor in own.items()}) for version in range(1, VERSIONS)
    ]

    def rate(core: EngineCore, more: list[HeldAdapter], turn: int) -> float:
        return _generate(core, load, seed=turn, versions=[None, *more]).tokens_per_second

    seen = take_turns(
        {"base": partial(rate, plain, []), "one": partial(rate, adapted, []), "eight": partial(rate, leased, held)},
        plan.turns,
        warmups=1,
    )
    base, one, eight = (statistics.median(seen[name]) for name in ("base", "one", "eight"))
    yield [
        Row(f"{load.name}, one adapter", one, "tokens/s", peers={"base": base}),
        Row(f"{load.name}, {VERSIONS} versions", eight, "tokens/s", peers={"base": base}),
        Row("one adapter ÷ base", one / base, "ratio", load.goals.get("one", "")),
        Row(f"{VERSIONS} versions ÷ base", eight / base, "ratio", load.goals.get("eight", "")),
    ]
    for core in (plain, adapted, leased):
        core.close()
    release()


def _publish(plan: Plan) -> Iterator[list[Row]]:
    """Within one process a GPU's memory needs no IPC handle: what is timed is reading, hashing, copying, checking."""
    model = _with_adapter(plan)
    adapter = adapter_of(model)
    assert adapter is not None
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir="/dev/shm") as shared:

        def publish(name: str, learner: torch.nn.Module, turn: int) -> tuple[float, int]:
            made = MemoryTransport("cuda") if plan.device == "cuda" else None
            ends = [
                WeightSync(Lineage("life"), made or SharedMemoryTransport(prefix=name, folder=Path(shared))) for _ in range(2)
            ]
            staged, seconds = StagedWeights(learner), 0.0
            for version in (1, 2):  # the first allocates
                started = time.perf_counter()
                update = ends[0].offer(version, staged.arena)
                staged.receive(update, partial(ends[1].receive, update))
                staged.exchange()
                wait(plan.device)
                seconds = time.perf_counter() - started
                ends[0].release(update)
            for end in ends:
                end.close()
            return seconds, update.num_bytes

        ways = {"adapter": partial(publish, "adapter", adapter), "all weights": partial(publish, "weights", model)}
        seen = take_turns(ways, 2 * plan.turns - 1)
    (ours, bytes_sent), (theirs, all_bytes) = (map(statistics.median, zip(*seen[name], strict=True)) for name in ways)
    goal = "≤ 5" if plan.device == "cuda" else ""
    yield [
        Row("publish and receive", 1e3 * ours, "ms", goal, peers={"base": 1e3 * theirs}),
        Row("bytes", bytes_sent, "bytes", peers={"base": all_bytes}),
    ]
    transport, shape = "cuda_ipc" if plan.device == "cuda" else "shared_memory", "Qwen3-0.6B"
    with Paths(shape, plan.device, [transport], rank=LORA.rank) as paths:
        whole, *parts = publish_rows(paths.rounds(4 * plan.turns - 1), f"adapter of {shape}")
        sent = Row(f"{transport}, adapter of {shape}: bytes", paths.num_bytes, "bytes")
    yield [dataclasses.replace(whole, goal=goal), *parts, sent]


def _mismatch(plan: Plan) -> Iterator[list[Row]]:
    model, load = _with_adapter(plan, dtype="float32"), plan.judged
    dtype = getattr(torch, plan.dtype)
    trainer = DeviceTrainer(model, tokenizer=load_tokenizer(plan.folder), settings=TrainSettings(), dtype=dtype)
    adapter = adapter_of(trainer.model)
    assert adapter is not None
    first = _generate(_engine(plan, _with_adapter(plan), load), load, seed=0).rollouts
    advantages = [1.0 if index % 2 else -1.0 for index in range(len(first))]
    for version in range(1, max(plan.versions) + 1):
        trainer.forward_backward(make_batch(first, advantages=advantages))
        trainer.optim_step(_RATE)
        if version in plan.versions:
            rows = []
            for way in ("live", "merged in float32", "merged in bfloat16"):
                if way == "merged in float32" and plan.device == "cuda":
                    continue  # the GPU's engine computes in bfloat16
                is_live = way == "live"
                model = _with_adapter(plan, tensors=adapter.own, dtype=plan.dtype if is_live else "float32")
                if not is_live:
                    merge_adapter(model)
                if way == "merged in bfloat16":
                    _round(model)
                    narrow(model, dtype)
                core = _engine(plan, model, load)
                rollouts = _generate(core, load, seed=version).rollouts
                core.close()
                again = trainer.forward(make_batch(rollouts, advantages=advantages))
                rows += [
                    Row(f"version {version}, {way}: {name}", found, "nats") for name, found in compare(rollouts, again).items()
                ]
            with adapter.off():
                plain = trainer.forward(make_batch(rollouts, advantages=advantages))
            kl = compare(rollouts, plain)[KL]
            yield [*rows, Row(f"version {version}: KL of all that was learned", kl, "nats")]


def _quantize(plan: Plan) -> Iterator[list[Row]]:
    if not has_bitsandbytes():
        say("quantize: bitsandbytes is not installed here; it is not measured")
        return iter(())

    def sample(model: PreTrainedModel, load: Load) -> Sequence[Rollout]:
        core = _engine(plan, model, load)
        rollouts = _generate(core, load, seed=0).rollouts
        core.close()
        return rollouts

    how: dict[str, Any] = {"device": plan.device, "dtype": plan.dtype, "turns": plan.turns}
    return measure_quantized(plan.folder, LORA, judged=plan.judged, sample=sample, **how)


PARTS = {"decode": _decode, "publish": _publish, "mismatch": _mismatch, "quantize": _quantize}


def _steps(folder: Path, *, quick: bool) -> dict[str, Part]:
    """Whole steps of a model of 8 billion parameters: TRL's first, if it is installed, then ours, which is compared with it."""
    load = dataclasses.replace(step_plan("cuda", quick=quick), shape=QWEN3_8B, micro_batch_tokens=8192, goal="")
    load, peers = dataclasses.replace(load, warmups=1) if quick else load, Peers()
    lora = {"lora.rank": LORA.rank, "lora.alpha": LORA.alpha, "deadline": 300.0}

    @cache
    def model() -> str:
        path = write_random_model(QWEN3_8B, folder / "model", dtype="bfloat16")
        release()
        return path

    def part_of(name: str, more: Mapping[str, Any]) -> Part:
        variant = Variant(f"8B, {name}, in turn", {**lora, **more})
        return lambda: [measure(load, variant, model(), folder, peers=peers)]

    parts: dict[str, Part] = {}
    if not missing_modules("cuda"):
        rank = {"rank": LORA.rank, "alpha": LORA.alpha}
        parts["trl-8b"] = lambda: measure_trl(load, model(), folder, peers, tried=TRIED_8B, lora=rank)
    parts["step-8b"] = part_of("LoRA", {})
    if has_bitsandbytes():
        parts["step-8b-nf4"] = part_of("QLoRA", {"lora.quantize": FOUR_BITS})
    return parts


def _engine(plan: Plan, model: PreTrainedModel, load: Load, *, places: int = 1) -> EngineCore:
    core = EngineCore(model, name="engine", slots=len(load.lengths), context=plan.context, adapter_places=places)
    core.wait_warm()
    return core


def _with_adapter(plan: Plan, *, tensors: Mapping[str, torch.Tensor] | None = None, dtype: str = "") -> PreTrainedModel:
    model = load_model(plan.folder, device=plan.device, dtype=dtype or plan.dtype, lora=LORA)
    _round(model)
    adapter = adapter_of(model)
    assert adapter is not None
    if tensors is not None:
        adapter.fill(tensors)
    return model


@torch.no_grad()
def _round(model: PreTrainedModel) -> None:
    """Make every weight of the model itself a bfloat16 number."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def _generate(core: EngineCore, load: Load, *, seed: int, versions: Sequence[HeldAdapter | None] = (None,)) -> Turn:
    return generate(core, load.sample(vocabulary=core.head.vocabulary, seed=seed), seed=seed, versions=versions)
