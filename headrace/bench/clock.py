"""Clocks around the moves of a run: which part of the controller's time is whose."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator

    from headrace.envs import Client, Environment
    from headrace.records import Episode, Plain
    from headrace.run import Session

PARTS = {
    "submit": "tasks, groups and the books",
    "prompt": "client, sampling and prompt tokens",
    "episode": "the environment's own steps",
    "score": "decoding, reward and outcome",
    "collect": "groups and the buffer",
    "batch": "staleness, advantages, weights, settling",
    "measure": "metrics of a version",
}


class Clock:
    """Seconds of this thread in each part; a part inside another is not counted twice, and the clock's own time not at all."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._inside = 0.0
        ticks = [time.thread_time() for _ in range(2001)]
        self._tick = (ticks[-1] - ticks[0]) / 2000

    def time_moves(self, session: Session) -> None:
        """Put a clock around the moves the loops make; none of them gives way while it runs."""
        moves: Any = session.run
        policy: Any = session.policy
        scorer: Any = session.roles.scorer
        moves.submit = self.timed("submit", moves.submit)
        moves.collect = self.timed("collect", moves.collect)
        scorer.score = self.timed_async("score", scorer.score)
        policy.reject_stale = self.timed("batch", policy.reject_stale)
        policy.start_batch = self.timed_async("batch", policy.start_batch)
        moves.settle_trained = self.timed("batch", moves.settle_trained)
        moves.after_version = self.timed_async("measure", moves.after_version)
        moves.roles = dataclasses.replace(moves.roles, environment=TimedEnvironment(moves.roles.environment, self))
        make_client = self.timed("prompt", moves.client)

        def client(record: object) -> Any:  # noqa: ANN401
            made = make_client(record)
            made.prompt = self.timed("prompt", made.prompt)
            return made

        moves.client = client

    def timed(self, name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time on this clock."""

        def timed(*arguments: object, **keywords: object) -> Any:  # noqa: ANN401
            outside, self._inside = self._inside, 0.0
            started = time.thread_time()
            try:
                return move(*arguments, **keywords)
            finally:
                spent = time.thread_time() - started
                self.seconds[name] += spent - self._inside - self._tick
                self._inside = outside + spent + self._tick

        return timed

    def timed_async(self, name: str, move: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
        """The same for a coroutine function: its steps are timed, not its waits."""
        return lambda *arguments, **keywords: _Steps(move(*arguments, **keywords), self, name)


class TimedEnvironment:
    """An environment whose steps are timed."""

    def __init__(self, environment: Environment, clock: Clock) -> None:
        self._run = clock.timed_async("episode", environment.run)

    async def run(self, task: dict[str, Plain], client: Client) -> Episode:
        episode: Episode = await self._run(task, client)
        return episode


class _Steps:
    """A coroutine driven one step at a time, with a clock around each; for runs that are not cancelled."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], clock: Clock, name: str) -> None:
        self._coroutine = coroutine
        self._step = clock.timed(name, self._send)

    def _send(self) -> tuple[bool, Any]:
        try:
            return False, self._coroutine.send(None)
        except StopIteration as end:
            return True, end.value

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            is_over, value = self._step()
            if is_over:
                return value
            yield value
