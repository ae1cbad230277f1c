"""What the stream costs the launcher per rollout: out to an engine and back, 10,000 of them in flight.

The engine's end is a thread that lengthens what it gets and sends it back, over a Unix socket as in a run. Only the
processor time of the launcher's thread counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import numpy as np

from headrace.bench.stubs import COMPLETION, PROMPT, answer
from headrace.engine import EnginePool, RemoteEngine
from headrace.records import Rollout, Sampling, pack_rollouts, unpack_rollouts, unpack_samplings
from headrace.rpc import Listener, Peer, StreamClosed, connect
from headrace.run import few_collections

_TOKEN = "bench"
_SLOTS = 256


def carry(*, in_flight: int, rounds: int) -> float:
    """Microseconds of the launcher's thread per rollout that goes out and comes back."""
    with few_collections():
        return asyncio.run(_carry(in_flight, rounds))


async def _carry(in_flight: int, rounds: int) -> float:
    listener = await Listener.on_this_host(token=_TOKEN)
    arriving = {channel: listener.expect("engine-0", channel) for channel in ("control", "data")}
    echo = threading.Thread(target=lambda: asyncio.run(_echo(listener.address)), daemon=True)
    echo.start()
    pool = EnginePool()
    engine = RemoteEngine("engine-0", pool, control=Peer(await arriving["control"]), on_report=lambda *_: None)
    engine.data = Peer(await arriving["data"], notices=engine.notices())
    reading = [asyncio.ensure_future(peer.run()) for peer in (engine.control, engine.data)]
    await pool.join(engine)
    prompts = [Rollout.from_prompt(np.arange(PROMPT) + 10, id=f"g{number // 8}/{number % 8}") for number in range(in_flight)]
    sampling = Sampling(max_tokens=COMPLETION)
    await asyncio.gather(*(pool.generate(prompt, sampling) for prompt in prompts))  # warm
    started = time.thread_time()
    for _ in range(rounds):
        await asyncio.gather(*(pool.generate(prompt, sampling) for prompt in prompts))
    spent = time.thread_time() - started
    for task, peer in zip(reading, (engine.control, engine.data), strict=True):
        peer.stream.close()
        with contextlib.suppress(StreamClosed, asyncio.CancelledError):
            await task
    listener.close()
    return spent / (rounds * in_flight) * 1e6


async def _echo(address: str) -> None:
    """An engine that has drawn every token as soon as it is asked to."""
    done = answer(0)

    def lengthen(value: Any) -> None:  # noqa: ANN401
        rollouts = unpack_rollouts(value["rollouts"])
        unpack_samplings(value["samplings"])
        finished = [done.renamed(id=r.id, episode=r.episode, group=r.group, index=r.index) for r in rollouts]
        data.notify("done", {"keys": value["keys"], "rollouts": pack_rollouts(finished)})
        data.notify("pull", len(rollouts))

    control = Peer(await connect(address, token=_TOKEN, name="engine-0", channel="control"))
    data = Peer(await connect(address, token=_TOKEN, name="engine-0", channel="data"), notices={"work": lengthen})
    data.notify("pull", _SLOTS)
    with contextlib.suppress(StreamClosed):
        await asyncio.gather(control.run(), data.run())
