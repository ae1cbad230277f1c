"""The four loops and the pool with a thousand emulated engines, for `headrace bench controller`."""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.child import Child
from headrace.bench.harness import Row
from headrace.bench.many_engines import TOKEN
from headrace.bench.stubs import StartObserver, StubScorer, StubTrainer, make_session
from headrace.config import make_recipe
from headrace.engine import EnginePool, RemoteEngine
from headrace.rpc import Listener, Peer, StreamClosed
from headrace.sync import Lineage

if TYPE_CHECKING:
    from headrace.records import Batch
    from headrace.rpc import Stream
    from headrace.run import PolicyState

_TIMEOUT = 900.0


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """`engines` engines of `slots` slots, `rollouts` in all, of which twice the slots are in flight; lengths are lognormal."""

    engines: int
    slots: int
    rollouts: int
    batch: int
    median: int
    most: int

    @property
    def in_flight(self) -> int:
        return 2 * self.engines * self.slots

    @property
    def max_lag(self) -> int:
        """Submission must run ahead by all rollouts in flight, those that wait for siblings and a batch being trained."""
        return -(-self.in_flight // self.batch) + 2

    def __post_init__(self) -> None:
        assert self.rollouts % self.batch == 0, "every rollout must be trained, or the engines wait for more"


SHORT = Crowd(engines=1_000, slots=128, rollouts=512_000, batch=4_096, median=10, most=10)
LONG = Crowd(engines=1_000, slots=10, rollouts=61_440, batch=1_024, median=4_000, most=100_000)
QUICK_SHORT = Crowd(engines=50, slots=8, rollouts=3_200, batch=320, median=10, most=10)
QUICK_LONG = Crowd(engines=20, slots=2, rollouts=320, batch=64, median=400, most=10_000)
_TOKEN_SECONDS = 20e-9
"""What a token may cost beside its rollout."""


def crowd_rows(crowd: Crowd) -> list[Row]:
    found = run_crowd(crowd)
    each = 1e6 * (found["seconds"] - (_TOKEN_SECONDS * found["tokens"] if crowd.median < crowd.most else 0)) / crowd.rollouts
    kind = f"{crowd.in_flight:,} in flight on {crowd.engines:,} engines"
    what = f"{kind}, {crowd.most:,} tokens at most: "
    rows = [Row(f"{what}per rollout", each, "µs", goal="≤ 100")]
    if crowd.median < crowd.most:
        rows[0] = Row(f"{what}per rollout, less 20 ns a token", each, "µs", goal="≤ 100")
        rows += [
            Row("tokens of a rollout, on average", found["tokens"] / crowd.rollouts, ""),
            Row("all of the launcher's thread, per token", 1e9 * found["seconds"] / found["tokens"], "ns"),
            Row("bytes from engines per token", found["bytes"], "bytes"),
        ]
    return [
        *rows,
        Row("most rollouts submitted and not trained", found["unfinished"], "", bound=(crowd.max_lag + 1) * crowd.batch),
        Row("memory at the end", found["memory"], "GB"),
        Row("most in the second half of the time with full engines ÷ at its start", found["growth"], "×", goal="≤ 1.05"),
        Row("most calls of an engine ÷ fewest", found["spread"], "×"),
    ]


class _CountingTrainer(StubTrainer):
    """Notes how many tokens it gets, how many rollouts are submitted and not trained and, while engines are full, the memory at
    each batch: when no calls are left for them, all they have ends at once."""

    policy: PolicyState

    def __init__(self, lineage: Lineage, pool: EnginePool, *, full: float) -> None:
        super().__init__(lineage, is_inline=False)
        self._pool, self._full, self.num_tokens, self.most_unfinished = pool, full, 0, 0
        self.memory: list[int] = []

    async def step(self, batch: Batch, *, learning_rate: float) -> dict[str, float]:
        self.num_tokens += sum(rollout.num_sampled for rollout in batch.rollouts)
        self.most_unfinished = max(self.most_unfinished, self.policy.ledger.submitted - self.num_rollouts)
        if sum(len(engine.requests) for engine in self._pool.engines) >= self._full:
            self.memory.append(_resident())
        return await super().step(batch, learning_rate=learning_rate)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def run_crowd(crowd: Crowd) -> dict[str, float]:
    """What the launcher's thread spends, what travels, what is held, and how evenly the engines are used."""
    return asyncio.run(_run_crowd(crowd))


async def _run_crowd(crowd: Crowd) -> dict[str, float]:
    listener = await Listener.on_this_host(token=TOKEN)
    names = [f"engine-{index}" for index in range(crowd.engines)]
    arriving = {(name, channel): listener.expect(name, channel) for name in names for channel in ("control", "data")}
    told = {"total": crowd.rollouts, "in_flight": crowd.in_flight, "median": crowd.median, "most": crowd.most}
    asked = {"address": listener.address, "engines": crowd.engines, "slots": crowd.slots, "crowd": told}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Child("engines", "headrace.bench.many_engines:child", asked, log=log) as child:
            async with asyncio.timeout(_TIMEOUT):
                pool = EnginePool()
                engines, reading = await _connect(pool, names, arriving)
                found = await _train(crowd, pool)
            for engine in engines:
                for peer in (engine.control, engine.data):
                    assert peer is not None
                    peer.stream.close()
            await asyncio.wait(reading)
            told_back = await asyncio.to_thread(child.hear, seconds=60)
    listener.close()
    assert told_back["most_held"] >= crowd.in_flight, f"only {told_back['most_held']} were in flight"
    return {**found, "bytes": told_back["bytes"] / found["tokens"], "spread": told_back["most"] / told_back["least"]}


async def _connect(
    pool: EnginePool, names: list[str], arriving: dict[tuple[str, str], asyncio.Future[Stream]]
) -> tuple[list[RemoteEngine], list[asyncio.Future[None]]]:
    engines, reading = list[RemoteEngine](), list[asyncio.Future[None]]()
    for name in names:
        control = Peer(await arriving[name, "control"])
        engine = RemoteEngine(name, pool, control=control, on_report=lambda *_: None)
        engine.data = Peer(await arriving[name, "data"], notices=engine.notices())
        reading += [asyncio.ensure_future(_read(peer)) for peer in (control, engine.data)]
        await pool.join(engine)
        engines.append(engine)
    return engines, reading


async def _read(peer: Peer) -> None:
    try:
        await peer.run()
    except StreamClosed:
        peer.stream.close()


async def _train(crowd: Crowd, pool: EnginePool) -> dict[str, float]:
    versions = crowd.rollouts // crowd.batch
    recipe = make_recipe(
        {
            "steps": versions,
            "sampling": {"max_tokens": crowd.most},
            "model": {"context": crowd.most + 1000},
            "engine": {"slots": crowd.slots, "count": crowd.engines},
            "staleness": {"max_lag": crowd.max_lag},
            "buffer": {"max_gb": 64.0},
            "train": {"batch": crowd.batch, "group_size": 8},
            "checkpoint": {"every": versions},
            "observe": {"keep_rollouts_every": 0},
            "sync": {"canary_limit": 1e9},  # a stub has no logprobs
        }
    )
    lineage, observer = Lineage.new(), StartObserver()
    trainer = _CountingTrainer(lineage, pool, full=0.85 * crowd.in_flight)
    roles: dict[str, Any] = {"engine": pool, "trainer": trainer, "scorer": StubScorer()}
    session = make_session(recipe, lineage, observer, **roles, num_tasks=crowd.rollouts // 8)
    trainer.policy = session.policy
    await session.train()
    spent = time.thread_time() - observer.started
    assert trainer.num_rollouts == crowd.rollouts == session.policy.ledger.counts()["trained"]
    second = trainer.memory[len(trainer.memory) // 2 :]
    return {
        "seconds": spent,
        "tokens": float(trainer.num_tokens),
        "memory": _resident() / 1e9,
        "growth": max(second) / second[0],
        "unfinished": trainer.most_unfinished,
    }
