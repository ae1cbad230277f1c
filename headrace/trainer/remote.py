"""A trainer in another process: forwards every call to that process's `LocalTrainer`."""

from __future__ import annotations

import asyncio
import builtins
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.algorithms import PROXIMAL
from headrace.errors import SyncError
from headrace.records import Batch, pack_batch
from headrace.rpc import RemoteError, StreamClosed
from headrace.trainer.protocol import Published, Superseded

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence
    from pathlib import Path

    from headrace.durable import Fingerprints
    from headrace.launch import RoleProcess
    from headrace.records import Array, WeightUpdate
    from headrace.trainer.protocol import Metrics

T = TypeVar("T")


class Answer(Generic[T]):
    """The answer to a call already sent. Cancelling the await does not cancel the call; awaiting it is optional."""

    def __init__(self, answering: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.ensure_future(answering)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.shield(self._task).__await__()


class RemoteTrainer:
    """A `PolicyTrainer` over a process's stream. Calls are sent at once, and run in the order they were sent."""

    is_inline = False

    def __init__(self, child: RoleProcess, *, deadline: float) -> None:
        """`deadline`: seconds that loading a checkpoint may take. Saving runs beside training, however slow the disk."""
        self._child, self._deadline = child, deadline
        self.num_steps = 0

    @property
    def is_lost(self) -> bool:
        return self._child.lost.is_set()

    @property
    def num_passes(self) -> int:
        return int(self._child.state.get("passes", 0))

    async def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        return await self._call("forward", list, batch=batch, column=column)

    def step(self, batch: Batch, *, learning_rate: float) -> Answer[Metrics]:
        self.num_steps += 1
        return self._call("step", dict, batch=batch, learning_rate=learning_rate)

    def publish(self, version: int, *, canary: Batch, whole: bool = False) -> Answer[Published]:
        return self._call("publish", lambda answer: Published(*answer), version=version, canary=canary, whole=whole)

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        await self._call("send", update=update, receivers=list(receivers))

    async def catch_up(self, version: int | None) -> list[WeightUpdate]:
        return await self._call("catch_up", list, version=version)

    async def release(self, update: WeightUpdate) -> None:
        await self._call("release", update=update)

    async def abort(self, update: WeightUpdate) -> None:
        await self._call("abort", update=update)

    async def abandon(self) -> None:
        await self._call("abandon")

    def save(self, folder: Path) -> Answer[Fingerprints]:
        return self._call("save", dict, folder=str(folder))

    async def load(self, folder: Path) -> None:
        try:
            async with asyncio.timeout(self._deadline):
                await self._call("load", folder=str(folder))
        except TimeoutError as error:
            self._child.give_up(f"does not load a checkpoint within {self._deadline:g} s (deadline)")
            raise await self._child.explain() from error

    def _call(self, name: str, make: Callable[[Any], T] = lambda answer: answer, **arguments: Any) -> Answer[T]:  # noqa: ANN401
        """Send a call now; `make` converts the answer."""
        packed = {key: pack_batch(value) if isinstance(value, Batch) else value for key, value in arguments.items()}
        try:
            answer = self._child.control.begin(name, **packed)
        except StreamClosed as error:
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(error)

        async def result() -> T:
            try:
                return make(await answer)
            except RemoteError as error:
                raise self._raised(name, error) from error
            except StreamClosed as error:
                raise await self._child.explain() from error

        return Answer(result())

    def _raised(self, name: str, error: RemoteError) -> Exception:
        """Return the original error if publishing or the checkpoint store handles it, else a failure of the process."""
        if error.kind in ("SyncError", "Superseded"):
            return (SyncError if error.kind == "SyncError" else Superseded)(error.message)
        known = getattr(builtins, error.kind, None)
        is_of_disk = error.kind == "SafetensorError" or (isinstance(known, type) and issubclass(known, OSError))
        return OSError(error.message) if name == "save" and is_of_disk else self._child.failed(error)
