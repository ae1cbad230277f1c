"""`headrace bench ranks`: several trainer ranks: how evenly a long tail is spread over them, each one's memory beside what is
predicted, and the speed of two on two cores against one rank on one.

Every process of the part `cores` is pinned to one core and computes with one thread. Two cores often share more than they seem
to (memory, a clock, sometimes one real core), so that two trainers that know nothing of each other, run at once, are the bound
for two ranks. FSDP2 takes turns with ours: the same model and passes, in its own loop, against that loop alone.

A rank's memory is the peak of its process within a step, less its size before it had the model. The C library keeps freed
blocks of up to 32 MB for later, in which a layer of this model would fit: here it gives back all above 1 MB, as it does with
the layers of large models. Where there is a GPU, all ranks share it, and their memory is what torch allocates there.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.child import Child, PeerFailed
from headrace.bench.harness import Row, default_device, run_parts, take_turns
from headrace.bench.loads import MEDIUM, SMALL, lognormal_lengths, make_rollouts, model_shape, write_random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from headrace.records import Batch
    from headrace.trainer import DeviceTrainer, Ranks

_PROMPT = 16
_SECONDS = 600.0
_MMAP_THRESHOLD = -3
TIMED = model_shape("qwen3", 4096, 512, 1536, 6, 8, 4, 64, 2048)
"""With more to gather per token than `MEDIUM`."""
QUICK_TIMED = MEDIUM | {"num_hidden_layers": 2, "vocab_size": 1024}
WEIGHED = model_shape("qwen3", 16_384, 768, 2304, 12, 12, 6, 64, 2048) | {"tie_word_embeddings": False}
"""110 million parameters."""
QUICK_WEIGHED = WEIGHED | {"num_hidden_layers": 4, "vocab_size": 8192}
_WEIGHED_LENGTHS = [64, 48, 60, 56]


def run(*, only: str | None = None, quick: bool, json_file: Path | None) -> int:
    """`--quick` takes smaller models and fewer turns."""
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


def memory(*, quick: bool) -> Iterator[list[Row]]:
    """The fullest rank's peak, with the weights on one, two and four ranks."""
    from headrace.model import ModelSettings, ModelShape, load_config, parameter_shapes
    from headrace.trainer import ParallelSettings, TrainSettings, predict_memory

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_random_model(QUICK_WEIGHED if quick else WEIGHED, folder / "model", dtype="float32")
        small = write_random_model(SMALL, folder / "small", dtype="float32")
        num_parameters = sum(map(math.prod, parameter_shapes(ModelSettings(path=path)).values()))
        for dtype in ("float32",) if quick else ("float32", "bfloat16"):
            for count in (1, 2) if quick else (1, 2, 4):
                settings = {"model": path, "small": small, "lengths": _WEIGHED_LENGTHS, "budget": max(_WEIGHED_LENGTHS)}
                settings["device"] = default_device()
                with ExitStack() as stack:
                    layouts = [{"shard": count, "rank": rank, "dtype": dtype} for rank in range(count)]
                    children = _start(stack, f"{dtype}-{count}", "weigh", layouts, folder=folder, **settings)
                    real = max(float(child.hear(seconds=_SECONDS)["bytes"]) for child in children)
                found = predict_memory(
                    ModelShape.of(load_config(path)),
                    TrainSettings(parallel=ParallelSettings(shard=count)),
                    dtype=dtype,
                    tokens=max(_WEIGHED_LENGTHS),
                    on_gpu=settings["device"] == "cuda",
                    num_parameters=num_parameters,
                )
                predicted = found.total - found.process - found.saving  # no checkpoint is written meanwhile
                layout = f"{dtype}, {count} rank{'s' if count > 1 else ''}"
                yield [
                    Row(f"{layout}: the fullest rank's peak", real / 1e6, "MB"),
                    Row(f"{layout}: predicted ÷ real", predicted / real, "ratio", goal="0.9 to 1.1"),
                ]


def cores(*, quick: bool) -> Iterator[list[Row]]:
    free = sorted(os.sched_getaffinity(0))
    if len(free) < 2:
        raise PeerFailed("two ranks need two cores")
    turns, count = (2, 12) if quick else (3, 32)
    lengths = [_PROMPT + each for each in lognormal_lengths(count, mean=130, sigma=0.8, cap=900)]
    apart = [{"core": core} for core in free[:2]]
    sharded = [{"core": core, "shard": 2, "rank": rank} for rank, core in enumerate(free[:2])]
    replicated = [{"core": core, "replicate": 2, "rank": rank} for rank, core in enumerate(free[:2])]
    wanted = {"alone": ("train", apart), "sharded": ("train", sharded)}
    if not quick:
        wanted["replicated"] = ("train", replicated)
        wanted |= {"FSDP2 alone": ("train_fsdp2", apart), "FSDP2": ("train_fsdp2", sharded)}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = write_random_model(QUICK_TIMED if quick else TIMED, Path(name) / "model", dtype="float32")
        settings: dict[str, Any] = {"folder": Path(name), "model": model, "lengths": lengths, "budget": 2048}
        children = {what: _start(stack, what, function, layouts, **settings) for what, (function, layouts) in wanted.items()}
        for each in children.values():
            for child in each:
                child.hear(seconds=_SECONDS)

        def turn_of(asked: Sequence[Child]) -> Callable[[int], float]:
            def turn(number: int) -> float:
                for child in asked:
                    child.tell(number)
                return max(float(child.hear(seconds=_SECONDS)["seconds"]) for child in asked)

            return turn

        contestants = {name: turn_of(each) for name, each in children.items()} | {"one": turn_of(children["alone"][:1])}
        seconds = {name: statistics.median(found) for name, found in take_turns(contestants, turns, warmups=1).items()}
    yield _rows(seconds, tokens=sum(lengths))


