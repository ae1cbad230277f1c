"""How far an engine's logprobs are from those of the same tokens computed again: by the trainer, or by plain transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from headrace.bench.engine_loads import Workload
from headrace.model import build_tokenizer, load_model
from headrace.records import Batch
from headrace.trainer import DeviceTrainer, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from headrace.records import Array, Rollout

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
"""Beginnings for a real model: far from text it knows, a model's distribution is not one that training meets."""


@dataclass(frozen=True)
class Mismatch:
    """Over all tokens drawn, d = logprob computed again - logprob the engine gave."""

    mean_difference: float
    """The mean of |d|."""
    divergence: float
    """KL from the engine's distribution, by the mean of exp(d) - 1 - d: never negative, and without bias."""
    num_tokens: int
    largest_difference: float
    """The largest |d|."""


def compare(rollouts: Sequence[Rollout], again: Sequence[Array]) -> Mismatch:
    """Of rollouts as an engine drew them, and [T] logprobs of theirs computed again."""
    pairs = zip(rollouts, again, strict=True)
    differences = np.concatenate(
        [(values.astype(np.float64) - rollout.logprobs)[rollout.loss_mask] for rollout, values in pairs]
    )
    return Mismatch(
        mean_difference=float(np.abs(differences).mean()),
        divergence=float((np.expm1(differences) - differences).mean()),
        num_tokens=len(differences),
        largest_difference=float(np.abs(differences).max()),
    )


def trainer_logprobs(folder: str, groups: Sequence[Sequence[Rollout]], *, dtype: str, device: str) -> list[list[Array]]:
    """What a trainer of this model computes for each group of rollouts: float32 weights, as in a run."""
    trainer = DeviceTrainer(
        load_model(folder, dtype="float32", device=device),
        tokenizer=build_tokenizer(),  # for saving; a forward pass has no use for one
        settings=TrainSettings(micro_batch_tokens=4096),
        dtype=getattr(torch, dtype),
    )
    results = []
    for rollouts in groups:
        zeros = np.zeros(sum(len(rollout) for rollout in rollouts), dtype=np.float32)
        results.append(trainer.forward(Batch.from_columns(rollouts, advantages=zeros, weights=zeros, loss="grpo", version=0)))
    return results


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> list[Array]:
    """Each rollout alone through transformers' own forward pass: no packing, no cache, nothing of ours."""
    device = next(model.parameters()).device
    results = []
    for rollout in rollouts:
        token_ids = torch.from_numpy(rollout.token_ids.astype(np.int64)).to(device).unsqueeze(0)
        logits = cast("Any", model)(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
        drawn = torch.log_softmax(logits, dim=-1).gather(1, token_ids[0, 1:].unsqueeze(1)).squeeze(1)
        results.append(np.concatenate([np.zeros(1, dtype=np.float32), drawn.cpu().numpy()]))
    return results


def text_workload(tokenizer: PreTrainedTokenizerBase, *, siblings: int, length: int) -> Workload:
    """Every beginning, several times over."""
    prompts = [tuple(int(token) for token in cast("Any", tokenizer)(text)["input_ids"]) for text in TEXTS]
    return Workload(tuple(prompt for prompt in prompts for _ in range(siblings)), (length,) * (len(prompts) * siblings))
