"""An engine process's end of its two streams to the launcher.

The engine decodes in its own thread, this event loop talks. Rollouts come and go in batches on the data stream, never more than
were pulled; control calls have their own stream and never queue behind them. Of a rollout's later turns only what is new
travels, both ways: each end has the rest, and this one asks for it if it has not. Calls that have grown by `LEAST_GROWTH` are
reported once a second, all calls every ten seconds, and streamed ones after every step: so of a call at most a ninth and a
second's work are lost with this process, never over ten seconds'.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import zlib
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.engine.protocol import EngineDied
from headrace.engine.request import LEAST_GROWTH, TELL_ALL, Request, SampledSince, checksum, pack_sampled
from headrace.partial import Interrupt
from headrace.records import Rollout, portions, unpack_rollouts, unpack_samplings
from headrace.rpc import StreamClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from headrace.engine.protocol import ProcessEngine
    from headrace.observe import ProcessTimeline
    from headrace.records import Array, WeightUpdate
    from headrace.rpc import Peer

TELL_SECONDS = 1.0  # at least, between two reports of the tokens sampled so far
REPORT_SECONDS = 0.25  # between two reports of where time goes
_MOST_HELD = 64 << 20  # bytes of ended rollouts that are held for their next turns


class EngineWorker:
    """Connects an engine to the two streams."""

    def __init__(self, engine: ProcessEngine, *, timeline: ProcessTimeline) -> None:
        self._engine, self._timeline = engine, timeline
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Fails with what keeps it from reporting."""
        self._data: Peer | None = None
        self._requests: dict[int, Request] = {}
        self._streamed: set[Request] = set()
        self._told: dict[Request, tuple[int, int]] = {}  # tokens reported of each, and their checksum
        self._held: OrderedDict[str, Rollout] = OrderedDict()  # those that ended here last, by id
        self._num_held = 0  # bytes
        self._news: deque[tuple[Request, SampledSince | Rollout | Exception]] = deque()  # to report; from the engine's thread
        self._tasks: set[asyncio.Task[None]] = set()  # that give requests back
        self._told_at = self._reported_at = time.monotonic()
        self._num_tells = 0
        engine.after_step = self._after_step

    # The data stream

    def attach(self, data: Peer) -> None:
        """Start to pull work: twice the slots, so that freed slots are refilled in the next step, however slow the launcher
        is."""
        self._data = data
        data.notify("pull", 2 * self._engine.num_slots)

    def notices(self) -> dict[str, Callable[[Any], None]]:
        """Handlers of the data stream's messages: rollouts to generate, which to cancel, which will not continue, and how many
        to give back."""
        return {
            "work": self._take_work,
            "cancel": self._take_cancel,
            "release": self._take_release,
            "give_back": lambda count: self._spawn(self._give_back(count)),
            "recall": lambda _: self._spawn(self._recall()),
        }

    def _take_work(self, value: Any) -> None:  # noqa: ANN401
        rollouts, samplings = unpack_rollouts(value["rollouts"]), unpack_samplings(value["samplings"])
        requests, streamed, missing = [], set(value["streamed"]), []
        for key, part, sampling, held in zip(value["keys"].tolist(), rollouts, samplings, value["held"], strict=True):
            rollout = part if held is None else self._complete(part, *held)
            if rollout is None:
                missing.append(key)
                continue
            request = Request(rollout, sampling, on_done=lambda _: None, is_streamed=key in streamed, key=key)
            request.on_done = request.on_failed = partial(self._on_end, request)
            self._requests[key] = request
            requests.append(request)
        self._streamed.update(request for request in requests if request.is_streamed)
        self._engine.submit(requests, self._on_end)
        if missing and self._data is not None:
            self._data.notify("missing", missing)

    def _complete(self, part: Rollout, start: int, check: int) -> Rollout | None:
        """The rollout that this is the rest of, if it is held as the launcher has it."""
        held = self._held.get(part.id)
        is_same = held is not None and len(held) == start and checksum(held, start) == check
        return held.joined(part) if held is not None and is_same else None

    def _hold(self, rollout: Rollout) -> None:
        before = self._held.pop(rollout.id, None)
        self._held[rollout.id] = rollout
        self._num_held += rollout.num_bytes - (before.num_bytes if before is not None else 0)
        while self._num_held > _MOST_HELD:
            self._num_held -= self._held.popitem(last=False)[1].num_bytes

    def _take_cancel(self, keys: list[int]) -> None:
        requests = [self._requests[key] for key in keys if key in self._requests]
        for request in requests:
            self._forget(request)
        if self._data is not None and requests:
            self._engine.cancel(requests)
            self._data.notify("pull", len(requests))

    def _take_release(self, ids: list[str]) -> None:
        for rollout in (self._held.pop(each, None) for each in ids):
            self._num_held -= 0 if rollout is None else rollout.num_bytes
        self._engine.release(ids)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        def on_end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, StreamClosed | EngineDied) and not self.failed.done():
                self.failed.set_exception(error)

        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(on_end)

    async def _give_back(self, count: int) -> None:
        """Return up to so many rollouts that have not started, for another engine."""
        requests = [request for request in await self._engine.take_back(count) if request.key in self._requests]
        for request in requests:
            self._forget(request)
        if self._data is not None and requests:
            self._data.notify("returned", [request.key for request in requests])
            self._data.notify("pull", len(requests))

    async def _recall(self) -> None:
        """Return everything: what has started ends where it is, with `ABORT`."""
        await self._engine.pause(Interrupt.ABORT)
        self._flush()
        await self._give_back(len(self._requests) or 1)
        await self._engine.resume()
        if self._data is not None:
            self._data.notify("recalled", None)

    def _on_end(self, request: Request, result: Rollout | Exception) -> None:
        if isinstance(result, EngineDied):  # the pool continues the call elsewhere, from the tokens reported
            self._news.extend((each.request, each) for each in self._engine.growth())
        else:
            self._news.append((request, result))
        if isinstance(result, Exception):
            self._loop.call_soon_threadsafe(self._flush)

    def _after_step(self) -> None:
        """In the engine's thread: collect what there is to report, and wake the event loop if there is anything."""
        grown = self._engine.growth(self._streamed) if self._streamed else []
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at, self._num_tells = time.monotonic(), self._num_tells + 1
            grown += self._engine.growth(least=LEAST_GROWTH if self._num_tells % TELL_ALL else 0.0)
        self._news.extend((each.request, each) for each in grown)
        if self._news:
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        """Report the news. If they cannot be sent, `failed` ends this process: the launcher has not been told that the requests
        ended, so it continues them elsewhere."""
        try:
            if self._data is not None and self._news:
                self._tell_news(self._data)
        except StreamClosed:
            pass  # the launcher is gone, or has given this process up
        except Exception as error:  # noqa: BLE001  (in the event loop's hands it would only be logged)
            if not self.failed.done():
                self.failed.set_exception(error)

    def _tell_news(self, data: Peer) -> None:
        news = [self._news.popleft() for _ in range(len(self._news))]  # the engine's thread may append at the same time
        news = [(request, each) for request, each in news if request.key in self._requests]  # not cancelled
        sampled = [each for _, each in news if isinstance(each, SampledSince)]
        if sampled:
            data.notify("sampled", pack_sampled(sampled, policy=self._engine.policy))
            for each in sampled:
                count, check = self._told.get(each.request, (0, 0))
                self._told[each.request] = count + len(each.token_ids), zlib.crc32(each.rows.data, check)
        finished = {request: each for request, each in news if isinstance(each, Rollout)}
        rests = [self._rest(request, rollout) for request, rollout in finished.items()]
        for span in portions([each.num_bytes for each in rests]):
            data.notify("sampled", pack_sampled(rests[span], policy=self._engine.policy))
        for request, rollout in finished.items():
            self._forget(request)
            if rollout.expert_routing is None:  # else it is sent whole again
                self._hold(rollout)
        refused = {request: each for request, each in news if isinstance(each, Exception)}
        if refused:
            told = [[request.key, type(error).__name__, str(error)] for request, error in refused.items()]
            data.notify("refused", told)
            for request in refused:
                self._forget(request)
        if finished or refused:
            data.notify("pull", len(finished) + len(refused))
        if time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._reported_at = time.monotonic()
            data.notify("report", self._timeline.report())

    def _rest(self, request: Request, rollout: Rollout) -> SampledSince:
        """What was not reported of an ended call; all of it, should what was reported differ from how it ended."""
        whole, (count, check) = SampledSince.rest(request, rollout, num_before=0), self._told.get(request, (0, 0))
        is_same = count and zlib.crc32(whole.rows[:count].data) == check
        return SampledSince.rest(request, rollout, num_before=count) if is_same else whole

    def _forget(self, request: Request) -> None:
        del self._requests[request.key]
        self._told.pop(request, None)
        self._streamed.discard(request)

    # The control stream

    def calls(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        return {
            "pause": self._pause,
            "resume": self._engine.resume,
            "sleep": self._engine.sleep,
            "wake": self._engine.wake,
            "load": self._load,
            "score": self._score,
            "state": self.state,
        }

    async def state(self) -> dict[str, Any]:
        return dataclasses.asdict(await self._engine.state())

    async def _pause(self, interrupt: str) -> None:
        await self._engine.pause(Interrupt(interrupt))

    async def _load(self, update: WeightUpdate, interrupt: str) -> None:
        await self._engine.load(update, interrupt=Interrupt(interrupt))

    async def _score(self, rollouts: Any) -> list[Array]:  # noqa: ANN401
        return await self._engine.score(unpack_rollouts(rollouts))
