"""What only the holder of the control token may do: pause, resume, read the state, score."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from headrace.engine.server.body import bad, check_token_ids
from headrace.engine.server.requests import MAX_CHOICES
from headrace.partial import Interrupt
from headrace.records import Rollout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.engine.protocol import Engine
    from headrace.engine.server.body import Body
    from headrace.engine.server.text import ServedModel


class Control:
    """Each method takes a request's body and returns the answer's."""

    def __init__(self, engine: Engine, served: ServedModel) -> None:
        self._engine, self._served = engine, served
        self._is_paused = False
        self.posts: dict[str, Callable[[Body], Awaitable[dict[str, Any]]]] = {
            "/control/pause": self.pause,
            "/control/resume": self.resume,
            "/control/score": self.score,
        }

    async def state(self, body: Body) -> dict[str, Any]:
        body.end()
        return {**dataclasses.asdict(await self._engine.state()), "paused": self._is_paused}

    async def pause(self, body: Body) -> dict[str, Any]:
        """Stop decoding; with `drain`, answers once rollouts in flight have finished."""
        interrupt = Interrupt(body.one_of("interrupt", "keep", [choice.value for choice in Interrupt]))
        body.end()
        await self._engine.pause(interrupt)
        self._is_paused = True
        return await self.state(body)

    async def resume(self, body: Body) -> dict[str, Any]:
        body.end()
        await self._engine.resume()
        self._is_paused = False
        return await self.state(body)

    async def score(self, body: Body) -> dict[str, Any]:
        """The logprob of each token given those before it, at temperature 1; null for the first."""
        given = body.take("token_ids")
        body.end()
        if not isinstance(given, list) or not given:
            raise bad("token_ids", "must be a list of token ids or a list of such lists, and not empty")
        lists = given if isinstance(given[0], list) else [given]
        if len(lists) > MAX_CHOICES:
            raise bad("token_ids", f"{len(lists)} sequences are more than {MAX_CHOICES} in one request")
        rollouts = []
        for index, ids in enumerate(lists):
            checked = check_token_ids(ids, "token_ids", vocabulary=self._served.vocabulary)
            if not 0 < len(checked) <= self._served.context:
                raise bad("token_ids", f"a sequence of {len(checked)} tokens; it must have 1 to {self._served.context}")
            rollouts.append(Rollout.from_prompt(list(checked), id=f"score-{index}"))
        before = (await self._engine.state()).version
        scores = await self._engine.score(rollouts)
        after = (await self._engine.state()).version
        logprobs = [[None, *values[1:].tolist()] for values in scores]
        return {"version": before if before == after else None, "logprobs": logprobs}
