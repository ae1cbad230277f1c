"""Whether a run would do better with an engine more or less, from how trainer and engines have spent their time."""

from __future__ import annotations

import time
from collections.abc import Mapping  # noqa: TC003  (a NamedTuple's field)
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from headrace.observe import MirroredTimeline

_SECONDS, _VERSIONS = 10.0, 3
"""How long to measure at least: trainer and engines may take turns within a version."""
_WAITS = 0.1
"""A role that waits for more than this share of its time is not what the run is bound by."""
_FULL = 0.5
"""With fewer of its slots in use an engine more would only spread the same calls."""


class Measured(NamedTuple):
    """What the timelines had added up at a moment."""

    time: float
    version: int
    engine: Mapping[str, float]
    trainer: Mapping[str, float]
    slots: tuple[int, int]
    """Slots in use, and slots, summed over decode steps."""

    @classmethod
    def now(cls, timelines: Mapping[str, MirroredTimeline], *, version: int) -> Measured:
        engine, trainer = timelines["engine"], timelines["trainer"]
        totals = dict(engine.totals), dict(trainer.totals)
        return cls(time.monotonic(), version, *totals, (engine.occupied, engine.slots))

    def continues(self, before: Measured) -> bool:
        """Whether both are of one life of the trainer, whose timeline begins anew with each."""
        return 0 < sum(before.trainer.values()) <= sum(self.trainer.values()) and before.version <= self.version

    def is_enough_since(self, before: Measured) -> bool:
        """A trainer that is lost adds nothing: engines then wait for its weights, whatever the run is bound by."""
        seconds, trainer = self.time - before.time, sum(self.trainer.values()) - sum(before.trainer.values())
        return seconds >= _SECONDS and self.version - before.version >= _VERSIONS and trainer >= seconds / 2


def wanted_change(before: Measured, now: Measured, *, num_engines: int) -> int:
    """1 if the trainer waits for batches while engines are busy and their slots are used. -1 if the trainer does not wait, and
    the others could do the work of one of the engines as well. Else 0."""
    trainer_waits = _share("wait-batch", before.trainer, now.trainer)
    engines_idle = _share("wait-gate", before.engine, now.engine)
    used, slots = (after - first for first, after in zip(before.slots, now.slots, strict=True))
    if trainer_waits > _WAITS:
        return int(engines_idle < _WAITS and used >= _FULL * max(slots, 1))
    return -int((1 - engines_idle) * num_engines <= (1 - _WAITS) * (num_engines - 1))


def _share(state: str, before: Mapping[str, float], now: Mapping[str, float]) -> float:
    passed = {name: max(0.0, seconds - before.get(name, 0.0)) for name, seconds in now.items()}
    return passed[state] / max(sum(passed.values()), 1e-9)
