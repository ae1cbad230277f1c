"""What passes between the loops: episodes to run, groups under way, episodes that have ended, versions begun."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine import UnusablePrompt
from headrace.observe import Signal
from headrace.records import Episode, InfraAbort, Invalid, Scored
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from headrace.buffer import Group
    from headrace.envs import EngineClient, Environment
    from headrace.observe import Timeline
    from headrace.records import Batch, Outcome, Plain
    from headrace.run.publishing import Published


@dataclass(frozen=True)
class Work:
    """One episode to run."""

    task: dict[str, Plain]
    group: str
    number: int
    index: int
    attempt: int = 1

    @property
    def episode(self) -> str:
        return f"{self.group}/{self.index}"


@dataclass
class PendingGroup:
    """A group some of whose episodes are still in flight."""

    number: int
    task: dict[str, Plain]
    episodes: list[Episode] = field(default_factory=list)
    """Those with an outcome."""

    @property
    def oldest(self) -> int | None:
        """The oldest version of what would be trained of it as it is; None if nothing would."""
        scored = (episode for episode in self.episodes if isinstance(episode.outcome, Scored))
        return min((r.oldest_version for episode in scored for r in episode.rollouts if r.num_sampled), default=None)


class FinishedEpisodes:
    """What `generate` leaves for `score`: taken all at once."""

    def __init__(self) -> None:
        self._episodes: list[Episode] = []
        self._arrived = Signal()

    def put(self, episode: Episode) -> None:
        self._episodes.append(episode)
        self._arrived.set()

    async def take(self, timeline: Timeline) -> list[Episode]:
        await timeline.wait("wait", self._arrived)
        self._arrived.clear()
        taken, self._episodes = self._episodes, []
        return taken


@dataclass(eq=False)
class Begun:
    """A version whose groups have left the buffer, and which the trainer is asked for."""

    version: int
    """It is trained from; training makes the next."""
    groups: list[Group]
    steps_before: int
    """Optimizer steps begun before these."""
    batches: list[Batch] = field(default_factory=list)
    steps: list[Awaitable[dict[str, float]]] = field(default_factory=list)
    """What the trainer will have seen in each optimizer step; none until it is asked for them."""
    publishing: Awaitable[Published] | None = None
    """The version it makes, where that could be asked for at once."""


async def run_episode(environment: Environment, task: dict[str, Plain], client: EngineClient) -> Episode:
    """Run one; whatever the environment raises fails the episode, not the run."""
    try:
        return await environment.run(task, client)
    except ConfigError:
        raise
    except UnusablePrompt as error:
        outcome: Outcome = Invalid(str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the environment is the user's)
        outcome = InfraAbort(f"the environment raised {type(error).__name__}: {error}")
    return Episode(id=client.episode, group=client.group, task=task, outcome=outcome)
