"""`builtin:sort_digits`: write a string of digits in ascending order. The answer's length varies with the task's."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from headrace.types import Plain

_HELD_OUT_SHARE = 8
"""One string in so many is held out: which ones depends on the string alone, so the two splits never meet."""


class SortDigits:
    """Rows made on the fly; the same (seed, split, index) always gives the same row."""

    def __init__(self, *, seed: int, split: str, min_length: int = 3, max_length: int = 8) -> None:
        if not 1 <= min_length <= max_length:
            raise TypeError(f"min_length = {min_length} must lie between 1 and max_length = {max_length}")
        self._key = (seed, zlib.crc32(split.encode()))
        self._is_held_out = split != "train"
        self._lengths = (min_length, max_length + 1)

    def row(self, index: int) -> dict[str, Plain]:
        random = np.random.default_rng((*self._key, index))
        length = int(random.integers(*self._lengths))
        while True:
            digits = "".join(str(digit) for digit in random.integers(0, 10, size=length))
            if (zlib.crc32(digits.encode()) % _HELD_OUT_SHARE == 0) == self._is_held_out:
                return {"prompt": [{"role": "user", "content": digits}], "answer": "".join(sorted(digits))}


def partial_credit(prompt: object, completion: str, answer: str, **_: object) -> float:
    """The share of positions that are right; 1 only for the answer itself."""
    right = sum(given == wanted for given, wanted in zip(completion, answer, strict=False))
    return right / max(len(answer), len(completion))
