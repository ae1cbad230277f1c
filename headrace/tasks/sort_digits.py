"""`builtin:sort_digits`: write distinct digits in ascending order. The answer is as long as the task."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.tasks.settings import TaskError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.records import Plain

_HELD_OUT_SHARE = 8
"""One answer in this many is held out. The answer alone decides, so no order of its digits is ever trained."""


def open_source(name: str, *, seed: int, split: str, options: dict[str, Any]) -> SortDigits:
    reward_of(name)
    try:
        return SortDigits(seed=seed, split=split, **options)
    except TypeError as error:
        problem = str(error).rpartition("() ")[2]  # without the name of the class
        raise TaskError(f"tasks: builtin:{name}: options: {problem}") from error


def reward_of(name: str) -> Callable[..., float]:
    if name != "sort_digits":
        raise TaskError(f"tasks: no built-in task {name!r}; there is sort_digits")
    return partial_credit


class SortDigits:
    def __init__(self, *, seed: int, split: str, min_length: int = 3, max_length: int = 8) -> None:
        if not 2 <= min_length <= max_length <= 8:
            raise TypeError(f"min_length = {min_length} and max_length = {max_length} must lie between 2 and 8, in order")
        self._key = (seed, zlib.crc32(split.encode()))
        self._is_held_out = split != "train"
        self._lengths = (min_length, max_length + 1)

    def row(self, index: int) -> dict[str, Plain]:
        random = np.random.default_rng((*self._key, index))
        length = int(random.integers(*self._lengths))
        while True:
            digits = "".join(str(digit) for digit in random.permutation(10)[:length])
            answer = "".join(sorted(digits))
            if (zlib.crc32(answer.encode()) % _HELD_OUT_SHARE == 0) == self._is_held_out:
                return {"prompt": [{"role": "user", "content": digits}], "answer": answer}


def partial_credit(prompt: object, completion: str, answer: str, **_: object) -> float:
    """The share of positions that are right; 1 only for the exact answer."""
    right = sum(given == wanted for given, wanted in zip(completion, answer, strict=False))
    return right / max(len(answer), len(completion))
