"""Rewards for the form of a completion, to be named in `reward.functions` beside one for its content, or in place of it.

Their keywords are set in `[reward.options]`, or in Python by `functools.partial`.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, cast

from headrace.imports import import_name
from headrace.score.rewards import RewardFunction
from headrace.score.signature import RewardError, TrainerState

if TYPE_CHECKING:
    from collections.abc import Callable


def overlong(length: int, *, max_length: int, buffer: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to `max_length - buffer` tokens, then falling to -1
    at `max_length`. A `buffer` below 1 is a share of `max_length`."""
    buffer = buffer if buffer >= 1 else buffer * max_length
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


def length_penalty(completion_length: int, *, per_token: float = 0.001, free: int = 0) -> float:
    """`-per_token` for each token beyond the first `free`."""
    return -per_token * max(0, completion_length - free)


def cosine_length(
    completion_length: int,
    *,
    correct: str | Callable[..., Any],
    max_length: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    exceeded: float = -1.0,
    finish_reason: str = "",
    prompt_ids: list[int] | None = None,
    trainer_state: TrainerState | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **row: Any,  # noqa: ANN401  (and the completion)
) -> float | None:
    """Yeo et al.'s cosine reward (arXiv 2502.03373, appendix C.1), in place of a reward for right answers: short right answers
    get more than long ones, short wrong ones less. `right` and `wrong` are the rewards at no tokens and at `max_length`,
    `exceeded` is the one from there on. `correct` is a plain per-sample reward or its name; above 0.5 the answer is right."""
    if isinstance(correct, str):
        correct = cast("Callable[..., Any]", import_name(correct, setting="reward.options.cosine_length.correct"))
    judge = RewardFunction(correct)
    if judge.signature.is_batched or judge.is_async:
        raise RewardError(f"cosine_length: correct = {judge.name!r} must be a plain function f(prompt, completion, **row)")
    given = {"completion_length": completion_length, "finish_reason": finish_reason, "prompt_ids": prompt_ids}
    given |= {"trainer_state": trainer_state, "log_metric": log_metric}
    arguments = row | {name: value for name, value in given.items() if name in judge.signature.given}
    if missing := [name for name in judge.signature.required if name not in arguments]:
        what = f"takes {', '.join(missing)}, which the row does not have, or which is an option of cosine_length"
        raise RewardError(f"cosine_length: correct = {judge.name!r} {what}; add or rename the column, or give a default")
    value = judge.function(**judge.signature.pick(arguments))
    if value is None:
        return None
    if completion_length >= max_length:
        return exceeded
    start, end = right if value > 0.5 else wrong
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * completion_length / max_length))


def repetition_penalty(completion_ids: list[int], completion_length: int, *, ngram: int = 3, penalty: float = 1.0) -> float:
    """`-penalty` times the share of n-grams of tokens that repeat an earlier one (after Yeo et al., appendix C.2)."""
    ngrams = [tuple(completion_ids[start : start + ngram]) for start in range(completion_length - ngram + 1)]
    return -penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0


def think_format(completion: str) -> float:
    """1 if the completion starts with `<think>`, closes it and opens no other, else 0."""
    return float(re.match(r"<think>(?!.*<think>).*</think>", completion, re.DOTALL) is not None)