def _rows(seconds: Mapping[str, float], *, tokens: int) -> list[Row]:
    """A trainer on each core does twice the work of two ranks."""
    peer = {"FSDP2": seconds["FSDP2 alone"] / 2 / seconds["FSDP2"]} if "FSDP2" in seconds else {}
    bound = seconds["alone"] / 2
    rows = [
        Row("one rank alone", tokens / seconds["one"], "tokens/s"),
        Row("two trainers at once", 2 * tokens / seconds["alone"], "tokens/s", bound=2 * tokens / seconds["one"]),
        Row("two ranks, sharded", tokens / seconds["sharded"], "tokens/s", bound=tokens / bound),
        Row("sharded ÷ two trainers at once", bound / seconds["sharded"], "ratio", peers=peer, bound=1.0),
        Row("sharded ÷ twice one alone", seconds["one"] / 2 / seconds["sharded"], "ratio", goal="≥ 0.85", bound=1.0),
    ]
    if "replicated" in seconds:
        rows.append(Row("replicated ÷ two trainers at once", bound / seconds["replicated"], "ratio", bound=1.0))
    return rows


# Child processes


def _start(
    stack: ExitStack,
    what: str,
    function: str,
    layouts: Sequence[Mapping[str, Any]],
    *,
    folder: Path,
    **settings: Any,  # noqa: ANN401  (what the function takes)
) -> list[Child]:
    """A child for each layout; those that are ranks of one trainer find each other by a file."""
    children = []
    for number, layout in enumerate(layouts):
        order = {**settings, **layout, "meeting": f"{folder}/{what}"}
        log = folder / f"{what}-{number}.log"
        children.append(stack.enter_context(Child(f"{what} {number}", f"headrace.bench.ranks:{function}", order, log=log)))
    return children


def _compute_alone(settings: Mapping[str, Any]) -> None:
    """With one thread, on the core named if there is one."""
    import torch

    if "core" in settings:
        os.sched_setaffinity(0, {settings["core"]})
    torch.set_num_threads(1)


def _join(settings: Mapping[str, Any]) -> Ranks | None:
    from headrace.trainer import ParallelSettings, Ranks

    parallel = ParallelSettings(replicate=settings.get("replicate", 1), shard=settings.get("shard", 1))
    if not parallel.is_on:
        return None
    device, rank = settings.get("device", "cpu"), settings["rank"]
    if device == "cuda":  # NCCL lets only ranks of different hosts share a GPU
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
        os.environ.update({f"NCCL_{way}_DISABLE": "1" for way in ("P2P", "SHM", "IB")})
    return Ranks.join(parallel, rank=rank, address=f"file://{settings['meeting']}", device=device, timeout=_SECONDS)


def _make_work(settings: Mapping[str, Any], path: str, ranks: Ranks | None) -> tuple[DeviceTrainer, Batch]:
    """A trainer, alone or as one of the ranks, and what it trains on."""
    import torch

    from headrace.bench.loads import make_batch
    from headrace.model import load_model, load_tokenizer
    from headrace.trainer import DeviceTrainer, TrainSettings

    device = settings.get("device", "cpu") if ranks is None else "cpu"  # a rank's part is moved to its own
    model = load_model(path, device=device, in_parts=ranks is not None and ranks.shard > 1)
    trainer = DeviceTrainer(
        model,
        tokenizer=load_tokenizer(path),
        settings=TrainSettings(micro_batch_tokens=settings["budget"]),
        dtype=getattr(torch, settings.get("dtype", "float32")),
        ranks=ranks,
    )
    rollouts = make_rollouts(settings["lengths"], prompt_tokens=_PROMPT, vocabulary=int(model.config.vocab_size))
    return trainer, make_batch(rollouts, advantages=[1.0] * len(rollouts))


def train(settings: dict[str, Any], orders: Iterator[Any]) -> Iterator[dict[str, float]]:
    """A step for each order."""
    _compute_alone(settings)
    trainer, batch = _make_work(settings, settings["model"], _join(settings))
    yield {}
    for _ in orders:
        started = time.perf_counter()
        trainer.forward_backward(batch)
        trainer.optim_step(1e-6)
        yield {"seconds": time.perf_counter() - started}


def weigh(settings: dict[str, Any], orders: Iterator[Any]) -> Iterator[dict[str, float]]:
    """The memory of one step."""
    import torch

    from headrace.observe import peak_memory

    _compute_alone(settings)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    ranks, device = _join(settings), torch.device(settings["device"])
    is_on_gpu = device.type == "cuda"

    def peak_of_step(path: str) -> int:
        trainer, batch = _make_work(settings, path, ranks)
        for _ in range(2 if is_on_gpu else 1):  # the second compiles nothing
            if is_on_gpu:
                torch.cuda.reset_peak_memory_stats()
            else:
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            trainer.forward_backward(batch)
            trainer.optim_step(1e-6)
        return peak_memory(device)

    peak_of_step(settings["small"])  # so that nothing is left to be imported
    resident = 1024 * int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])
    before = torch.cuda.memory_allocated() if is_on_gpu else resident
    yield {"bytes": peak_of_step(settings["model"]) - before}


def train_fsdp2(settings: dict[str, Any], orders: Iterator[Any]) -> Iterator[dict[str, float]]:
    """The same model and passes in a plain loop, sharded by torch's `fully_shard` if there are two ranks."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from headrace.model import ModelShape, PassCost, load_model, make_context, pack, plan_rank_passes

    _compute_alone(settings)
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
