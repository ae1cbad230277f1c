"""Time and memory of work on a device, memory of a GPU that processes share, and how far two models' logprobs are apart."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from headrace.bench.loads import Load, Workload, make_batch, make_trainer
from headrace.model import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from headrace.records import Array, Rollout

GIB = float(1 << 30)
MIB = float(1 << 20)
_EVERY = 0.1
TEXTS = (
    "The old mill stood by the river, and every morning the miller",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does it travel?\nAnswer:",
    "def merge(left, right):\n    ",
    "Photosynthesis turns light into",
    "Dear Professor, I am writing to ask whether",
    "1, 1, 2, 3, 5, 8, 13,",
    "In the spring of 1848, across much of Europe,",
    "To make bread you need flour, water, salt and",
)
"""Prompts for a trained model: on random tokens its distribution is unlike any that training meets."""


MEAN, MAX, KL = "mean |Δ logprob| against the trainer", "max |Δ logprob| against the trainer", "KL against the trainer"


def seconds_of(action: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of an action, until the device has finished it."""
    wait(device)
    started = time.perf_counter()
    action()
    wait(device)
    return time.perf_counter() - started


def timed(action: Callable[[], object], device: str = "cpu") -> Callable[[int], float]:
    """A contestant for `take_turns` that returns the action's seconds."""
    return lambda _: seconds_of(action, device)


def peak_bytes(action: Callable[[], object], device: str) -> int:
    """Peak memory of `action` beyond what was held before: on a GPU tensors, by torch's count; on a CPU the whole process,
    which is coarse below a few MiB."""
    release()
    wait(device)
    if device == "cpu":
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        action()
        return max(0, _resident("VmHWM") - before)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    wait(device)
    return int(torch.cuda.max_memory_allocated() - before)


def held_bytes(device: str) -> int:
    """Bytes held by tensors on a GPU, or by the process on a CPU."""
    return _resident("VmRSS") if device == "cpu" else int(torch.cuda.memory_allocated())


def release() -> None:
    """Free unused memory so that the next measurement does not count it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait(device: str) -> None:
    """Wait until the device is idle."""
    if device != "cpu":
        torch.cuda.synchronize()


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class GpuMemory:
    """Samples the GPU's memory, of all processes together, ten times a second in a `with`; torch keeps what it allocates, so no
    peak is missed. Relative to the start; None without a GPU."""

    peak: float | None = None
    """GiB."""

    def __enter__(self) -> GpuMemory:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(_used_bytes(),), name="GPU memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self, before: int | None) -> None:
        while before is not None and not self._end.wait(_EVERY):
            self.peak = max(self.peak or 0.0, ((_used_bytes() or 0) - before) / GIB)


def _used_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def compare(rollouts: Sequence[Rollout], again: Sequence[Array]) -> dict[str, float]:
    """Compare the logprobs of rollouts with the same [T] logprobs computed again, over all sampled tokens.

    The KL is from the engine's distribution, estimated by the mean of exp(d) - 1 - d: unbiased and never negative.
    """
    pairs = zip(rollouts, again, strict=True)
    d = np.concatenate([(values.astype(np.float64) - rollout.logprobs)[rollout.loss_mask] for rollout, values in pairs])
    return {MEAN: float(np.abs(d).mean()), MAX: float(np.abs(d).max()), KL: float((np.expm1(d) - d).mean())}


def trainer_logprobs(folder: str, groups: Sequence[Sequence[Rollout]], *, dtype: str, device: str) -> list[list[Array]]:
    """The trainer's logprobs for each group of rollouts."""
    trainer = make_trainer(folder, dtype=dtype, device=device, micro_batch_tokens=4096)
    return [trainer.forward(make_batch(rollouts, advantages=[0.0] * len(rollouts))) for rollouts in groups]


def mismatch_workload(model: PreTrainedModel, folder: str, *, requests: int, length: int, has_text: bool) -> Workload:
    """Text for a trained model, random tokens for one with random weights."""
    if not has_text:
        vocabulary = int(model.config.get_text_config().vocab_size)
        return Load.uniform(requests, 32, length).sample(vocabulary=vocabulary, seed=0)
    tokenizer = cast("Any", load_tokenizer(folder))
    prompts = [tuple(int(token) for token in tokenizer(text)["input_ids"]) for text in TEXTS]
    siblings = max(1, requests // len(TEXTS))
    return Workload(tuple(prompt for prompt in prompts for _ in range(siblings)), (length,) * (len(prompts) * siblings))
