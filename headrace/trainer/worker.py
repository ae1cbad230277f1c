"""A trainer process's end of its stream.

Computing has a thread of its own, and calls reach it in the order they were made. Publishing reads the weights beside the
next forward and backward pass, which do not change them; the optimizer step waits until they are read, and runs beside the
rest of it.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from headrace.algorithms import PROXIMAL
from headrace.records import unpack_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.observe import ProcessTimeline
    from headrace.records import Array, Batch, WeightUpdate
    from headrace.sync import WeightSync
    from headrace.trainer.protocol import Trainer

T = TypeVar("T")


class Superseded(RuntimeError):
    """A version is asked for again, and the weights have moved on."""


def give_back_unused() -> None:
    """What torch keeps of a GPU's memory for its next tensors, for other processes and for what the driver maps."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class TrainerWorker:
    """Between a `Trainer` and the stream."""

    def __init__(self, trainer: Trainer, *, sync: WeightSync, timeline: ProcessTimeline, in_turns: bool = False) -> None:
        """`in_turns`: engines slept while it trained, and are about to need the memory."""
        self._trainer, self._sync, self._timeline = trainer, sync, timeline
        self._in_turns = in_turns
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._readers: set[object] = set()
        """Publications that have not read the weights yet; the next may begin to wait before the one before it has ended."""
        self._may_change = threading.Condition()
        self._is_held = asyncio.Event()
        """What was offered last is held by the engines, or given up."""
        self._is_held.set()
        self._is_abandoned = False
        self._num_steps = 0
        self._published: dict[int, int] = {}
        """Optimizer steps taken before each version was offered."""

    def calls(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        return {
            "forward": self._forward,
            "step": self._step,
            "publish": self._publish,
            "send": self._send,
            "catch_up": self._catch_up,
            "release": self._release,
            "abort": self._abort,
            "abandon": self._abandon,
            "save": self._save,
            "load": self._load,
        }

    async def state(self) -> dict[str, Any]:
        """How far it is, for whoever watches that it moves."""
        return {"passes": self._trainer.num_passes}

    async def _forward(self, batch: Any, column: str = PROXIMAL) -> list[Array]:  # noqa: ANN401
        return await self._compute("compute", lambda: self._trainer.forward(unpack_batch(batch), column=column))

    async def _step(self, batch: Any, learning_rate: float) -> dict[str, float]:  # noqa: ANN401
        return await self._compute("compute", lambda: self._one_step(unpack_batch(batch), learning_rate))

    def _one_step(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        seen = self._trainer.forward_backward(batch)
        self._wait_for_readers()
        self._num_steps += 1
        return seen | self._trainer.optim_step(learning_rate)

    def _wait_for_readers(self) -> None:
        with self._may_change:
            if self._readers:
                with self._timeline.during("publish"):
                    self._may_change.wait_for(lambda: not self._readers)

    def _has_read(self, reader: object) -> None:
        with self._may_change:
            self._readers.discard(reader)
            self._may_change.notify_all()

    async def _publish(self, version: int, canary: Any, whole: bool = False) -> dict[str, Any]:  # noqa: ANN401
        """Answers when the weights lie ready; until they are read the next step may compute but not change them. One update is
        under way at a time: the next waits until the engines hold the one before. `whole`: once more, after a failure."""
        reader = object()
        logprobs = await self._compute("publish", lambda: self._hold_still(version, canary, reader, is_again=whole))
        try:
            await self._is_held.wait()
            if self._is_abandoned:
                raise RuntimeError(f"version {version} is not published: the run ends")
            self._is_held.clear()
            update = await asyncio.to_thread(self._offer, version, whole, reader)
        except BaseException:
            self._is_held.set()  # nobody will hear of it
            raise
        finally:
            self._has_read(reader)
        return {"update": update, "canary": logprobs}

    def _hold_still(self, version: int, canary: Any, reader: object, *, is_again: bool) -> Array:  # noqa: ANN401
        if is_again and self._published.get(version) != self._num_steps:
            raise Superseded(f"version {version} is not published again: the weights have moved on")
        self._published = {version: self._num_steps}
        logprobs = self._trainer.forward(unpack_batch(canary))[0]
        if self._in_turns:
            give_back_unused()
        with self._may_change:
            self._readers.add(reader)
        return logprobs

    def _offer(self, version: int, whole: bool, reader: object) -> WeightUpdate:
        with self._timeline.beside(f"offer {version}"):
            return self._sync.offer(version, self._trainer.tensors(), whole=whole, on_read=lambda: self._has_read(reader))

    async def _send(self, update: WeightUpdate, receivers: list[str]) -> None:
        def send() -> None:
            with self._timeline.beside(f"send {update.version}"):
                self._sync.send(update, receivers)

        await asyncio.to_thread(send)

    async def _catch_up(self, version: int | None) -> list[WeightUpdate]:
        return await asyncio.to_thread(self._sync.catch_up, version)

    async def _release(self, update: WeightUpdate) -> None:
        await asyncio.to_thread(self._sync.release, update)
        self._is_held.set()

    async def _abort(self, update: WeightUpdate) -> None:
        await asyncio.to_thread(self._sync.abort, update)
        self._is_held.set()

    async def _abandon(self) -> None:
        """Nobody takes updates any more; no step waits for one."""
        self._is_abandoned = True
        self._is_held.set()

    async def _save(self, folder: str) -> None:
        await self._compute("save", lambda: self._trainer.save(Path(folder)))

    async def _load(self, folder: str) -> None:
        await self._compute("compute", lambda: self._one_load(Path(folder)))

    def _one_load(self, folder: Path) -> None:
        self._wait_for_readers()
        self._trainer.load(folder)

    async def _compute(self, state: str, action: Callable[[], T]) -> T:
        """In the compute thread, after whatever was asked before."""

        def act() -> T:
            self._timeline.enter(state)
            try:
                return action()
            finally:
                self._timeline.enter("wait-batch")

        return await asyncio.get_running_loop().run_in_executor(self._thread, act)
