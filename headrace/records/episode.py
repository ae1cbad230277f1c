"""One attempt at one task."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.records.sampling import Outcome, Scored, check_outcome
from headrace.records.validate import Plain, check_kind, check_plain, unchecked_copy

if TYPE_CHECKING:
    from headrace.records.rollout import Rollout


UNSHAPED = "unshaped"
"""The name among a rollout's rewards of what the reward was before shaping; only rollouts that were shaped have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt at one task: the unit that buffers, staleness and advantages work on."""

    id: str
    group: str
    task: dict[str, Plain]
    """A row of the task source."""
    rollouts: tuple[Rollout, ...] = ()
    """Usually one; several when agents interact or a history forks."""
    environment: str = "single_turn"
    started: float = 0.0
    finished: float = 0.0
    attempts: int = 1
    """Times it was started, retries included."""
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        check_kind(self.task, dict, f"episode {self.id!r}: task")
        check_plain(self.task, where=f"episode {self.id!r}: task")
        self._check_members()

    def replace(self, **changes: Any) -> Episode:  # noqa: ANN401
        """A copy with some fields changed; the task is not checked again unless it is one of them."""
        if "task" in changes:
            return dataclasses.replace(self, **changes)
        copy = unchecked_copy(self, changes)
        copy._check_members()
        return copy

    def _check_members(self) -> None:
        object.__setattr__(self, "rollouts", tuple(self.rollouts))
        check_outcome(self.outcome)
        for rollout in self.rollouts:
            if rollout.group != self.group:
                raise ValueError(f"episode {self.id!r} of group {self.group!r} holds a rollout of {rollout.group!r}")

    @property
    def oldest_version(self) -> int:
        """The oldest version in any of its rollouts; -1 if nothing was sampled."""
        versions = [rollout.oldest_version for rollout in self.rollouts if rollout.num_sampled]
        return min(versions, default=-1)

    @property
    def reward(self) -> float | None:
        return self.outcome.reward if isinstance(self.outcome, Scored) else None

    @property
    def unshaped_reward(self) -> float | None:
        """The reward before a punishment for length: how right the answer is. Filters, samplers and success go by it."""
        return self.rollouts[-1].rewards.get(UNSHAPED, self.reward) if self.rollouts else self.reward
