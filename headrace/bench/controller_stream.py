"""What exchanging rollouts with engines costs the launcher: the whole stream, and encoding alone."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.harness import Row
from headrace.bench.stubs import COMPLETION, PROMPT, answer
from headrace.engine import EnginePool, RemoteEngine
from headrace.records import Rollout, Sampling, decode, encode, pack_rollouts, unpack_rollouts, unpack_samplings
from headrace.rpc import Listener, Peer, StreamClosed, connect
from headrace.run import fewer_gc_pauses

if TYPE_CHECKING:
    from collections.abc import Callable

_TOKEN = "bench"
_SLOTS = 256


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
        rollouts = unpack_rollouts(value["rollouts"])
        unpack_samplings(value["samplings"])
        finished = [done.replace(id=r.id, episode=r.episode, group=r.group, index=r.index) for r in rollouts]
        data.notify("done", {"keys": value["keys"], "rollouts": pack_rollouts(finished)})
        data.notify("pull", len(rollouts))

    control = Peer(await connect(address, token=_TOKEN, name="engine-0", channel="control"))
    data = Peer(await connect(address, token=_TOKEN, name="engine-0", channel="data"), notices={"work": on_work})
    data.notify("pull", _SLOTS)
    with contextlib.suppress(StreamClosed):
        await asyncio.gather(control.run(), data.run())


def encoding_rows(*, repetitions: int, num: int = 256) -> list[Row]:
    """Encoding rollouts as an engine does, decoding them as the launcher does, and their size on the wire."""
    rollouts = [answer(number).replace(id=f"g{number // 8}/{number % 8}", group=f"g{number // 8}") for number in range(num)]
    frame = encode(pack_rollouts(rollouts))
    assert unpack_rollouts(decode(frame)) == rollouts
    out = _per_item(lambda: encode(pack_rollouts(rollouts)), num=num, repetitions=repetitions)
    back = _per_item(lambda: unpack_rollouts(decode(frame)), num=num, repetitions=repetitions)
    return [
        Row(f"pack + encode, {num} at a time", out, "µs", goal="≤ 8"),
        Row(f"decode + unpack, {num} at a time", back, "µs", goal="≤ 8"),
        Row("bytes of a rollout on the wire", len(frame) / num, "bytes"),
    ]


def _per_item(work: Callable[[], object], *, num: int, repetitions: int, times: int = 10) -> float:
    seen = []
    for _ in range(repetitions):
        started = time.thread_time()
        for _ in range(times):
            work()
        seen.append((time.thread_time() - started) / times / num * 1e6)
    return statistics.median(seen)
