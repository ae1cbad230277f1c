"""What sharing a group's prompt saves the trainer, and how full its passes are."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
import timeit
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.harness import Row, take_turns
from headrace.bench.loads import (
    LEARNING_RATE,
    QWEN3_0_6B,
    SMALL,
    gradient_of,
    lognormal_lengths,
    make_batch,
    make_group,
    make_trainer,
    relative_difference,
    write_random_model,
)
from headrace.bench.measure import seconds_of
from headrace.bench.trainer_speed import packing_fill
from headrace.model import plan_passes

if TYPE_CHECKING:
    from headrace.trainer import DeviceTrainer

_BUDGET = 16384
_MEAN = 500
"""Mean tokens of a completion in the long tail; prompts have half as many."""


@dataclass(frozen=True)
class Case:
    """Groups of one shape, and a model to train on them."""

    model: dict[str, Any]
    dtype: str
    siblings: int
    prompt: int
    completion: int
    num_groups: int

    @property
    def bound(self) -> float:
        """G(P + R) ÷ (P + GR): rows without sharing ÷ rows with sharing."""
        own = self.siblings * self.completion
        return (self.siblings * self.prompt + own) / (self.prompt + own)

    @property
    def name(self) -> str:
        return f"{self.siblings} siblings × ({self.prompt} + {self.completion})"


_SHAPE = {**SMALL, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "tie_word_embeddings": False}
_ON_CPU = Case(_SHAPE, "float32", siblings=8, prompt=256, completion=64, num_groups=2)
_ON_GPU = Case(QWEN3_0_6B, "bfloat16", siblings=8, prompt=1024, completion=256, num_groups=16)


def measure(device: str, *, quick: bool) -> list[Row]:
    """The gain of sharing and its bound, the difference of the two gradients, packing fill and planning time."""
    case = _ON_CPU if device == "cpu" else _ON_GPU
    return [*_gain(case, device=device, quick=quick), *_fill(num_groups=128 if quick else 1250)]


def _gain(case: Case, *, device: str, quick: bool) -> list[Row]:
    """Forward and backward of one batch, planning and packing included, with and without sharing."""
    lengths, rollouts = (case.completion,) * case.siblings, []
    for number in range(1 if quick else case.num_groups):
        rollouts += make_group(str(number), case.prompt, lengths, vocabulary=case.model["vocab_size"], seed=number)
    batch = make_batch(rollouts, advantages=[1.0] * len(rollouts), loss="reinforce")
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(case.model, Path(folder), dtype="float32")
        how: dict[str, Any] = {"dtype": case.dtype, "device": device, "micro_batch_tokens": _BUDGET}
        apart, shared = (make_trainer(path, **how, share_prefixes=share) for share in (False, True))

    def seconds(trainer: DeviceTrainer) -> float:
        found = seconds_of(lambda: trainer.forward_backward(batch), device)
        trainer.optim_step(LEARNING_RATE)  # drops the gradient
        return found

    (gains,) = take_turns({"": lambda _: seconds(apart) / seconds(shared)}, 2 if quick else 8, warmups=1).values()
    gain = statistics.median(gains)
    rows = [
        Row(f"sharing, {case.name}: gain", gain, "×", bound=case.bound),
        Row(f"sharing, {case.name}: gain ÷ bound", gain / case.bound, "", goal="≥ 0.85"),
    ]
    if case.dtype == "float32":
        for trainer in (apart, shared):
            trainer.forward_backward(batch)
        difference = relative_difference(gradient_of(shared), gradient_of(apart))
        rows.append(Row("sharing: relative difference of gradients", difference, "", goal="≤ 1e-5"))
    return rows


def _fill(*, num_groups: int) -> list[Row]:
    """Pack groups whose completions have a long tail."""
    siblings, rollouts, rows = 8, [], []
    prompts = lognormal_lengths(num_groups, mean=_MEAN / 2, sigma=0.5, cap=_BUDGET // 4, seed=1)
    completions = lognormal_lengths(num_groups * siblings, mean=_MEAN, sigma=1.0, cap=_BUDGET // 2)
    for group, prompt in enumerate(prompts):
        own = completions[group * siblings : (group + 1) * siblings]
        rollouts += make_group(str(group), prompt, own, vocabulary=1000, seed=group)
    for share, what in ((False, "apart"), (True, "shared")):
        plan = functools.partial(plan_passes, rollouts, budget=_BUDGET, share=share)
        seconds = timeit.repeat(plan, number=1, repeat=5, timer=time.thread_time)  # CPU time, since the machine may be busy
        fill, title = packing_fill(plan(), list(map(len, rollouts)), _BUDGET), f"packing, {len(rollouts)} rollouts, {what}"
        rows.append(Row(f"packing, long tail, {what}: fill", 100 * fill, "%", goal="≥ 98"))
        rows.append(Row(f"{title}: planning", 1e3 * statistics.median(seconds), "ms", goal="≤ 200"))
    return rows
