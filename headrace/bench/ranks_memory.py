"""The memory of each rank of a trainer on the CPU, beside what is predicted for it: a part of `headrace bench ranks`.

A rank is a process. Its memory is its peak within a step, less its size before it had the model. The C library keeps freed
blocks of up to 32 MB for later, in which a layer of this model would fit: here it gives back all above 1 MB, as it does with
the layers of large models.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.child import Child
from headrace.bench.harness import Row
from headrace.bench.loads import SMALL, make_rollouts, model_shape, write_random_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.trainer import Ranks

_SECONDS = 600.0
_PROMPT = 16
_LENGTHS = [64, 48, 60, 56]
_MMAP_THRESHOLD = -3
LARGE = model_shape("qwen3", 16_384, 768, 2304, 12, 12, 6, 64, 2048) | {"tie_word_embeddings": False}
"""110 million parameters."""
QUICK = {"num_hidden_layers": 4, "vocab_size": 8192}


def memory(*, quick: bool) -> Iterator[list[Row]]:
    from headrace.model import ModelSettings, ModelShape, load_config, parameter_shapes
    from headrace.trainer import ParallelSettings, TrainSettings, predict_memory

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_random_model(LARGE | QUICK if quick else LARGE, folder / "model", dtype="float32")
        write_random_model(SMALL, folder / "small", dtype="float32")
        num_parameters = sum(map(math.prod, parameter_shapes(ModelSettings(path=path)).values()))
        for dtype in ("float32",) if quick else ("float32", "bfloat16"):
            for count in (1, 2) if quick else (1, 2, 4):
                found = predict_memory(
                    ModelShape.of(load_config(path)),
                    TrainSettings(parallel=ParallelSettings(shard=count)),
                    dtype=dtype,
                    tokens=max(_LENGTHS),
                    on_gpu=False,
                    num_parameters=num_parameters,
                )
                predicted = found.total - found.process - found.saving  # no checkpoint is written meanwhile
                real = _measure(folder, {"folder": name, "dtype": dtype, "shard": count})
                layout = f"{dtype}, {count} rank{'s' if count > 1 else ''}"
                yield [
                    Row(f"{layout}: the fullest rank's peak", real / 1e6, "MB"),
                    Row(f"{layout}: predicted ÷ real", predicted / real, "ratio", goal="0.9 to 1.1"),
                ]


def _measure(folder: Path, settings: Mapping[str, Any]) -> float:
    """Bytes of the fullest rank."""
    layout = f"{settings['dtype']}-{settings['shard']}"
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                Child(
                    f"rank {rank}",
                    "headrace.bench.ranks_memory:train",
                    {**settings, "rank": rank, "meeting": f"{folder}/{layout}"},
                    log=folder / f"{layout}-{rank}.log",
                )
            )
            for rank in range(settings["shard"])
        ]
        return max(float(child.hear(seconds=_SECONDS)["bytes"]) for child in children)


def train(settings: dict[str, Any], orders: Iterator[Any]) -> Iterator[dict[str, float]]:
    """One rank, in a child."""
    import torch

    from headrace.trainer import ParallelSettings, Ranks

    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    parallel = ParallelSettings(shard=settings["shard"])
    ranks = None
    if parallel.is_on:
        ranks = Ranks.join(parallel, rank=settings["rank"], address=f"file://{settings['meeting']}", timeout=_SECONDS)
    _peak_of_step(Path(settings["folder"], "small"), settings["dtype"], ranks)  # so that nothing is left to be imported
    before = 1024 * int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])
    yield {"bytes": _peak_of_step(Path(settings["folder"], "model"), settings["dtype"], ranks) - before}


def _peak_of_step(path: Path, dtype: str, ranks: Ranks | None) -> int:
    import torch

    from headrace.bench.loads import make_batch
    from headrace.model import load_model, load_tokenizer
    from headrace.observe import peak_memory
    from headrace.trainer import DeviceTrainer, TrainSettings

    model = load_model(str(path), in_parts=ranks is not None)
    given: dict[str, Any] = {"dtype": getattr(torch, dtype), "ranks": ranks}
    options = TrainSettings(micro_batch_tokens=max(_LENGTHS))
    trainer = DeviceTrainer(model, tokenizer=load_tokenizer(str(path)), settings=options, **given)
    rollouts = make_rollouts(_LENGTHS, prompt_tokens=_PROMPT, vocabulary=int(model.config.vocab_size))
    batch = make_batch(rollouts, advantages=[1.0] * len(rollouts))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    trainer.forward_backward(batch)
    trainer.optim_step(1e-6)
    return peak_memory(torch.device("cpu"))
