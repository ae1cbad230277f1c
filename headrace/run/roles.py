"""The parts that do a run's work. `launch` makes them; the loops do not know which process each is in."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping

    from headrace.engine import Engine
    from headrace.envs import Environment, PromptEncoder
    from headrace.records import Batch
    from headrace.score import Scorer
    from headrace.tasks import TaskStream
    from headrace.trainer import PolicyTrainer

POLICY = "policy"
"""The policy's name in a run with a single policy."""


async def _nothing() -> None:
    """A run in one process has nothing to refresh."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Engine, trainers, and the parts the launcher runs itself."""

    engine: Engine
    trainers: Mapping[str, PolicyTrainer]
    """By policy name."""
    scorer: Scorer
    environment: Environment
    encoder: PromptEncoder
    tasks: TaskStream
    canary: Batch
    """A fixed prompt that trainer and engine both score at every version."""
    stop_ids: tuple[int, ...]
    """Tokens that end a turn: from the tokenizer, the model's generation config and `sampling.stop`."""
    services: tuple[Callable[[], Coroutine[None, None, None]], ...]
    """Coroutines that run beside the loops: an inline engine's loop, or supervision of other processes."""
    describe: Callable[[], str] = str
    """What each process is doing and where its log is, for an error."""
    versions: Callable[[], Mapping[str, int]] = dict
    """The version each engine holds, if there are several."""
    engine_peak: Callable[[], int] = int
    """Peak memory of the engine in bytes; of several, the largest."""
    refresh: Callable[[], Awaitable[None]] = _nothing
    """Makes every process report how it has spent its time so far."""

    def with_stop_ids(self, ids: Iterable[int]) -> Roles:
        """A copy in which these tokens end a turn too."""
        return dataclasses.replace(self, stop_ids=tuple({*ids, *self.stop_ids}))

    @property
    def trainer(self) -> PolicyTrainer:
        (trainer,) = self.trainers.values()
        return trainer
