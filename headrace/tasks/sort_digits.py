"""`builtin:sort_digits`: write distinct digits in ascending order. The answer's length varies with the task's."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from headrace.records import Plain

_HELD_OUT_SHARE = 8
"""One answer in so many is held out: which ones depends on the answer alone, so no order of its digits is ever trained."""


class SortDigits:
    """Rows made on the fly; the same (seed, split, index) always gives the same row."""

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
    """The share of positions that are right; 1 only for the answer itself."""
    right = sum(given == wanted for given, wanted in zip(completion, answer, strict=False))
    return right / max(len(answer), len(completion))
