"""`headrace bench controller`: the launcher's own CPU time per rollout, with 10,000 in flight.

The four loops run with the real buffer, ledger, scorer, tokenizer and batches around a stub engine and a stub trainer. The
figure is the CPU time of the launcher's thread, less the stub engine's, per rollout; every rollout goes from submission to
training. Further rows have what exchanging rollouts with engines costs (the whole stream, and encoding alone), what the
launcher keeps of long calls in flight (`controller_in_flight`), what a full buffer costs (`controller_buffer`), and what the
loops and the pool cost with a thousand engines (`controller_engines`).
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
import timeit
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.controller_buffer import put_and_take
from headrace.bench.controller_engines import LONG, QUICK_LONG, QUICK_SHORT, SHORT, crowd_rows
from headrace.bench.controller_in_flight import hour, many_calls
from headrace.bench.harness import Row, run_parts
from headrace.bench.stubs import COMPLETION, PROMPT, StartObserver, StubTrainer, WaveEngine, answer, make_session
from headrace.config import make_recipe
from headrace.engine import EnginePool, RemoteEngine, Request, SampledSince, pack_sampled
from headrace.records import Rollout, Sampling, decode, encode, pack_rollouts, unpack_rollouts, unpack_samplings
from headrace.rpc import Listener, Peer, StreamClosed, connect
from headrace.run import fewer_gc_pauses
from headrace.score import RewardFunction, RewardScorer
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


IN_FLIGHT = 10_000
HOUR = {"calls": 1_000, "mean": 10_000, "rate": 10, "seconds": 3_600}
QUICK_HOUR = {"calls": 40, "mean": 1_000, "rate": 10, "seconds": 600}
_TOKEN = "bench"


def run(*, quick: bool, json_file: Path | None) -> int:
    """Medians of several runs; `--quick` takes fewer and shorter ones."""
    parts = {"controller": lambda: _measure(quick=quick), "in flight": lambda: _in_flight(quick=quick)}
    parts["buffer"] = lambda: _buffer(quick=quick)
    parts["engines"] = lambda: _engines(quick=quick)
    return run_parts("controller", parts, quick=quick, json_file=json_file)


def _measure(*, quick: bool) -> Iterator[list[Row]]:
    versions, repetitions = (60, 2) if quick else (120, 7)
    costs = [measure(in_flight=IN_FLIGHT, versions=versions) for _ in range(repetitions)]
    yield [
        Row("controller per rollout", statistics.median(total - stub for total, stub in costs), "µs", goal="≤ 100"),
        Row("least of the repetitions", min(total - stub for total, stub in costs), "µs"),
        Row("stub engine, not counted", statistics.median(stub for _, stub in costs), "µs"),
    ]
    streamed = [stream_cost(in_flight=IN_FLIGHT, rounds=1 if quick else 3) for _ in range(repetitions)]
    yield [Row("the stream per rollout, out and back", statistics.median(streamed), "µs")]
    yield encoding_rows(repetitions=repetitions)


def _in_flight(*, quick: bool) -> Iterator[list[Row]]:
    calls, tokens = (500, 2_000) if quick else (IN_FLIGHT, 20_000)
    found = many_calls(calls=calls, tokens=tokens)
    yield [
        Row(f"in_flight() of {calls:,} × {tokens:,} tokens", found["milliseconds"], "ms", goal="≤ 50"),
        Row("resident memory of these per token", found["bytes_per_token"], "bytes", goal="≤ 16"),
        Row("a report per call, encoding and taking it", found["report"], "µs"),
    ]
    moments = hour(**(QUICK_HOUR if quick else HOUR))
    (_, _, then), (_, num_tokens, now) = moments[len(moments) // 2 - 1], moments[-1]
    yield [
        Row("memory in flight after a simulated hour", now / 1e6, "MB", bound=16 * num_tokens / 1e6),
        Row("against half an hour before", now / then, "×", goal="≤ 1.05"),
    ]


def _buffer(*, quick: bool) -> Iterator[list[Row]]:
    count, bound = (10_000, 4_000_000) if quick else (100_000, 40_000_000)
    found = put_and_take(num_episodes=count, max_bytes=None)
    yield [Row(f"put and take, {count:,} episodes buffered", found["process"], "µs an episode", goal="≤ 100")]
    spilled = put_and_take(num_episodes=count, max_bytes=bound)
    alone = put_and_take(num_episodes=count, max_bytes=bound, size=1)
    yield [
        Row("the same, nearly all on disk", spilled["process"], "µs an episode", goal="≤ 100"),
        Row("of that in the event loop", spilled["loop"], "µs an episode"),
        Row("on disk, each episode alone", alone["process"], "µs an episode", goal="≤ 100"),
        Row("memory of the buffer then", spilled["bytes"] / 1e6, "MB", bound=bound / 1e6),
    ]


def _engines(*, quick: bool) -> Iterator[list[Row]]:
    for crowd in (QUICK_SHORT, QUICK_LONG) if quick else (SHORT, LONG):
        yield crowd_rows(crowd)


def measure(*, in_flight: int, versions: int, batch: int = 256) -> tuple[float, float]:
    """(microseconds of CPU time per rollout, the stub engine's share of them) of one run of the four loops over stubs.

    Asserts that `in_flight` rollouts were in flight at once.
    """
    recipe = make_recipe(
        {
            "steps": versions,
            "sampling": {"max_tokens": 32},
            "engine": {"slots": in_flight},
            # Submission must run ahead by all rollouts in flight, a wave being answered and a batch being trained.
            "staleness": {"max_lag": -(-in_flight // batch) + 2},
            "train": {"batch": batch, "group_size": 8},
            "checkpoint": {"every": versions},
            "observe": {"keep_rollouts_every": 0},
            "sync": {"canary_limit": 1e9},  # a stub has no logprobs
        }
    )
    total = versions * batch
    lineage = Lineage.new()
    engine, trainer = WaveEngine(in_flight=in_flight, total=total, wave=batch), StubTrainer(lineage)
    observer = StartObserver()
    session = make_session(
        recipe,
        lineage,
        observer,
        engine=engine,
        trainer=trainer,
        scorer=lambda encoder: RewardScorer([(RewardFunction(trivial), 1.0)], decode=encoder.decode, settings=recipe.reward),
        num_tasks=total // 8,
        services=(engine.serve,),
    )
    asyncio.run(session.train())
    spent = time.thread_time() - observer.started
    assert trainer.num_rollouts == total == session.policy.ledger.counts()["trained"]
    assert engine.most_in_flight >= in_flight, f"only {engine.most_in_flight} were in flight"
    return 1e6 * spent / total, 1e6 * engine.seconds / total


def trivial(completion: str, **_: object) -> float:
    """A reward that costs almost nothing and differs between siblings."""
    return float(ord(completion[0]) % 7)


def stream_cost(*, in_flight: int, rounds: int) -> float:
    """Microseconds of the launcher's thread per rollout that goes over a Unix socket to an engine, a thread here, and back."""
    with fewer_gc_pauses():
        return asyncio.run(_stream_cost(in_flight, rounds))


async def _stream_cost(in_flight: int, rounds: int) -> float:
    listener = await Listener.on_this_host(token=_TOKEN)
    arriving = {channel: listener.expect("engine-0", channel) for channel in ("control", "data")}
    threading.Thread(target=lambda: asyncio.run(_echo(listener.address)), daemon=True).start()
    pool = EnginePool()
    engine = RemoteEngine("engine-0", pool, control=Peer(await arriving["control"]), on_report=lambda *_: None)
    engine.data = Peer(await arriving["data"], notices=engine.notices())
    reading = [asyncio.ensure_future(peer.run()) for peer in (engine.control, engine.data)]
    await pool.join(engine)
    prompts = [Rollout.from_prompt(np.arange(PROMPT) + 10, id=f"g{number // 8}/{number % 8}") for number in range(in_flight)]
    sampling = Sampling(max_tokens=COMPLETION)
    started = 0.0
    for number in range(rounds + 1):
        if number == 1:  # the first round warms up
            started = time.thread_time()
        await asyncio.gather(*(pool.generate(prompt, sampling) for prompt in prompts))
    spent = time.thread_time() - started
    for task, peer in zip(reading, (engine.control, engine.data), strict=True):
        peer.stream.close()
        with contextlib.suppress(StreamClosed, asyncio.CancelledError):
            await task
    listener.close()
    return spent / (rounds * in_flight) * 1e6


async def _echo(address: str) -> None:
    """The engine's end, which answers at once."""
    done = answer(0)

    def on_work(value: Any) -> None:  # noqa: ANN401
        calls = map(Request, unpack_rollouts(value["rollouts"]), unpack_samplings(value["samplings"]), repeat(print))
        ended = [SampledSince.rest(call, done, num_before=0) for call in calls]
        for each, key in zip(ended, value["keys"].tolist(), strict=True):
            each.request.key = key
        data.notify("sampled", pack_sampled(ended, policy="policy"))
        data.notify("pull", len(ended))

    control = Peer(await connect(address, token=_TOKEN, name="engine-0", channel="control"))
    data = Peer(await connect(address, token=_TOKEN, name="engine-0", channel="data"), notices={"work": on_work})
    data.notify("pull", 256)  # its slots
    with contextlib.suppress(StreamClosed):
        await asyncio.gather(control.run(), data.run())


def encoding_rows(*, repetitions: int, num: int = 256) -> list[Row]:
    """Encoding rollouts as an engine does, and decoding them as the launcher does."""
    rollouts = [answer(number).replace(id=f"g{number // 8}/{number % 8}", group=f"g{number // 8}") for number in range(num)]
    frame = encode(pack_rollouts(rollouts))
    assert unpack_rollouts(decode(frame)) == rollouts
    work: dict[str, Callable[[], object]] = {
        "pack + encode": lambda: encode(pack_rollouts(rollouts)),
        "decode + unpack": lambda: unpack_rollouts(decode(frame)),
    }
    rows = []
    for name, action in work.items():
        seconds = statistics.median(timeit.repeat(action, number=10, repeat=repetitions, timer=time.thread_time))
        rows.append(Row(f"{name}, {num} at a time", 1e6 * seconds / (10 * num), "µs", goal="≤ 8"))
    return rows
