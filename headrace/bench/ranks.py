"""`headrace bench ranks`: two trainer ranks on two cores against one rank on one, how evenly a long tail is spread, and memory
(`ranks_memory`).

Every process is pinned to one core and computes with one thread. Two cores often share more than they seem to (memory, a clock,
sometimes one real core), so that two trainers that know nothing of each other, run at once, are the bound for two ranks. FSDP2
takes turns with ours: the same model and passes, in its own loop, against that loop alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.child import Child, PeerFailed
from headrace.bench.harness import Row, run_parts, take_turns
from headrace.bench.loads import MEDIUM, lognormal_lengths, make_rollouts, model_shape, write_random_model
from headrace.bench.ranks_memory import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_PROMPT = 16
_START = 300.0
QUICK = {"num_hidden_layers": 2, "vocab_size": 1024}
LARGE = model_shape("qwen3", 4096, 512, 1536, 6, 8, 4, 64, 2048)
"""With more to gather per token than `MEDIUM`."""


def run(*, only: str | None = None, quick: bool, json_file: Path | None) -> int:
    """`--quick` takes a smaller model and one turn."""
    parts = {
        "balance": lambda: balance(quick=quick),
        "memory": lambda: memory(quick=quick),
        "cores": lambda: cores(quick=quick),
    }
    return run_parts("ranks", parts, quick=quick, json_file=json_file, only=only)


def balance(*, quick: bool) -> Iterator[list[Row]]:
    """The time that ranks wait for the slowest, predicted, on a batch of 512 rollouts with a long tail."""
    from headrace.model import ModelShape, PassCost, plan_rank_passes

    sizes: dict[str, Any] = {"hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "key_dim": 128, "value_dim": 128}
    shape = ModelShape(**sizes, intermediate=12288, vocabulary=151936, is_tied=False)  # Qwen3-8B
    cost = PassCost(shape.row_flops, shape.pair_flops)
    lengths = [_PROMPT + each for each in lognormal_lengths(64 if quick else 512, mean=2000, sigma=1.0, cap=16_000)]
    rollouts = make_rollouts(lengths, prompt_tokens=_PROMPT, vocabulary=1000)
    for count in (2, 4, 8):
        plans = plan_rank_passes(rollouts, budget=16_384, count=count, cost=cost, share=False)
        costs = [[sum(cost(unit, lengths) for unit in each) for each in plan] for plan in plans]
        mean = sum(map(sum, costs)) / count
        waited = sum(map(max, zip(*costs, strict=True))) / mean - 1
        spread = (max(map(sum, costs)) - min(map(sum, costs))) / mean
        yield [
            Row(f"{count} ranks, long tail: spread of predicted time", spread, "share", goal="≤ 0.05"),
            Row(f"{count} ranks, long tail: waiting for the slowest in each pass", waited, "share"),
        ]


def cores(*, quick: bool) -> Iterator[list[Row]]:
    free = sorted(os.sched_getaffinity(0))
    if len(free) < 2:
        raise PeerFailed("two ranks need two cores")
    turns, count = (2, 12) if quick else (3, 32)
    lengths = [_PROMPT + each for each in lognormal_lengths(count, mean=130, sigma=0.8, cap=900)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = write_random_model(MEDIUM | QUICK if quick else LARGE, folder / "model", dtype="float32")
        given = {"model": model, "lengths": lengths, "budget": 2048}

        def start(what: str, function: str, layouts: Sequence[Mapping[str, Any]]) -> list[Child]:
            started = []
            for place, layout in enumerate(layouts):
                settings = {**given, **layout, "core": free[place], "meeting": f"{folder}/{what}"}
                log = folder / f"{what}-{place}.log"
                started.append(stack.enter_context(Child(what, f"headrace.bench.ranks:{function}", settings, log=log)))
            return started

        def ranks(**layout: int) -> list[dict[str, int]]:
            return [{**layout, "rank": rank} for rank in range(2)]

        children = {
            "alone": start("alone", "train", [{}, {}]),
            "sharded": start("sharded", "train", ranks(shard=2)),
        }
        if not quick:
            children |= {
                "replicated": start("replicated", "train", ranks(replicate=2)),
                "FSDP2 alone": start("fsdp2-alone", "train_fsdp2", [{}, {}]),
                "FSDP2": start("fsdp2", "train_fsdp2", ranks(shard=2)),
            }
        for each in children.values():
            for child in each:
                child.hear(seconds=_START)

        def turn_of(asked: Sequence[Child]) -> Callable[[int], float]:
            def turn(number: int) -> float:
                for child in asked:
                    child.tell(number)
                return max(float(child.hear(seconds=_START)["seconds"]) for child in asked)

            return turn

        contestants = {name: turn_of(each) for name, each in children.items()} | {"one": turn_of(children["alone"][:1])}
        seconds = {name: statistics.median(found) for name, found in take_turns(contestants, turns, warmups=1).items()}
    yield _rows(seconds, tokens=sum(lengths))


def _rows(seconds: Mapping[str, float], *, tokens: int) -> list[Row]:
    """A trainer on each core does twice the work of two ranks."""
    peer = {"FSDP2": seconds["FSDP2 alone"] / 2 / seconds["FSDP2"]} if "FSDP2" in seconds else {}
    bound = seconds["alone"] / 2
    goal: dict[str, Any] = {"goal": "≥ 0.85", "bound": 1.0}
    rows = [
        Row("one rank alone", tokens / seconds["one"], "tokens/s"),
        Row("two trainers at once", 2 * tokens / seconds["alone"], "tokens/s", bound=2 * tokens / seconds["one"]),
        Row("two ranks, sharded", tokens / seconds["sharded"], "tokens/s", bound=tokens / bound),
        Row("sharded ÷ two trainers at once", bound / seconds["sharded"], "ratio", peers=peer, **goal),
        Row("sharded ÷ twice one alone", seconds["one"] / 2 / seconds["sharded"], "ratio", bound=1.0),
    ]
    if "replicated" in seconds:
        rows.append(Row("replicated ÷ two trainers at once", bound / seconds["replicated"], "ratio", **goal))
    return rows


def _pin(settings: Mapping[str, Any]) -> None:
    import torch

    os.sched_setaffinity(0, {settings["core"]})
    torch.set_num_threads(1)


def train(settings: dict[str, Any], orders: Iterator[Any]) -> Iterator[dict[str, float]]:
    """A trainer, alone or as one of two ranks, in a child."""
    from headrace.bench.loads import make_batch
    from headrace.model import load_model, load_tokenizer
    from headrace.trainer import DeviceTrainer, ParallelSettings, Ranks, TrainSettings

    _pin(settings)
    parallel = ParallelSettings(replicate=settings.get("replicate", 1), shard=settings.get("shard", 1))
    ranks = None
    if parallel.is_on:
        ranks = Ranks.join(parallel, rank=settings["rank"], address=f"file://{settings['meeting']}", timeout=_START)
    model = load_model(settings["model"], in_parts=parallel.shard > 1)
    options = TrainSettings(micro_batch_tokens=settings["budget"], parallel=parallel)
    trainer = DeviceTrainer(model, tokenizer=load_tokenizer(settings["model"]), settings=options, ranks=ranks)
    rollouts = make_rollouts(settings["lengths"], prompt_tokens=_PROMPT, vocabulary=int(model.config.vocab_size))
    batch = make_batch(rollouts, advantages=[1.0] * len(rollouts))
    yield {}
    for _ in orders:
        started = time.perf_counter()
        trainer.forward_backward(batch)
        trainer.optim_step(1e-6)
        yield {"seconds": time.perf_counter() - started}


def train_fsdp2(settings: dict[str, Any], orders: Iterator[Any]) -> Iterator[dict[str, float]]:
    """The same model and passes in a plain loop, sharded by torch's `fully_shard` if there are two ranks."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from headrace.model import ModelShape, PassCost, load_model, make_context, pack, plan_rank_passes

    _pin(settings)
    model, count, rank = load_model(settings["model"]), settings.get("shard", 1), settings.get("rank", 0)
    if count > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{settings['meeting']}", rank=rank, world_size=count)
        mesh = init_device_mesh("cpu", (count,))
        for layer in model.base_model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rollouts = make_rollouts(settings["lengths"], prompt_tokens=_PROMPT, vocabulary=int(model.config.vocab_size))
    shape = ModelShape.of(model.config)
    cost = PassCost(shape.row_flops, shape.pair_flops)
    plan = plan_rank_passes(rollouts, budget=settings["budget"], count=count, cost=cost, share=False)[rank]
    is_target = [np.asarray(each.loss_mask) for each in rollouts]
    passes = [pack(rollouts, is_target, units=units) for units in plan]
    yield {}
    for _ in orders:
        started = time.perf_counter()
        for each in passes:
            context = make_context(each.layout, torch.device("cpu"), False)
            ids, positions = each.token_ids.unsqueeze(0), each.positions.unsqueeze(0)
            given: dict[str, Any] = {"attention_context": context, "logits_to_keep": each.rows, "use_cache": False}
            logits = model(input_ids=ids, position_ids=positions, **given).logits[0].float()
            torch.nn.functional.cross_entropy(logits, each.wanted, reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield {"seconds": time.perf_counter() - started}
