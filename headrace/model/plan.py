"""Which rollouts go through the model together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.model.layout import Unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.types import Rollout


def plan_passes(rollouts: Sequence[Rollout], *, budget: int, share: bool = True) -> list[list[Unit]]:
    """Passes of at most `budget` rows; each rollout is in one unit of one pass.

    A rollout longer than the budget gets a pass of its own.
    """
    lengths = [len(rollout) for rollout in rollouts]
    passes: list[list[int]] = []
    room: list[int] = []
    for member in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fits = [index for index, left in enumerate(room) if left >= lengths[member]]
        if fits:
            best = min(fits, key=lambda index: room[index])
            passes[best].append(member)
            room[best] -= lengths[member]
        else:
            passes.append([member])
            room.append(budget - lengths[member])
    return [[Unit((member,)) for member in sorted(members)] for members in passes]


def members_of(units: Sequence[Unit]) -> list[int]:
    """The rollouts of a pass, in the order they are packed in."""
    return [member for unit in units for member in unit.members]
