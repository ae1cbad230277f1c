"""`headrace bench moe`: the speed of a mixture of experts in engine and trainer, beside a dense model of equal active size.

Both are random Qwen3 shapes that differ in their MLPs alone: where the dense model has one, the mixture has 32 experts of a
quarter of its width, of which a token takes 4. `replayed` is the mixture's trainer with other experts forced in every layer, as
recorded routing forces them. Contestants take turns in the same run, and vLLM is a peer of the engine where it is installed.
"""

from __future__ import annotations

import contextlib
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.bench.engine import alternate, make_plan, open_vllm
from headrace.bench.engine_native import generate
from headrace.bench.harness import Row, default_device, run_parts, take_turns
from headrace.bench.loads import (
    LEARNING_RATE,
    Load,
    Workload,
    make_batch,
    make_rollouts,
    make_trainer,
    model_shape,
    write_random_model,
)
from headrace.bench.measure import GIB, peak_bytes, release, seconds_of
from headrace.bench.trainer_speed import Speed, speed_rows
from headrace.engine import EngineCore
from headrace.model import ModelShape, load_config, load_model
from headrace.trainer import TrainSettings, predict_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.records import Batch, Rollout
    from headrace.trainer import DeviceTrainer

WHOLE = (151_936, 1024, 1536, 24, 16, 8, 128, 40_960)
"""1.2 billion parameters as a mixture, of which 0.4 billion are active."""
QUICK = (512, 128, 192, 4, 4, 2, 32, 2048)


def shapes(sizes: Sequence[int], *, experts: int, top_k: int) -> dict[str, dict[str, Any]]:
    """The mixture, and the dense model whose MLP is as wide as a token's experts together."""
    routed = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": sizes[2] // top_k}
    return {"moe": model_shape("qwen3_moe", *sizes) | routed | {"norm_topk_prob": True}, "dense": model_shape("qwen3", *sizes)}


def run(*, quick: bool, json_file: Path | None) -> int:
    """`--quick` takes two turns, and on a CPU a small model."""
    device = default_device()
    is_small = quick and device == "cpu"
    if is_small:
        torch.set_num_threads(1)  # the models are too small for more
    found = shapes(QUICK, experts=8, top_k=2) if is_small else shapes(WHOLE, experts=32, top_k=4)
    dtype = make_plan(device, quick=quick).dtype
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as place:
        folders = {name: write_random_model(shape, Path(place) / name, dtype=dtype) for name, shape in found.items()}
        parts = {
            "engine": partial(_engine, folders, device=device, is_small=is_small, quick=quick),
            "trainer": partial(_trainer, folders, device=device, is_small=is_small, quick=quick),
        }
        return run_parts("moe", parts, quick=quick, json_file=json_file)


def _engine(folders: Mapping[str, str], *, device: str, is_small: bool, quick: bool) -> Iterator[list[Row]]:
    plan, load = make_plan(device, quick=quick), Load.uniform(*((4, 16, 16) if is_small else (256, 64, 256)))

    def make_core(folder: str) -> EngineCore:
        model = load_model(folder, dtype=plan.dtype, device=device)
        core = EngineCore(model, name="bench", slots=len(load.lengths), context=512)
        core.wait_warm()
        return core

    with contextlib.ExitStack() as stack:
        vllm = open_vllm(plan, folders["moe"], Path(folders["moe"]).parent / "vllm.log")
        if vllm is not None:
            stack.enter_context(vllm)
        moe, dense = (make_core(folders[name]) for name in ("moe", "dense"))
        peers: dict[str, Callable[[Workload], float]] = {"dense": lambda each: generate(dense, each, seed=0).seconds}
        if vllm is not None:
            peers["vLLM"] = vllm.generate
        vocabulary = int(load_config(folders["moe"]).vocab_size)
        yield alternate(moe, load, vocabulary=vocabulary, turns=plan.turns, peers=peers, is_slow=device == "cpu")[1]
    release()


def _trainer(folders: Mapping[str, str], *, device: str, is_small: bool, quick: bool) -> Iterator[list[Row]]:
    tokens, length = (512, 64) if is_small else (16_384, 1024)
    speed = Speed.documents(tokens, length, turns=2 if quick else 5, warmups=2, has_peer=False)
    dtype, config = make_plan(device, quick=quick).dtype, load_config(folders["moe"])
    trainers = {
        name: make_trainer(folder, dtype=dtype, device=device, micro_batch_tokens=tokens) for name, folder in folders.items()
    }
    rollouts = make_rollouts(speed.lengths, prompt_tokens=1, vocabulary=int(config.vocab_size))
    batch, replayed = (make_batch(each, advantages=[1.0] * len(rollouts)) for each in (rollouts, _routed(rollouts, config)))

    def turn(trainer: DeviceTrainer, given: Batch, _: int) -> tuple[float, float]:
        gradient = seconds_of(lambda: trainer.forward_backward(given), device)
        return gradient, seconds_of(lambda: trainer.optim_step(LEARNING_RATE), device)

    moe, dense = trainers["moe"], trainers["dense"]
    contestants = {
        "ours": partial(turn, moe, batch),
        "dense": partial(turn, dense, batch),
        "replayed": partial(turn, moe, replayed),
    }
    yield speed_rows(speed, take_turns(contestants, speed.turns, warmups=speed.warmups), flops=None)
    settings = TrainSettings(micro_batch_tokens=tokens)
    predicted = predict_memory(ModelShape.of(config), settings, dtype=dtype, tokens=tokens, on_gpu=device != "cpu")
    peak = peak_bytes(lambda: moe.forward_backward(batch), device)  # above what is held
    work = predicted.activations + max(predicted.head, predicted.layer)
    yield [
        Row(f"{speed.name}: memory of a pass", peak / GIB, "GiB"),
        Row(f"{speed.name}: predicted ÷ real", work / peak, "ratio"),
    ]


def _routed(rollouts: Sequence[Rollout], config: Any) -> list[Rollout]:  # noqa: ANN401  (transformers' configs share no type)
    """With experts that a random router chose; a rollout's last token has none."""
    random, found = np.random.default_rng(0), []
    for rollout in rollouts:
        scores = random.random((len(rollout), config.num_hidden_layers, config.num_experts), dtype=np.float32)
        routing = scores.argsort(axis=-1)[..., : config.num_experts_per_tok].astype(np.uint8)
        routing[-1] = 255
        found.append(rollout.replace(expert_routing=routing))
    return found
