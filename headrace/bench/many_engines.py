"""A thousand emulated engines in a process of their own, at the far end of real streams, for `headrace bench controller`.

Each pulls as a real one does and holds what it gets. Once so many calls are in flight over all of them, engine after engine
ends `BURST` of its calls; most tokens of long ones are reported before, as a worker does it that looks at its calls every
`REPORT` tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.loads import finished
from headrace.engine import LEAST_GROWTH, TELL_ALL, EngineState, Request, SampledSince, pack_sampled
from headrace.records import Rollout, Sampling, WeightUpdate, unpack_rollouts
from headrace.rpc import Peer, StreamClosed, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

BURST = 8
"""Calls of one engine that end together."""
REPORT = 256
"""Tokens of a call in the second between two reports."""
TOKEN = "bench"
_SAMPLING = Sampling()
_ENDS_LATE = 0.9
"""Of a call's tokens, those reported before it ends."""


def lengths(num: int, *, median: int, most: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Lognormal, with σ = 1; all the same if `median` is `most`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, num) if median < most else np.full(num, most)
    return np.clip(drawn, 1, most).astype(np.int64)


class _Engine:
    def __init__(self, name: str, crowd: _Crowd) -> None:
        self.name, self._crowd = name, crowd
        self.calls: deque[tuple[int, Rollout]] = deque()
        self.version, self.lineage, self.num_sampled, self.num_taken = 0, "", 0, 0

    async def connect(self, address: str, slots: int) -> None:
        async def load(update: WeightUpdate, interrupt: str) -> None:
            self.version, self.lineage = update.version, update.lineage

        async def score(rollouts: Any) -> list[Any]:  # noqa: ANN401
            return [np.zeros(len(each), np.float32) for each in unpack_rollouts(rollouts)]

        async def state() -> dict[str, Any]:
            return asdict(EngineState(self.version, self.lineage, len(self.calls), 0, slots, 1, self.num_sampled))

        async def nothing(**_: object) -> None: ...

        how: dict[str, Any] = {"token": TOKEN, "name": self.name}
        calls: dict[str, Any] = {"load": load, "score": score, "pause": nothing, "resume": nothing, "state": state}
        control = Peer(await connect(address, channel="control", **how), calls=calls)
        self._data = Peer(
            await connect(address, channel="data", **how), notices={"work": self._take, "release": lambda _: None}
        )
        for peer in (control, self._data):
            self._crowd.tasks.append(asyncio.ensure_future(peer.run()))
        self._data.notify("pull", 2 * slots)

    @property
    def bytes_sent(self) -> int:
        return self._data.stream.bytes_sent

    def _take(self, value: Any) -> None:  # noqa: ANN401
        self.calls.extend(zip(value["keys"].tolist(), unpack_rollouts(value["rollouts"]), strict=True))
        self.num_taken += len(value["keys"])
        self._crowd.num_held += len(value["keys"])
        self._crowd.has_work.set()

    async def answer(self) -> int:
        """End some of its calls; returns how many."""
        ending = [self.calls.popleft() for _ in range(min(BURST, len(self.calls)))]
        rollouts = [self._complete(prompt) for _, prompt in ending]
        requests = [Request(prompt, _SAMPLING, print, key=key) for key, prompt in ending]
        told, most = [0] * len(ending), [int(_ENDS_LATE * each.num_sampled) for each in rollouts]
        for now in range(REPORT, max(most, default=0) + 1, REPORT):
            least = LEAST_GROWTH if now % (TELL_ALL * REPORT) else 0.0
            grown = [at for at, end in enumerate(most) if now <= end and now - told[at] > least * told[at]]
            if grown:
                self._tell([_part(requests[at], rollouts[at], told[at], now) for at in grown])
            for at in grown:
                told[at] = now
        self._tell([SampledSince.rest(*each[:2], num_before=each[2]) for each in zip(requests, rollouts, told, strict=True)])
        self._data.notify("pull", len(ending))
        await self._data.stream.drain()
        return len(ending)

    def _complete(self, prompt: Rollout) -> Rollout:
        length = self._crowd.next_length()
        self.num_sampled += length
        return finished(prompt, self._crowd.tokens[:length], version=self.version, lineage=self.lineage)

    def _tell(self, sampled: list[SampledSince]) -> None:
        self._data.notify("sampled", pack_sampled(sampled, policy="policy"))


def _part(request: Request, rollout: Rollout, start: int, stop: int) -> SampledSince:
    rest, num = SampledSince.rest(request, rollout, num_before=start), stop - start
    return rest._replace(**{name: getattr(rest, name)[:num] for name in ("token_ids", "logprobs", "versions")}, end=None)


class _Crowd:
    def __init__(self, *, total: int, in_flight: int, median: int, most: int) -> None:
        self._total, self._in_flight = total, in_flight
        self._lengths = iter(lengths(total, median=median, most=most).tolist())
        self.tokens = np.arange(most, dtype=np.int32) % 90 + 6
        self.tasks: list[asyncio.Future[None]] = []
        self.num_held = self.most_held = 0
        self.has_work = asyncio.Event()

    def next_length(self) -> int:
        return int(next(self._lengths))

    async def run(self, address: str, *, engines: int, slots: int) -> dict[str, int]:
        """Answer until all of `total` are answered or the launcher has had enough."""
        names = [f"engine-{index}" for index in range(engines)]
        made = [_Engine(name, self) for name in names]
        for engine in made:
            await engine.connect(address, slots)
        num_answered, place, wanted = 0, 0, self._in_flight
        with contextlib.suppress(StreamClosed):
            while num_answered < self._total:
                while self.num_held < min(wanted, self._total - num_answered):
                    self.has_work.clear()
                    await self.has_work.wait()
                wanted = self._in_flight * 7 // 8  # from then on: what the launcher holds back lets no engine wait
                self.most_held = max(self.most_held, self.num_held)
                engine, place = made[place], (place + 1) % engines
                if engine.calls:
                    count = await engine.answer()
                    num_answered, self.num_held = num_answered + count, self.num_held - count
                    await asyncio.sleep(0)
        await asyncio.wait(self.tasks)
        taken = [engine.num_taken for engine in made]
        num_bytes = sum(engine.bytes_sent for engine in made)
        return {"most_held": self.most_held, "least": min(taken), "most": max(taken), "bytes": num_bytes}


def child(asked: dict[str, Any], _: Iterator[Any]) -> Iterator[Any]:
    crowd = asked["crowd"]
    yield asyncio.run(_run(crowd, asked["address"], engines=asked["engines"], slots=asked["slots"]))


async def _run(crowd: dict[str, int], address: str, *, engines: int, slots: int) -> dict[str, int]:
    return await _Crowd(**crowd).run(address, engines=engines, slots=slots)
