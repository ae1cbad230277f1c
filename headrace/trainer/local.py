"""A trainer in this process: called by the loops of an inline run, or by `RemoteTrainer` in a trainer process.

In a trainer process one compute thread runs calls in order. Publishing and saving copy the weights during the next forward and
backward pass, which does not change them; the optimizer step waits for the copy, and runs while the copy is hashed and sent, or
written.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from headrace.algorithms import PROXIMAL
from headrace.records import Batch, unpack_batch
from headrace.trainer.protocol import Published, Superseded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from headrace.durable import Fingerprints
    from headrace.observe import Timeline
    from headrace.records import Array, WeightUpdate
    from headrace.sync import WeightSync
    from headrace.trainer.protocol import Metrics, Trainer

T = TypeVar("T")
CALLS = ("forward", "step", "publish", "send", "catch_up", "release", "abort", "abandon", "save", "load")
"""The methods that `RemoteTrainer` may call. Batches arrive packed, and the compute thread unpacks them."""


class LocalTrainer:
    """A `PolicyTrainer` around a `Trainer` and the sending end of its weight sync."""

    is_inline = True
    is_lost = False

    def __init__(
        self, trainer: Trainer, *, sync: WeightSync, timeline: Timeline, in_threads: bool = False, frees_memory: bool = False
    ) -> None:
        """`in_threads`: compute in a thread, to keep a trainer process's event loop free. `frees_memory`: on publishing, empty
        torch's cache for engines that slept during training and now need the GPU memory."""
        self._trainer, self._sync, self._timeline = trainer, sync, timeline
        self._frees_memory = frees_memory
        self._saving = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute") if in_threads else None
        self._copied: list[tuple[str, threading.Event]] = []  # of each publication and save: set when it has copied the weights
        self._is_held = asyncio.Event()  # the engines hold the last update, or it was aborted
        self._is_held.set()
        self._is_abandoned = False
        self.num_steps = 0
        self.version = -1  # the last one published
        self._steps_published = -1  # `num_steps` at that time

    @property
    def num_passes(self) -> int:
        return self._trainer.num_passes

    def calls(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """Return the handlers of a trainer process."""
        return {name: getattr(self, name) for name in CALLS}

    async def state(self) -> dict[str, Any]:
        """Return what a trainer process reports with every heartbeat."""
        return {"passes": self.num_passes}

    async def forward(self, batch: Any, *, column: str = PROXIMAL) -> list[Array]:  # noqa: ANN401
        return await self._compute("compute", lambda: self._trainer.forward(_unpacked(batch), column=column))

    async def step(self, batch: Any, *, learning_rate: float) -> Metrics:  # noqa: ANN401
        def step() -> Metrics:
            unpacked = _unpacked(batch)
            seen = self._trainer.forward_backward(unpacked)
            if not unpacked.is_last:
                return seen
            self._wait_for_copies()
            self.num_steps += 1
            seen |= self._trainer.optim_step(learning_rate)
            if unpacked.reference_mix:
                self._trainer.mix_reference(unpacked.reference_mix)
            return seen

        return await self._compute("compute", step)

    async def publish(self, version: int, *, canary: Any, whole: bool = False) -> Published:  # noqa: ANN401
        """Return when the weights are ready to fetch. Only one update is in flight: the next may overwrite memory that engines
        still read, so it waits until they hold the one before."""
        copied = threading.Event()

        def score_canary() -> Array:
            if whole and (self.version, self._steps_published) != (version, self.num_steps):
                raise Superseded(f"version {version} is not published again: the weights have moved on")
            self.version, self._steps_published = version, self.num_steps
            logprobs = self._trainer.forward(_unpacked(canary))[0]
            if self._frees_memory and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._copied.append(("publish", copied))  # from here on the weights do not change until they are copied
            return logprobs

        def offer() -> WeightUpdate:
            return self._sync.offer(version, self._trainer.tensors(), whole=whole, on_read=copied.set)

        logprobs = await self._compute("publish", score_canary)
        try:
            await self._is_held.wait()
            if self._is_abandoned:
                raise RuntimeError(f"version {version} is not published: the run ends")
            self._is_held.clear()
            update = await self._beside(f"offer {version}", offer)
        except BaseException:
            self._is_held.set()  # no engine will learn of it
            raise
        finally:
            copied.set()
        return Published(update, logprobs)

    def _wait_for_copies(self) -> None:
        """Called in the compute thread before the weights change."""
        for what, copied in self._copied:
            if not copied.is_set():
                with self._timeline.during(what):
                    copied.wait()
        self._copied.clear()

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        """Push an update to engines while they receive it, if its transport needs that."""
        await self._beside(f"send {update.version}", lambda: self._sync.send(update, receivers))

    async def catch_up(self, version: int | None) -> list[WeightUpdate]:
        """Return the updates that bring an engine from `version`, or None of this lineage, to the newest held one."""
        return await self._beside("catch up", lambda: self._sync.catch_up(version))

    async def release(self, update: WeightUpdate) -> None:
        await self._beside("release", lambda: self._sync.release(update))
        self._is_held.set()

    async def abort(self, update: WeightUpdate) -> None:
        await self._beside("abort", lambda: self._sync.abort(update))
        self._is_held.set()

    async def abandon(self) -> None:
        self._is_abandoned = True
        self._is_held.set()

    async def save(self, folder: Path | str) -> Fingerprints:
        copied = threading.Event()

        def save() -> Fingerprints:
            return self._trainer.save(Path(folder), on_read=copied.set)

        if self._thread is None:
            return await self._compute("save", save)
        await self._compute("save", lambda: self._copied.append(("save", copied)))
        try:
            async with self._saving:  # a rescue may come during a checkpoint; ranks exchange the weights of one at a time
                return await self._beside(f"save {self.version}", save)
        finally:
            copied.set()

    async def load(self, folder: Path | str) -> None:
        def load() -> None:
            self._wait_for_copies()
            self._trainer.load(Path(folder))

        await self._compute("compute", load)

    async def _compute(self, state: str, action: Callable[[], T]) -> T:
        """Run in the compute thread, after earlier calls."""

        def timed() -> T:
            with self._timeline.during(state):
                return action()

        if self._thread is None:
            return timed()
        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    async def _beside(self, what: str, action: Callable[[], T]) -> T:
        """Run in another thread, concurrently with the compute thread."""

        def traced() -> T:
            with self._timeline.beside(what):
                return action()

        return action() if self._thread is None else await asyncio.to_thread(traced)


def _unpacked(batch: Any) -> Batch:  # noqa: ANN401
    return batch if isinstance(batch, Batch) else unpack_batch(batch)
