"""An engine and a trainer that do nothing, as cheaply as can be: what is left of a run is the controller."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from headrace.algorithms import PROXIMAL
from headrace.engine import EngineState, InFlight
from headrace.partial import Interrupt
from headrace.records import Call, FinishReason, Rollout, Sampling, Source, WeightUpdate
from headrace.trainer import Published

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.records import Array, Batch
    from headrace.sync import Lineage

PROMPT, COMPLETION = 10, 10
"""Tokens of every rollout."""


class StubEngine:
    """Holds what it is asked for until `in_flight` rollouts are, then answers the oldest `wave` of them.

    Its own time is on its own clock, `seconds`, which is that of the thread: it is not the controller's.
    """

    def __init__(self, *, in_flight: int, total: int, wave: int) -> None:
        self._in_flight, self._total, self._wave = in_flight, total, wave
        self._asked: deque[tuple[Rollout, asyncio.Future[Rollout]]] = deque()
        self._arrived = asyncio.Event()
        self._answers: list[Rollout] = []
        self._version, self._lineage = 0, ""
        self.num_asked = self.num_answered = self.most_in_flight = 0
        self.seconds = 0.0

    async def serve(self) -> NoReturn:
        """Waits until enough are in flight, woken by `generate`; at the end of a run no more come."""
        while True:
            while len(self._asked) < min(self._in_flight, self._total - self.num_answered) or not self._asked:
                self._arrived.clear()
                await self._arrived.wait()
            self._answer()
            await asyncio.sleep(0)

    def _answer(self) -> None:
        self.most_in_flight = max(self.most_in_flight, len(self._asked))
        started = time.thread_time()
        wave = [self._asked.popleft() for _ in range(min(self._wave, len(self._asked)))]
        rollouts = [self._finished(rollout) for rollout, _ in wave]
        self.seconds += time.thread_time() - started
        for (_, future), rollout in zip(wave, rollouts, strict=True):
            if not future.done():
                future.set_result(rollout)

    def _finished(self, prompt: Rollout) -> Rollout:
        made = self._answers[self.num_answered % len(self._answers)]
        self.num_answered += 1
        return made.replace(id=prompt.id, episode=prompt.episode, group=prompt.group, index=prompt.index)

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        future: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._asked.append((rollout, future))
        self.num_asked += 1
        self._arrived.set()
        return await future

    async def pause(self, interrupt: Interrupt) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def score(self, rollouts: Sequence[Rollout]) -> list[Array]:
        return [np.zeros(len(rollout), dtype=np.float32) for rollout in rollouts]

    async def load(self, update: WeightUpdate, *, interrupt: Interrupt = Interrupt.KEEP) -> None:
        started = time.thread_time()
        self._version, self._lineage = update.version, update.lineage
        self._answers = [answer(number, version=update.version, lineage=update.lineage) for number in range(16)]
        self.seconds += time.thread_time() - started

    async def state(self) -> EngineState:
        return EngineState(self._version, self._lineage, len(self._asked), 0, self._in_flight, 0, self.num_answered)

    async def in_flight(self) -> list[InFlight]:
        return []  # nothing is ever half drawn


class StubTrainer:
    """Takes batches and keeps nothing of them."""

    is_inline = True
    is_lost = False

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self.num_steps = self.num_passes = 0
        self.num_rollouts = 0

    async def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        return [np.zeros(len(rollout), dtype=np.float32) for rollout in batch.rollouts]

    async def step(self, batch: Batch, *, learning_rate: float) -> dict[str, float]:
        self.num_steps += 1
        self.num_rollouts += len(batch.rollouts)
        return {"loss": 0.0, "mismatch": 0.0, "mismatch_max": 0.0}

    async def publish(self, version: int, *, canary: Batch, whole: bool = False) -> Published:
        update = WeightUpdate(policy="policy", lineage=self._lineage.id, version=version)
        return Published(update, np.zeros(1, dtype=np.float32))

    async def release(self, update: WeightUpdate) -> None:
        """Nothing was sent."""

    async def abort(self, update: WeightUpdate) -> None:
        """Nothing was sent."""

    async def abandon(self) -> None:
        """Nothing waits."""

    async def save(self, folder: Path) -> None:
        """Nothing to keep."""

    async def load(self, folder: Path) -> None:
        """Nothing was kept."""


class StubStore:
    """Keeps no checkpoint."""

    async def save(self, version: int, **_: object) -> None:
        pass


def answer(number: int, *, version: int = 0, lineage: str = "") -> Rollout:
    """A finished rollout of `PROMPT` and `COMPLETION` tokens; others have another text, and so another score."""
    length = PROMPT + COMPLETION
    call = Call(
        start=PROMPT,
        stop=length,
        engine="stub",
        sampling=Sampling(max_tokens=COMPLETION),
        finish_reason=FinishReason.LENGTH,
        started=0.0,
        finished=0.0,
    )
    sampled = np.arange(length) >= PROMPT
    return Rollout(
        id=str(number),
        episode="",
        group="",
        index=0,
        lineage=lineage,
        token_ids=np.full(length, 10 + number, dtype=np.int32),
        source=np.where(sampled, Source.SAMPLED, Source.PROMPT).astype(np.int8),
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        calls=(call,),
        finish_reason=FinishReason.LENGTH,
    )
