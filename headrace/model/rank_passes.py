"""Which rollouts each rank of a trainer takes: equally many passes, all of nearly the same predicted time.

Ranks that share a model gather its layers together, so a pass lasts as long as the slowest rank's: passes that run at the same
time, a round, have a target in common. It is the same for all rounds, except where one rollout alone costs more: then its whole
round may. Units go longest first, each into the pass furthest below its target, siblings are split where they would overfill
it; then single rollouts move from the pass furthest above to those furthest below while that helps.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.model.pass_planning import Unit, _siblings, _unit, num_pairs, num_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.records import Rollout

_EVEN = 1.005  # cost over target: good enough
_MOST_MOVES = 2000
_TRIED = 4  # passes that a rollout may move to


@dataclass(frozen=True)
class PassCost:
    """Predicted time of a pass, in any unit: per row, and per pair of tokens that attend to each other (`num_pairs`)."""

    row: float
    pair: float = 0.0

    def __call__(self, unit: Unit, lengths: Sequence[int]) -> float:
        return self.row * num_rows(unit, lengths) + self.pair * num_pairs(unit, lengths)


@dataclass
class _Pass:
    """Units by cluster: siblings of one cluster that are in one pass share their prefix."""

    target: float
    clusters: dict[int, Unit] = field(default_factory=dict)
    rows: int = 0
    cost: float = 0.0

    @property
    def level(self) -> float:
        return self.cost / self.target


class _Passes:
    def __init__(
        self, targets: Sequence[float], lengths: Sequence[int], clusters: Sequence[Unit], cost: PassCost, budget: int
    ) -> None:
        self.all = [_Pass(target) for target in targets]
        self._lengths, self._clusters, self._cost, self._budget = lengths, clusters, cost, budget

    def with_members(self, each: _Pass, cluster: int, members: tuple[int, ...]) -> tuple[int, float]:
        """Rows and cost of a pass if it had just these members of a cluster."""
        before = each.clusters.get(cluster)
        rows, cost = each.rows, each.cost
        if before is not None:
            rows, cost = rows - num_rows(before, self._lengths), cost - self._cost(before, self._lengths)
        if members:
            unit = _unit(members, self._clusters[cluster].prefix)
            rows, cost = rows + num_rows(unit, self._lengths), cost + self._cost(unit, self._lengths)
        return rows, cost

    def set(self, each: _Pass, cluster: int, members: tuple[int, ...]) -> None:
        each.rows, each.cost = self.with_members(each, cluster, members)
        each.clusters.pop(cluster, None)
        if members:
            each.clusters[cluster] = _unit(members, self._clusters[cluster].prefix)

    def members(self, each: _Pass, cluster: int) -> tuple[int, ...]:
        return each.clusters[cluster].members if cluster in each.clusters else ()

    def fits(self, each: _Pass, rows: int) -> bool:
        return rows <= self._budget or not each.clusters  # a rollout longer than the budget has a pass of its own

    def place(self) -> bool:
        """Put every unit into a pass; False if they do not fit into so many."""
        lengths, cost = self._lengths, self._cost
        waiting = [(-cost(unit, lengths), index, unit.members) for index, unit in enumerate(self._clusters)]
        heapq.heapify(waiting)
        while waiting:
            _, cluster, members = heapq.heappop(waiting)
            longest_first = sorted(members, key=lengths.__getitem__, reverse=True)
            for each in sorted(self.all, key=_level):
                taken = self.members(each, cluster)
                part: tuple[int, ...] = ()
                for member in longest_first:
                    rows, price = self.with_members(each, cluster, tuple(sorted((*taken, *part, member))))
                    if self.fits(each, rows) and (not part or price <= each.target) and (rows <= self._budget or not part):
                        part = (*part, member)
                if part:
                    break
            else:
                return False
            self.set(each, cluster, tuple(sorted((*taken, *part))))
            rest = tuple(member for member in members if member not in part)
            if rest:
                unit = _unit(rest, self._clusters[cluster].prefix)
                heapq.heappush(waiting, (-cost(unit, lengths), cluster, rest))
        return True

    def even_out(self) -> None:
        for _ in range(_MOST_MOVES):
            dearest = max(self.all, key=_level)
            if dearest.level <= _EVEN:
                return
            best: tuple[float, _Pass, int, int] | None = None
            for other in heapq.nsmallest(_TRIED, self.all, key=_level):
                for cluster, unit in dearest.clusters.items():
                    for member in unit.members:
                        left = self.with_members(dearest, cluster, _without(unit.members, member))[1] / dearest.target
                        more = tuple(sorted((*self.members(other, cluster), member)))
                        rows, price = self.with_members(other, cluster, more)
                        worst = max(left, price / other.target)
                        if self.fits(other, rows) and (best is None or worst < best[0]):
                            best = worst, other, cluster, member
            if best is None or best[0] >= dearest.level * 0.9999:
                return
            _, other, cluster, member = best
            self.set(other, cluster, tuple(sorted((*self.members(other, cluster), member))))
            self.set(dearest, cluster, _without(dearest.clusters[cluster].members, member))


def plan_rank_passes(
    rollouts: Sequence[Rollout], *, budget: int, count: int, cost: PassCost, share: bool = True
) -> list[list[list[Unit]]]:
    """The passes of each of `count` ranks, equally many; some may be empty. `budget` and `share`: see `plan_passes`."""
    lengths = list(map(len, rollouts))
    clusters = list(_siblings(rollouts, lengths, budget)) if share else [Unit((member,)) for member in range(len(lengths))]
    rounds = max(1, -(-sum(num_rows(unit, lengths) for unit in clusters) // (budget * count)))
    while True:
        targets = _targets(clusters, lengths, rounds=rounds, count=count, cost=cost, budget=budget)
        passes = _Passes([target for target in targets for _ in range(count)], lengths, clusters, cost, budget)
        if passes.place():
            break
        rounds += 1
    passes.even_out()
    plans: list[list[list[Unit]]] = [[] for _ in range(count)]
    spent = [0.0] * count
    for start in range(0, len(passes.all), count):
        ranks = sorted(range(count), key=spent.__getitem__)
        dearest_first = sorted(passes.all[start : start + count], key=lambda each: each.cost, reverse=True)
        for rank, each in zip(ranks, dearest_first, strict=True):
            plans[rank].append(sorted(each.clusters.values(), key=lambda unit: unit.members))
            spent[rank] += each.cost
    return plans


def _targets(
    clusters: Sequence[Unit], lengths: Sequence[int], *, rounds: int, count: int, cost: PassCost, budget: int
) -> list[float]:
    """What a pass of each round should cost: as much as the dearest rollout of the round if the dearest go first, and at least
    a level at which all rounds together hold everything."""
    singles = sorted((cost(Unit((member,)), lengths) for member in range(len(lengths))), reverse=True)
    dearest = [singles[place] if place < len(singles) else 0.0 for place in range(0, rounds * count, count)]
    total = sum(cost(unit, lengths) for unit in clusters)
    full = total / max(1, sum(num_rows(unit, lengths) for unit in clusters)) * budget  # what a pass full of rows costs
    low, high = 0.0, total + 1.0
    for _ in range(60):
        level = (low + high) / 2
        held = count * sum(min(max(each, level), max(full, level)) for each in dearest)
        low, high = (level, high) if held < total else (low, level)
    return [max(each, high, 1e-9) for each in dearest]


def _level(each: _Pass) -> float:
    return each.level


def _without(members: tuple[int, ...], member: int) -> tuple[int, ...]:
    return tuple(each for each in members if each != member)
