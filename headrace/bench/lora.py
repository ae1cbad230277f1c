"""`headrace bench lora`: what an adapter costs in decoding and publishing, and how far engine and trainer differ with one.

decode: the native engine's tokens a second with one adapter, and with eight versions of it in a batch, beside the model alone.
publish: from the trainer's weights to what an engine has received and checked, through shared memory, beside all weights.
mismatch: an adapter is trained; at three versions rollouts of an engine that applies it live, or has it merged into float32
weights or into weights that are then rounded to bfloat16, are scored by the trainer. The model's own weights are bfloat16
numbers, and all is computed in float32: what differs is the merging alone.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.bench.harness import Row, run_parts, take_turns
from headrace.bench.loads import Load
from headrace.bench.measure import KL, compare, make_batch
from headrace.engine import EngineCore, HeldAdapter, Request
from headrace.lora import LoraSettings, adapter_of, merge_adapter
from headrace.model import ModelSettings, StagedWeights, build_folder, load_model, load_tokenizer, named_tensors
from headrace.sync import Lineage, SharedMemoryTransport, WeightSync
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from headrace.records import Rollout

LORA, VERSIONS = LoraSettings(rank=32, alpha=64.0), 8
SIZES = ModelSettings(hidden_size=512, num_layers=8, num_heads=8, context=256)
JUDGED = (1, 10, 100)
_RATE = 1e-4


def run(*, quick: bool, json_file: Path | None) -> int:
    """`--quick` takes a small model and few steps."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        build_folder(Path(folder), ModelSettings(context=256) if quick else SIZES, seed=0)
        parts = {name: partial(part, folder, quick=quick) for name, part in PARTS.items()}
        return run_parts("lora", parts, quick=quick, json_file=json_file)


def _decode(folder: str, *, quick: bool) -> Iterator[list[Row]]:
    load = Load.uniform(16 if quick else 64, 16, 16 if quick else 64)
    plain, adapted = EngineCore(load_model(folder), **_options(load)), EngineCore(_with_adapter(folder), **_options(load))
    assert adapted.adapter is not None
    held = [
        HeldAdapter(version, {name: tensor + version * 1e-3 for name, tensor in adapted.adapter.own.items()})
        for version in range(VERSIONS)
    ]

    def rate(core: EngineCore, versions: list[HeldAdapter], turn: int) -> float:
        return _generate(core, load, seed=turn, versions=versions)[1]

    seen = take_turns(
        {"base": partial(rate, plain, []), "one": partial(rate, adapted, []), "eight": partial(rate, adapted, held)},
        1 if quick else 5,
        warmups=1,
    )
    base, one, eight = (statistics.median(seen[name]) for name in ("base", "one", "eight"))
    yield [
        Row(f"{load.name}, one adapter", one, "tokens/s", peers={"base": base}),
        Row(f"{load.name}, {VERSIONS} versions", eight, "tokens/s", peers={"base": base}),
        Row("one adapter ÷ base", one / base, "ratio"),
        Row(f"{VERSIONS} versions ÷ base", eight / base, "ratio"),
    ]


def _publish(folder: str, *, quick: bool) -> Iterator[list[Row]]:
    model = _with_adapter(folder)
    adapter = adapter_of(model)
    assert adapter is not None
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir="/dev/shm") as shared:

        def publish(name: str, learner: torch.nn.Module, turn: int) -> tuple[float, int]:
            ends = [WeightSync(Lineage("life"), SharedMemoryTransport(prefix=name, folder=Path(shared))) for _ in range(2)]
            staged, seconds = StagedWeights(learner), 0.0
            for version in (1, 2):  # the first allocates
                started = time.perf_counter()
                update = ends[0].offer(version, named_tensors(learner))
                staged.receive(update, partial(ends[1].receive, update))
                staged.exchange()
                seconds = time.perf_counter() - started
                ends[0].release(update)
            for end in ends:
                end.close()
            return seconds, update.num_bytes

        ways = {"adapter": partial(publish, "adapter", adapter), "all weights": partial(publish, "weights", model)}
        seen = take_turns(ways, 1 if quick else 9)
    (ours, bytes_sent), (theirs, all_bytes) = (map(statistics.median, zip(*seen[name], strict=True)) for name in ways)
    yield [
        Row("publish and receive", 1e3 * ours, "ms", peers={"base": 1e3 * theirs}),
        Row("bytes", bytes_sent, "bytes", peers={"base": all_bytes}),
    ]


def _mismatch(folder: str, *, quick: bool) -> Iterator[list[Row]]:
    trainer = DeviceTrainer(_with_adapter(folder), tokenizer=load_tokenizer(folder), settings=TrainSettings())
    adapter, load = adapter_of(trainer.model), Load.uniform(8 if quick else 32, 16, 32)
    assert adapter is not None
    first, _ = _generate(EngineCore(_with_adapter(folder), **_options(load)), load, seed=0)
    advantages = [1.0 if index % 2 else -1.0 for index in range(len(first))]
    for version in range(1, (10 if quick else max(JUDGED)) + 1):
        trainer.forward_backward(make_batch(first, advantages=advantages))
        trainer.optim_step(_RATE)
        if version in JUDGED:
            rows = []
            for way in ("live", "merged in float32", "merged in bfloat16"):
                model = _with_adapter(folder, tensors=adapter.own)
                if way != "live":
                    merge_adapter(model)
                if way == "merged in bfloat16":
                    _round(model)
                rollouts, _ = _generate(EngineCore(model, **_options(load)), load, seed=version)
                again = trainer.forward(make_batch(rollouts, advantages=advantages))
                rows += [
                    Row(f"version {version}, {way}: {name}", found, "nats") for name, found in compare(rollouts, again).items()
                ]
            with adapter.off():
                plain = trainer.forward(make_batch(rollouts, advantages=advantages))
            kl = compare(rollouts, plain)[KL]
            yield [*rows, Row(f"version {version}: KL of all that was learned", kl, "nats")]


PARTS = {"decode": _decode, "publish": _publish, "mismatch": _mismatch}


def _options(load: Load) -> dict[str, Any]:
    return {"name": "engine", "slots": len(load.lengths), "context": 256}


def _with_adapter(folder: str, *, tensors: dict[str, torch.Tensor] | None = None) -> PreTrainedModel:
    model = load_model(folder, lora=LORA)
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


def _generate(
    core: EngineCore, load: Load, *, seed: int, versions: list[HeldAdapter] | None = None
) -> tuple[list[Rollout], float]:
    """(rollouts, tokens a second) of a whole load; requests take turns with the versions."""
    workload = load.sample(vocabulary=core.head.vocabulary, seed=seed)
    done: list[Rollout] = []
    started = time.perf_counter()
    for index, (prompt, sampling) in enumerate(workload.requests(seed=seed)):
        held = versions[index % len(versions)] if versions else None
        core.submit(Request(prompt, sampling, on_done=done.append, held=held))
    while core.has_work:
        core.step()
    return done, workload.num_tokens / (time.perf_counter() - started)
