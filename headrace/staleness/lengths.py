"""Whether what is trained is as long as what was submitted: completion order takes short rollouts first, and rejection drops
those that took long."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_BIN = math.log(1.02)
"""Width of a bin of lengths: quantiles are right to 2 %, and however long a run is, there are few bins."""


class Lengths:
    """A distribution of lengths, of which mean and quantiles are known."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._num = self._sum = 0

    def add(self, lengths: Sequence[int]) -> None:
        for length in lengths:
            self._bins[round(math.log(length) / _BIN) if length else -1] += 1
        self._num += len(lengths)
        self._sum += sum(lengths)

    @property
    def mean(self) -> float:
        return self._sum / max(self._num, 1)

    def quantile(self, share: float) -> float:
        """The length that this share of all is at most as long as."""
        left = share * self._num
        for place in sorted(self._bins):
            left -= self._bins[place]
            if left <= 0:
                return 0.0 if place < 0 else math.exp(place * _BIN)
        return 0.0


class LengthBias:
    """Sampled tokens of the episodes that have ended or were cancelled, and of those of them that were trained, since this
    process started."""

    def __init__(self) -> None:
        self._ended, self._trained = Lengths(), Lengths()
        self._waiting: dict[int, Sequence[int]] = {}
        """Of groups that are neither trained nor dropped yet, by number."""

    def ended(self, number: int, lengths: Sequence[int]) -> None:
        """The episodes of a group have ended, trained or not."""
        self._ended.add(lengths)
        self._waiting[number] = lengths

    def cancelled(self, lengths: Sequence[int]) -> None:
        """A group was given up in flight, with so many tokens sampled."""
        self._ended.add(lengths)

    def dropped(self, number: int) -> None:
        self._waiting.pop(number, None)

    def trained(self, number: int) -> None:
        self._trained.add(self._waiting.pop(number, ()))

    def metrics(self) -> dict[str, float]:
        """Mean and 90th percentile of each, and the ratio of trained to ended: below 1, long rollouts are underrepresented."""
        ended, trained = self._ended, self._trained
        pairs = {"mean": (trained.mean, ended.mean), "p90": (trained.quantile(0.9), ended.quantile(0.9))}
        found: dict[str, float] = {}
        for name, (ours, all_of_them) in pairs.items():
            found |= {f"lengths/trained_{name}": ours, f"lengths/ended_{name}": all_of_them}
            found[f"lengths/{name}_ratio"] = ours / all_of_them if all_of_them else 1.0
        return found
