"""A trainer in another process gets every batch whole, however long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.records import Batch, Rollout, WireError, frames, unpack_batch
from headrace.rpc import Listener, Peer, connect
from headrace.trainer.remote import RemoteTrainer


def make_batch(*, rollouts: int, tokens: int) -> Batch:
    """With expert routing, which takes most of its bytes."""
    routing = np.random.default_rng(0).integers(0, 8, size=(tokens, 4, 2), dtype=np.uint8)
    routing[-1] = 255
    one = Rollout.from_prompt(np.arange(tokens) % 90, id="r").replace(expert_routing=routing)
    members = tuple(one.replace(id=f"r{index}") for index in range(rollouts))
    each = (np.zeros(tokens, dtype=np.float32),) * rollouts
    return Batch(rollouts=members, advantages=each, weights=each, loss="reinforce", version=0)


async def with_trainer(batch: Batch, taken: list[Batch]) -> list[int]:
    """Send a step with this batch; returns the bytes of each write."""

    async def step(batch: Any, learning_rate: float) -> dict[str, float]:
        taken.append(unpack_batch(batch))
        return {"learning_rate": learning_rate}

    listener = await Listener.on_this_host(token="t")
    arriving = listener.expect("trainer", "control")
    far = Peer(await connect(listener.address, token="t", name="trainer", channel="control"), calls={"step": step})
    near = Peer(await arriving)
    reading = [asyncio.ensure_future(peer.run()) for peer in (near, far)]
    written, write = [], near.stream._writer.write
    near.stream._writer.write = lambda piece: (written.append(len(piece)), write(piece))  # type: ignore[method-assign]
    try:
        child: Any = SimpleNamespace(control=near)
        answer = await RemoteTrainer([child], deadline=30).step(batch, learning_rate=0.5)
        assert answer == {"learning_rate": 0.5}
    finally:
        for peer, task in zip((near, far), reading, strict=True):
            peer.stream.close()
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        listener.close()
    return written


def test_a_long_batch_arrives_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PIECE", 1 << 16)
    batch, taken = make_batch(rollouts=16, tokens=2000), []
    written = asyncio.run(asyncio.wait_for(with_trainer(batch, taken), 60))
    assert sum(written) > 16 * 2000 * 30 and len(written) > 14 and max(written) < (1 << 16) + 100
    assert taken == [batch]


def test_a_batch_that_no_frame_can_hold_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 1 << 16)
    with pytest.raises(WireError, match="oversized"):
        asyncio.run(asyncio.wait_for(with_trainer(make_batch(rollouts=16, tokens=2000), []), 60))
