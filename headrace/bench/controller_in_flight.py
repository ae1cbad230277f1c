"""What the launcher keeps of calls in flight, for `headrace bench controller`: a pool with engines that report every second.

Each case runs in a new process, whose resident memory is then that of the calls. The engines are stand-ins in the same process;
their messages are encoded and decoded like those of real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.child import Child
from headrace.bench.loads import finished
from headrace.bench.measure import held_bytes
from headrace.engine import EnginePool, RemoteEngine, Request, SampledSince, pack_sampled
from headrace.records import Rollout, Sampling, decode, encode, unpack_rollouts, unpack_samplings
from headrace.run import fewer_gc_pauses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

_ENGINES = 16
_REPORTS = 40
_TIMEOUT = 900.0


def many_calls(*, calls: int, tokens: int) -> dict[str, float]:
    """All of them grown to `tokens`: what asking for them takes, and the memory they hold."""
    return dict(_in_child("many", calls=calls, tokens=tokens))


def hour(*, calls: int, mean: int, rate: int, seconds: int) -> list[list[float]]:
    """A simulated hour, or as many `seconds`, with this many calls at any time, of `mean` tokens and half as many more or less,
    `rate` a second each: [second, tokens in flight, bytes] at 60 moments."""
    return list(_in_child("hour", calls=calls, mean=mean, rate=rate, seconds=seconds))


def _in_child(case: str, **settings: int) -> Any:  # noqa: ANN401
    with tempfile.TemporaryDirectory() as folder:
        function = f"{__name__}:child"
        with Child(f"in flight, {case}", function, {"case": case, "settings": settings}, log=Path(folder) / "log") as child:
            return child.hear(seconds=_TIMEOUT)


def child(asked: dict[str, Any], _: Iterator[Any]) -> Iterator[Any]:
    cases: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {"many": _many, "hour": _hour}
    with fewer_gc_pauses():
        yield asyncio.run(cases[asked["case"]](**asked["settings"]))


class ReportingEngine:
    """An engine process's end of its data stream: samples `rate` tokens a second for every call it has."""

    def __init__(self, name: str, pool: EnginePool, *, slots: int) -> None:
        self.remote = RemoteEngine(name, pool, control=self, on_report=lambda *_: None)  # type: ignore[arg-type]
        self.remote.data = self  # type: ignore[assignment]
        self.stream = SimpleNamespace(backlog=0)
        self.notices = self.remote.notices()
        self._calls: dict[int, tuple[Rollout, Sampling]] = {}
        self._sampled: dict[int, int] = {}
        self._tell("pull", slots)

    def notify(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Called by the pool with new work, and at the end with what is cancelled."""
        if name != "work":
            return
        work = decode(encode(value))
        asked = zip(unpack_rollouts(work["rollouts"]), unpack_samplings(work["samplings"]), strict=True)
        self._calls.update(zip(work["keys"].tolist(), asked, strict=True))
        self._sampled.update(dict.fromkeys(work["keys"].tolist(), 0))

    def _tell(self, name: str, value: object) -> None:
        self.notices[name](decode(encode(value)))

    def report(self, rate: int, *, version: int) -> None:
        """A second later: what was sampled, then the calls that have ended; nothing if there are no calls."""
        if not self._calls:
            return
        counts = [min(rate, sampling.max_tokens - self._sampled[key]) for key, (_, sampling) in self._calls.items()]
        requests = [Request(*call, print, key=key) for key, call in self._calls.items()]
        sampled = [
            SampledSince(request, np.full(count, 7), np.full(count, -1), np.full(count, version), (), "bench")
            for request, count in zip(requests, counts, strict=True)
        ]
        self._tell("sampled", pack_sampled(sampled, policy="policy"))
        for key, count in zip(self._calls, counts, strict=True):
            self._sampled[key] += count
        ended = [key for key, (_, sampling) in self._calls.items() if self._sampled[key] == sampling.max_tokens]
        if ended:
            calls = [(Request(*self._calls.pop(key), print, key=key), self._sampled.pop(key)) for key in ended]
            done = [(call, finished(call.rollout, np.full(count, 7), lineage="bench"), count) for call, count in calls]
            rests = [SampledSince.rest(call, rollout, num_before=count) for call, rollout, count in done]
            self._tell("sampled", pack_sampled(rests, policy="policy"))
            self._tell("pull", len(ended))


@contextlib.asynccontextmanager
async def _running(calls: int, lengths: Callable[[], int]) -> AsyncIterator[tuple[EnginePool, list[ReportingEngine]]]:
    """A pool with this many calls in flight at any time: whoever gets an answer asks again."""
    pool = EnginePool()
    engines = [ReportingEngine(f"engine-{number}", pool, slots=-(-calls // _ENGINES)) for number in range(_ENGINES)]
    for engine in engines:
        await pool.join(engine.remote)

    async def ask(number: int) -> None:
        prompt = Rollout.from_prompt(np.arange(10), id=f"g{number // 8}/{number % 8}")
        while True:
            await pool.generate(prompt, Sampling(max_tokens=lengths()))

    asking = [asyncio.ensure_future(ask(number)) for number in range(calls)]
    await _settle()
    try:
        yield pool, engines
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _settle() -> None:
    """Let answers arrive, and what is asked next reach the engines."""
    for _ in range(4):
        await asyncio.sleep(0)


async def _many(calls: int, tokens: int) -> dict[str, float]:
    rate = tokens // _REPORTS
    async with _running(calls, lambda: tokens + 1) as (pool, engines):
        before, started = held_bytes("cpu"), time.thread_time()
        for second in range(_REPORTS):
            for engine in engines:
                engine.report(rate, version=second // 10)
        spent, total = time.thread_time() - started, 0
        seconds = []
        for _ in range(7):
            started = time.thread_time()
            found = await pool.in_flight()
            seconds.append(time.thread_time() - started)
            total = sum(call.num_sampled for call in found)
            del found
        assert total == calls * rate * _REPORTS
        return {
            "milliseconds": 1e3 * statistics.median(seconds),
            "bytes_per_token": (held_bytes("cpu") - before) / total,
            "report": 1e6 * spent / (_REPORTS * calls),
        }


async def _hour(calls: int, mean: int, rate: int, seconds: int) -> list[list[float]]:
    random, moments = np.random.default_rng(0), []
    before = held_bytes("cpu")
    starting = iter(range(calls))

    def length() -> int:
        """The first calls are what is left of calls, so that later ones do not end in waves."""
        whole = int(random.integers(mean // 2, 3 * mean // 2))
        return whole if next(starting, None) is None else int(random.integers(1, whole))

    async with _running(calls, length) as (pool, engines):
        for second in range(1, seconds + 1):
            for engine in engines:
                engine.report(rate, version=second // 60)
            await _settle()
            if second % (seconds // 60) == 0:
                total = sum(call.num_sampled for call in await pool.in_flight())
                moments.append([float(second), float(total), float(held_bytes("cpu") - before)])
    return moments
