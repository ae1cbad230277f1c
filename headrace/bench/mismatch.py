"""How far an engine's logprobs are from those that the trainer computes for the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from headrace.bench.loads import Load, Workload, make_batch, make_trainer
from headrace.model import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

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
"""Prompts for a trained model: on random tokens its distribution is unlike any that training meets."""


MEAN, MAX, KL = "mean |Δ logprob| against the trainer", "max |Δ logprob| against the trainer", "KL against the trainer"


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
