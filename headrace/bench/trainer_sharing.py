"""What sharing a group's prompt saves the trainer, and how full its passes are."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from headrace.bench.engine_loads import QWEN3_0_6B, lognormal_lengths
from headrace.bench.table import Row
from headrace.model import build_tokenizer, num_rows, plan_passes, prepare
from headrace.records import Batch, Call, FinishReason, Rollout, Sampling
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_BUDGET = 16384
_MEAN = 500
"""Tokens of a completion in the long-tail mix, and twice those of a prompt."""


@dataclass(frozen=True)
class Case:
    """Groups of one shape, and a model to train on them."""

    model: dict[str, Any]
    dtype: torch.dtype
    siblings: int
    prompt: int
    completion: int
    num_groups: int

    @property
    def bound(self) -> float:
        """G(P + R) ÷ (P + GR): the rows of siblings apart over those that share."""
        own = self.siblings * self.completion
        return (self.siblings * self.prompt + own) / (self.prompt + own)

    @property
    def name(self) -> str:
        return f"{self.siblings} siblings × ({self.prompt} + {self.completion})"


_ON_CPU = Case(
    model={
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
    dtype=torch.float32,
    siblings=8,
    prompt=256,
    completion=64,
    num_groups=2,
)
_ON_GPU = Case(model=QWEN3_0_6B, dtype=torch.bfloat16, siblings=8, prompt=1024, completion=256, num_groups=16)


def measure(*, device: str, quick: bool) -> list[Row]:
    """Gain of sharing and its bound, equality of the two gradients, fill and time of planning."""
    case = _ON_CPU if device == "cpu" else _ON_GPU
    return [*_gain(case, device=device, quick=quick), *_fill(num_groups=128 if quick else 1250)]


def _gain(case: Case, *, device: str, quick: bool) -> list[Row]:
    """Forward and backward of one batch with and without sharing, in turns: what slows one slows the other."""
    rollouts = [
        rollout
        for group in range(1 if quick else case.num_groups)
        for rollout in _group(
            str(group), case.prompt, (case.completion,) * case.siblings, vocabulary=case.model["vocab_size"], seed=group
        )
    ]
    values = np.ones(sum(map(len, rollouts)), dtype=np.float32)
    batch = Batch.from_columns(rollouts, advantages=values, weights=values / len(values), loss="reinforce", version=0)
    trainers = [_trainer(case, device=device, share=share) for share in (False, True)]
    seconds = []
    for _ in range(3 if quick else 9):
        seconds.append([_step(trainer, batch) for trainer in trainers])
    gain = statistics.median(apart / shared for apart, shared in seconds[1:])  # the first turn loads kernels
    rows = [
        Row(f"sharing, {case.name}: gain", gain, "×", bound=case.bound),
        Row(f"sharing, {case.name}: gain ÷ bound", gain / case.bound, "", goal="≥ 0.85"),
    ]
    if case.dtype == torch.float32:
        apart, shared = map(_gradient, trainers)
        difference = float((apart - shared).norm() / apart.norm())
        rows.append(Row("sharing: relative difference of gradients", difference, "", goal="≤ 1e-5"))
    return rows


def _fill(*, num_groups: int) -> list[Row]:
    """Of groups whose completions have a long tail; the emptiest pass, which holds what is left, does not count."""
    siblings, rollouts = 8, []
    prompts = lognormal_lengths(num_groups, mean=_MEAN / 2, sigma=0.5, cap=_BUDGET // 4, seed=1)
    completions = lognormal_lengths(num_groups * siblings, mean=_MEAN, sigma=1.0, cap=_BUDGET // 2)
    for group, prompt in enumerate(prompts):
        own = completions[group * siblings : (group + 1) * siblings]
        rollouts += _group(str(group), prompt, own, vocabulary=1000, seed=group)
    lengths, rows = list(map(len, rollouts)), []
    for share, what in ((False, "apart"), (True, "shared")):
        seconds = []
        for _ in range(5):
            started = time.thread_time()  # the processor's time: on a busy machine others take the rest
            passes = plan_passes(rollouts, budget=_BUDGET, share=share)
            seconds.append(time.thread_time() - started)
        totals = sorted(sum(num_rows(unit, lengths) for unit in units) for units in passes)[1:]
        fill, spent = sum(totals) / (_BUDGET * len(totals)), statistics.median(seconds)
        rows.append(Row(f"packing, long tail, {what}: fill", 100 * fill, "%", goal="≥ 98"))
        rows.append(Row(f"packing, {len(rollouts)} rollouts, {what}: planning", 1e3 * spent, "ms", goal="≤ 200"))
    return rows


def _group(name: str, prompt: int, completions: Sequence[int], *, vocabulary: int, seed: int) -> list[Rollout]:
    """Finished siblings on one prompt of random tokens."""
    random = np.random.default_rng(seed)
    beginning = random.integers(1, vocabulary, size=prompt)
    siblings = []
    for index, length in enumerate(completions):
        call = Call(
            start=prompt,
            stop=prompt + length,
            engine="",
            sampling=Sampling(max_tokens=length),
            finish_reason=FinishReason.LENGTH,
            started=0.0,
            finished=0.0,
        )
        siblings.append(
            Rollout.from_prompt(beginning, id=f"{name}/{index}", group=name, index=index).extend(
                call,
                token_ids=random.integers(1, vocabulary, size=length, dtype=np.int32),
                logprobs=np.full(length, -1, dtype=np.float32),
                versions=np.zeros(length, dtype=np.int32),
                policy="policy",
                lineage="",
            )
        )
    return siblings


def _trainer(case: Case, *, device: str, share: bool) -> DeviceTrainer:
    config = transformers.AutoConfig.for_model(**case.model)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return DeviceTrainer(
        prepare(model, name=case.model["model_type"]),
        tokenizer=build_tokenizer(),  # for saving; a pass has no use for one
        settings=TrainSettings(micro_batch_tokens=_BUDGET, share_prefixes=share),
        dtype=case.dtype,
    )


def _step(trainer: DeviceTrainer, batch: Batch) -> float:
    """Seconds of the batch's forward and backward passes, planning and packing included."""
    trainer.model.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    trainer.forward_backward(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _gradient(trainer: DeviceTrainer) -> Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
