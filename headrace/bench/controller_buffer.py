"""The buffer's part of `headrace bench controller`: what 100,000 waiting episodes cost to put and to take."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from headrace.bench.stubs import answer
from headrace.buffer import Entry, Group, GroupBuffer, Journal
from headrace.records import Episode, Scored
from headrace.run import fewer_gc_pauses

GROUP_SIZE, BATCH = 8, 256


def put_and_take(*, num_episodes: int, max_bytes: int | None, size: int = GROUP_SIZE) -> dict[str, float]:
    """Microseconds per episode of the event loop's thread and of the whole process, and the most bytes in memory. With
    `max_bytes`, groups beyond that wait in a journal on disk. `size`: episodes in a group; 1: each enters alone."""
    with fewer_gc_pauses():  # as in a run
        return asyncio.run(_put_and_take(num_episodes=num_episodes, max_bytes=max_bytes, size=size))


async def _put_and_take(*, num_episodes: int, max_bytes: int | None, size: int) -> dict[str, float]:
    groups = [_group(number, size) for number in range(num_episodes // size)]
    with tempfile.TemporaryDirectory() as folder:
        journal = None
        if max_bytes is not None:
            journal = Journal(Path(folder) / "journal", max_bytes=1 << 40, in_thread=True, say=print)
        buffer = GroupBuffer(batch=BATCH // size, capacity=None, max_bytes=max_bytes or 1 << 40, journal=journal)
        began = time.thread_time(), time.process_time()
        for number, group in enumerate(groups):
            buffer.put(group, entry=Entry(group, task=0))
            if number % (512 // size) == 0:
                await asyncio.sleep(0)
        while journal is not None and journal.is_writing:  # noqa: ASYNC110  (a benchmark may poll)
            await asyncio.sleep(0.001)
        most, num_taken = buffer.num_bytes, 0
        while buffer.ready.is_set():
            buffer.suspects(older_than=0)
            taken = buffer.take()
            num_taken += len(taken) if journal is None else len(await asyncio.to_thread(buffer.load, taken))
        spent = time.thread_time() - began[0], time.process_time() - began[1]
        if journal is not None:
            journal.end(is_over=True)
    count = num_taken * size
    return {"loop": 1e6 * spent[0] / count, "process": 1e6 * spent[1] / count, "bytes": most}


def _group(number: int, size: int = GROUP_SIZE) -> Group:
    name, rollout = f"g{number}", answer(number % 50)
    members = (
        Episode(
            id=f"{name}/{index}",
            group=name,
            task={"prompt": name},
            rollouts=(rollout.replace(id=f"{name}/{index}", episode=f"{name}/{index}", group=name, index=index),),
            outcome=Scored(float(index)),
        )
        for index in range(size)
    )
    return Group(number, tuple(members), "tasks", number)
