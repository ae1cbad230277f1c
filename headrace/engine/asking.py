"""`generate` and `stream` of an engine in this event loop, by what it does with a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from headrace.engine.protocol import Increment
from headrace.engine.request import Request
from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from headrace.records import Rollout, Sampling


class Asked(Protocol):
    """Takes requests and calls them back."""

    def begin(self, request: Request) -> None:
        """Queue it; raises where it cannot be generated."""

    def withdraw(self, request: Request) -> None:
        """Give its slot back, if it has one still."""


async def generate(engine: Asked, rollout: Rollout, sampling: Sampling) -> Rollout:
    """The rollout with one more call's tokens; cancelled, it is withdrawn."""
    done: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
    request = Request(
        rollout,
        sampling,
        on_done=lambda result: None if done.done() else done.set_result(result),
        on_failed=lambda error: None if done.done() else done.set_exception(error),
    )
    engine.begin(request)
    try:
        return await done
    finally:
        if not done.done() or done.cancelled():
            engine.withdraw(request)


async def stream(engine: Asked, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
    """The same call, as it grows; closed before its end, it is withdrawn."""
    queue: asyncio.Queue[Increment | Exception] = asyncio.Queue()

    def on_done(result: Rollout) -> None:
        if result.finish_reason is FinishReason.ABORT:
            queue.put_nowait(Increment((), (), (), FinishReason.ABORT))

    request = Request(rollout, sampling, on_done=on_done, on_tokens=queue.put_nowait, on_failed=queue.put_nowait)
    engine.begin(request)
    try:
        while True:
            increment = await queue.get()
            if isinstance(increment, Exception):
                raise increment
            yield increment
            if increment.finish_reason is not None:
                return
    finally:
        engine.withdraw(request)


async def to_its_end(work: Coroutine[Any, Any, None], *, give_up: Callable[[], None]) -> None:
    """Wait for what a thread does; cancelled, tell it, and wait all the same."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        give_up()
        await asyncio.wait([task])
        raise
