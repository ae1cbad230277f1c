"""Which rollouts go through the model together: few passes, nearly all full, with siblings' prompts computed once.

Best fit: units (one rollout, or siblings that share a prefix) are placed longest first, each in the pass where it leaves the
least room. A pass costs its rows, and the pairs of tokens that attend to each other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from headrace.records import Rollout

_LEAST_GAIN = 3  # siblings are split to fill a pass only with more than this many times the rows of the repeated prefix,
_MOST_REPEATED = 0.05  # and while repeated rows are at most this share of all rows


@dataclass(frozen=True)
class Unit:
    """Rollouts laid out together: one alone, or siblings that share a prefix."""

    members: tuple[int, ...]  # indices of the planned rollouts, ascending
    prefix: int = 0  # length of their common prefix, which is computed once


def plan_passes(rollouts: Sequence[Rollout], *, budget: int, share: bool = True) -> list[list[Unit]]:
    """Passes of at most `budget` rows; each rollout is in one unit of one pass, units in the order of their rollouts.

    With `share`, siblings of a group are one unit, with their longest common prefix that has no trained token. Siblings that
    do not fit one pass are split, and each part repeats the prefix. A rollout longer than the budget gets its own pass.
    """
    lengths = list(map(len, rollouts))
    units = _siblings(rollouts, lengths, budget) if share else (Unit((member,)) for member in range(len(lengths)))
    waiting = sorted([_entry(unit, lengths) for unit in units])
    allowance = int(_MOST_REPEATED * sum([rows for rows, _, _ in waiting]))  # prefix rows that may be repeated to fill passes
    passes: list[list[Unit]] = []
    rooms: list[tuple[int, int, int]] = []  # sorted (rows left, pairs, pass): at equal room, fewest pairs first
    while waiting:
        rows, _, unit = waiting.pop()
        most_room = rooms[-1][0] if rooms else 0
        if rows > most_room and len(unit.members) > 1:
            part = _filling(unit, most_room, lengths)
            if num_rows(part, lengths) > _LEAST_GAIN * unit.prefix and unit.prefix <= allowance:
                allowance -= unit.prefix
            else:
                part = _filling(unit, budget, lengths)
            if part != unit:
                rest = _unit(set(unit.members).difference(part.members), unit.prefix)
                insort(waiting, _entry(rest, lengths))
                unit, rows = part, num_rows(part, lengths)
        at = bisect_left(rooms, (rows,))
        if at < len(rooms):
            room, pairs, which = rooms.pop(at)
        else:
            room, pairs, which = max(rows, budget), 0, len(passes)
            passes.append([])
        passes[which].append(unit)
        if room > rows:
            insort(rooms, (room - rows, pairs + num_pairs(unit, lengths), which))
    return [sorted(units, key=attrgetter("members")) for units in passes]


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


def _unit(members: Iterable[int], prefix: int) -> Unit:
    ordered = tuple(sorted(members))
    return Unit(ordered, prefix if len(ordered) > 1 else 0)


def _filling(unit: Unit, room: int, lengths: Sequence[int]) -> Unit:
    """The longest siblings of a unit that fit into `room`, as one unit."""
    chosen, left = [], room - unit.prefix
    for member in sorted(unit.members, key=lengths.__getitem__, reverse=True):
        own = lengths[member] - unit.prefix
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
        key = member if lengths[member] > budget else (rollout.group, kind)
        groups.setdefault(key, []).append(member)
    for members in groups.values():
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
