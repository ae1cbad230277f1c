"""Who does the work of a run. `launch` makes the roles; the loops do not know which process each is in."""

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
"""The name of the policy in a run that has one."""


async def _nothing() -> None:
    """There is nothing to refresh in a run of one process."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Engine, trainers, and what the launcher does itself."""

    engine: Engine
    trainers: Mapping[str, PolicyTrainer]
    """By the name of the policy each trains."""
    scorer: Scorer
    environment: Environment
    encoder: PromptEncoder
    tasks: TaskStream
    canary: Batch
    """A fixed prompt, scored by trainer and engine at every version."""
    stop_ids: tuple[int, ...]
    """Tokens that end a turn: the tokenizer's, those of the model's generation settings, and those `sampling.stop` names."""
    services: tuple[Callable[[], Coroutine[None, None, None]], ...]
    """What must run beside the loops: an inline engine's own loop, or the watch over other processes."""
    describe: Callable[[], str] = str
    """What each process is doing and where its log is, for an error."""
    versions: Callable[[], Mapping[str, int]] = dict
    """The version that each engine holds, if there are several."""
    engine_peak: Callable[[], int] = int
    """The most bytes of memory an engine has used; of several, the largest."""
    refresh: Callable[[], Awaitable[None]] = _nothing
    """Has every process report how it has spent its time until now."""

    def with_stop_ids(self, ids: Iterable[int]) -> Roles:
        """The same roles; these tokens end a turn too."""
        return dataclasses.replace(self, stop_ids=tuple({*ids, *self.stop_ids}))

    @property
    def trainer(self) -> PolicyTrainer:
        """Of a run with one policy."""
        (trainer,) = self.trainers.values()
        return trainer
