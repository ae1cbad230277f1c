"""Which rollouts go through the model together: few passes, nearly all full, with siblings' prompts computed once.

Best fit: units (one rollout, or siblings that share a prefix) are placed longest first, each in the pass where it leaves the
least room. A pass costs its rows, and the pairs of tokens that attend to each other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from headrace.model.layout import Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.records import Rollout

_LEAST_GAIN = 3  # siblings are split to fill a pass only with more than this many times the rows of the repeated prefix,
_MOST_REPEATED = 0.05  # and while repeated rows are at most this share of all rows


def plan_passes(rollouts: Sequence[Rollout], *, budget: int, share: bool = True) -> list[list[Unit]]:
    """Passes of at most `budget` rows; each rollout is in one unit of one pass, units in the order of their rollouts.

    With `share`, siblings of a group are one unit, with their longest common prefix that has no trained token. Siblings that
    do not fit one pass are split, and each part repeats the prefix. A rollout longer than the budget gets its own pass.
    """
    lengths = list(map(len, rollouts))
    units = _siblings(rollouts, lengths, budget) if share else (Unit((member,)) for member in range(len(lengths)))
    waiting = sorted([_entry(unit, lengths) for unit in units])
    passes = _Passes(budget, lengths, allowance=int(_MOST_REPEATED * sum([rows for rows, _, _ in waiting])))
    while waiting:
        rows, _, unit = waiting.pop()
        left_over = passes.add(unit, rows)
        if left_over is not None:
            insort(waiting, _entry(left_over, lengths))
    return [sorted(units, key=attrgetter("members")) for units in passes.units]


def members_of(units: Sequence[Unit]) -> list[int]:
    """The rollouts of a pass, in packing order."""
    return [member for unit in units for member in unit.members]


def num_rows(unit: Unit, lengths: Sequence[int]) -> int:
    """Rows of a unit, given the lengths of all rollouts."""
    return sum([lengths[member] for member in unit.members]) - (len(unit.members) - 1) * unit.prefix


def num_pairs(unit: Unit, lengths: Sequence[int]) -> int:
    """Twice the pairs of tokens that attend to each other: squared lengths, a prefix counted once."""
    return sum([lengths[member] ** 2 for member in unit.members]) - (len(unit.members) - 1) * unit.prefix**2


def _entry(unit: Unit, lengths: Sequence[int]) -> tuple[int, int, Unit]:
    """Sort key: by rows; among equals the earliest rollout is last, and `pop` takes it first."""
    return num_rows(unit, lengths), -unit.members[0], unit


def _unit(members: Sequence[int], prefix: int) -> Unit:
    return Unit(tuple(sorted(members)), prefix if len(members) > 1 else 0)


class _Passes:
    def __init__(self, budget: int, lengths: Sequence[int], *, allowance: int) -> None:
        self.units: list[list[Unit]] = []
        self._budget = budget
        self._lengths = lengths
        self._allowance = allowance  # prefix rows that may still be repeated to fill passes
        self._open: list[tuple[int, int, int]] = []  # sorted (rows left, pairs, pass): at equal room, fewest pairs first

    def add(self, unit: Unit, rows: int) -> Unit | None:
        """Put a unit where it fits best, or in a new pass; returns the rest of one that had to be split."""
        most_room, left_over = self._open[-1][0] if self._open else 0, None
        if rows > most_room and len(unit.members) > 1:
            unit, left_over = self._parted(unit, rows, most_room)
            rows = num_rows(unit, self._lengths)
        at = bisect_left(self._open, (rows,))
        if at < len(self._open):
            room, pairs, which = self._open.pop(at)
        else:
            room, pairs, which = max(rows, self._budget), 0, len(self.units)
            self.units.append([])
        self.units[which].append(unit)
        if room > rows:
            insort(self._open, (room - rows, pairs + num_pairs(unit, self._lengths), which))
        return left_over

    def _parted(self, unit: Unit, rows: int, most_room: int) -> tuple[Unit, Unit | None]:
        """(part to place now, rest) of siblings that fit nowhere: what fills the emptiest pass, else what a new one holds."""
        filling = self._filling(unit, most_room)
        if num_rows(filling, self._lengths) > _LEAST_GAIN * unit.prefix and unit.prefix <= self._allowance:
            self._allowance -= unit.prefix
        elif rows <= self._budget:
            return unit, None
        else:
            filling = self._filling(unit, self._budget)
        chosen = set(filling.members)
        return filling, _unit([member for member in unit.members if member not in chosen], unit.prefix)

    def _filling(self, unit: Unit, room: int) -> Unit:
        """The longest siblings that fit into `room`, as one unit."""
        chosen, left = [], room - unit.prefix
        for member in sorted(unit.members, key=self._lengths.__getitem__, reverse=True):
            own = self._lengths[member] - unit.prefix
            if own <= left:
                chosen.append(member)
                left -= own
        return _unit(chosen, unit.prefix)


def _siblings(rollouts: Sequence[Rollout], lengths: Sequence[int], budget: int) -> Iterator[Unit]:
    """Units that hold every rollout once: siblings by their common prefixes, the others alone."""
    groups: dict[object, list[int]] = {}
    for member, rollout in enumerate(rollouts):
        routing = rollout.expert_routing
        kind = None if routing is None else (routing.dtype, routing.shape[1:])
        if lengths[member] > budget:
            yield Unit((member,))
        else:
            groups.setdefault((rollout.group, kind), []).append(member)
    for members in groups.values():
        if len(members) == 1:
            yield Unit((members[0],))
        else:
            yield from _clusters(rollouts, members)


def _clusters(rollouts: Sequence[Rollout], members: Sequence[int]) -> Iterator[Unit]:
    """Siblings as one unit, or as several where that saves more rows: their prompts may differ."""
    beginnings = sorted([(_beginning(rollouts[member]), member) for member in members])
    routing = rollouts[members[0]].expert_routing
    size = 4 if routing is None else 4 + routing[:1].nbytes
    common = [_num_common(one, other) // size for (one, _), (other, _) in pairwise(beginnings)]
    spans = [(0, len(members))]
    while spans:
        start, stop = spans.pop()
        prefix = min(common[start : stop - 1], default=0)
        ends = [at + 1 for at in range(start, stop - 1) if common[at] == prefix]
        parts = list(pairwise([start, *ends, stop]))
        apart = sum((end - begin - 1) * min(common[begin : end - 1], default=0) for begin, end in parts)
        if len(parts) > 1 and apart >= (stop - start - 1) * prefix:
            spans.extend(parts)
        else:
            yield _unit([member for _, member in beginnings[start:stop]], prefix)


def _beginning(rollout: Rollout) -> bytes:
    """What a rollout may share, with each token's experts: all before its first trained token, and never its last token."""
    is_trained, token_ids, routing = rollout.loss_mask, rollout.token_ids, rollout.expert_routing
    most = int(is_trained.argmax()) if is_trained.any() else len(is_trained)
    most = max(0, min(most, len(is_trained) - 1))
    if routing is None:
        return token_ids[:most].tobytes()
    columns = [np.ascontiguousarray(array[:most]).view(np.uint8).reshape(most, -1) for array in (token_ids, routing)]
    return np.concatenate(columns, axis=1).tobytes()


def _num_common(one: bytes, other: bytes) -> int:
    """Length of the common prefix, in bytes."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    differs = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    return int(differs.argmax())
