"""Who does the work of a run, and where: here or in another process. The loops await every call, and know no difference."""

from __future__ import annotations

import asyncio
import builtins
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from headrace.algorithms import PROXIMAL
from headrace.errors import SyncError
from headrace.records import pack_batch
from headrace.rpc import RemoteError, StreamClosed
from headrace.run.publishing import Published
from headrace.trainer import Superseded, give_back_unused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
    from pathlib import Path

    from headrace.engine import Engine
    from headrace.envs import Environment, PromptEncoder
    from headrace.launch import Child
    from headrace.observe import Timeline
    from headrace.records import Array, Batch, WeightUpdate
    from headrace.score import Scorer
    from headrace.sync import WeightSync
    from headrace.tasks import TaskStream
    from headrace.trainer import Trainer


T = TypeVar("T")


class TrainerRole(Protocol):
    """What the loops hold of a trainer, wherever it is."""

    is_here: bool
    """In this process: while it computes, nothing else does."""
    num_steps: int
    """Optimizer steps begun: whoever sees it unchanged knows the weights are."""

    @property
    def is_lost(self) -> bool:
        """Its process is gone, and what it held with it."""

    @property
    def num_passes(self) -> int:
        """Forward passes made: progress within a step."""

    async def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        """A column under the current weights, as `Trainer.forward` gives it."""

    def step(self, batch: Batch, *, learning_rate: float) -> Awaitable[dict[str, float]]:
        """Gradient and optimizer step of one batch, and what was seen. Steps are taken in the order they are asked for."""

    def publish(self, version: int, *, whole: bool = False) -> Awaitable[Published]:
        """The weights made ready for the engines as `version`. No later step changes them before they are. `whole`: once more,
        after a failure, with nothing taken for granted; fails if the weights have moved on."""

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        """Move it to engines that do not come for it, while they receive it."""

    async def catch_up(self, version: int | None) -> list[WeightUpdate]:
        """What brings an engine that holds `version`, or nothing of this life, to the newest that is held."""

    async def release(self, update: WeightUpdate) -> None:
        """Every engine holds it."""

    async def abort(self, update: WeightUpdate) -> None:
        """It was given up."""

    async def abandon(self) -> None:
        """No engine takes an update any more: the run ends, and no step need wait for one."""

    async def save(self, folder: Path) -> None:
        """Weights and optimizer into a folder."""

    async def load(self, folder: Path) -> None:
        """And back."""


class TrainerHere:
    """A trainer in this process, its time on its timeline."""

    is_here = True
    is_lost = False

    def __init__(
        self, trainer: Trainer, sync: WeightSync, timeline: Timeline, *, canary: Batch, in_turns: bool = False
    ) -> None:
        """`in_turns`: the engine slept while it trained, and is about to need the memory."""
        self._trainer, self._sync, self._timeline, self._canary = trainer, sync, timeline, canary
        self._in_turns = in_turns
        self.num_steps = 0

    @property
    def num_passes(self) -> int:
        return self._trainer.num_passes

    async def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        with self._timeline.during("compute"):
            return self._trainer.forward(batch, column=column)

    async def step(self, batch: Batch, *, learning_rate: float) -> dict[str, float]:
        with self._timeline.during("compute"):
            seen = self._trainer.forward_backward(batch)
            self.num_steps += 1
            return seen | self._trainer.optim_step(learning_rate)

    async def publish(self, version: int, *, whole: bool = False) -> Published:
        canary = self._trainer.forward(self._canary)[0]
        if self._in_turns:
            give_back_unused()
        return Published(self._sync.offer(version, self._trainer.tensors(), whole=whole), canary)

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        """The engine is here, and comes for it."""

    async def catch_up(self, version: int | None) -> list[WeightUpdate]:
        return self._sync.catch_up(version)

    async def release(self, update: WeightUpdate) -> None:
        self._sync.release(update)

    async def abort(self, update: WeightUpdate) -> None:
        self._sync.abort(update)

    async def abandon(self) -> None:
        """Nothing here is published while another step is under way."""

    async def save(self, folder: Path) -> None:
        with self._timeline.during("save"):
            self._trainer.save(folder)

    async def load(self, folder: Path) -> None:
        self._trainer.load(folder)


class Answer(Generic[T]):
    """Of a call that was made. Whoever stops waiting for it does not unmake the call; it may be awaited again, or left."""

    def __init__(self, answering: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.ensure_future(answering)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.shield(self._task).__await__()


class TrainerThere:
    """A trainer in another process, reached over its stream; calls reach it in the order they are made."""

    is_here = False

    def __init__(self, child: Child, *, canary: Batch, deadline: float) -> None:
        self._child, self._deadline = child, deadline
        self._canary = pack_batch(canary)
        self.num_steps = 0

    @property
    def is_lost(self) -> bool:
        return self._child.lost.is_set()

    @property
    def num_passes(self) -> int:
        return int(self._child.state.get("passes", 0))

    async def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        return list(await self._answer(self._begin("forward", batch=pack_batch(batch), column=column)))

    def step(self, batch: Batch, *, learning_rate: float) -> Awaitable[dict[str, float]]:
        self.num_steps += 1
        return self._ask("step", dict, batch=pack_batch(batch), learning_rate=learning_rate)

    def publish(self, version: int, *, whole: bool = False) -> Awaitable[Published]:
        return self._ask("publish", lambda answer: Published(**answer), version=version, canary=self._canary, whole=whole)

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        await self._answer(self._begin("send", update=update, receivers=list(receivers)))

    async def catch_up(self, version: int | None) -> list[WeightUpdate]:
        return list(await self._answer(self._begin("catch_up", version=version)))

    async def release(self, update: WeightUpdate) -> None:
        await self._answer(self._begin("release", update=update))

    async def abort(self, update: WeightUpdate) -> None:
        await self._answer(self._begin("abort", update=update))

    async def abandon(self) -> None:
        await self._answer(self._begin("abandon"))

    async def save(self, folder: Path) -> None:
        try:
            await self._child.control.call("save", folder=str(folder), timeout=self._deadline)
        except TimeoutError as error:
            raise await self._late("saving") from error
        except RemoteError as error:
            if _is_of_the_disk(error.kind):  # whoever keeps checkpoints knows what to do
                raise OSError(error.message) from error
            raise self._child.failed(error) from error
        except StreamClosed as error:
            raise await self._child.explain() from error

    async def load(self, folder: Path) -> None:
        try:
            async with asyncio.timeout(self._deadline):
                await self._answer(self._begin("load", folder=str(folder)))
        except TimeoutError as error:
            raise await self._late("loading") from error

    async def _late(self, what: str) -> Exception:
        self._child.give_up(f"has been {what} for {self._deadline:g} s (deadline)")
        return await self._child.explain()

    def _ask(self, name: str, make: Callable[[Any], T], **arguments: Any) -> Answer[T]:  # noqa: ANN401
        """Ask at once, so that whatever is asked later comes later; the answer may be awaited or left."""
        answer = self._begin(name, **arguments)

        async def finish() -> T:
            return make(await self._answer(answer))

        return Answer(finish())

    def _begin(self, name: str, **arguments: Any) -> asyncio.Future[Any] | StreamClosed:  # noqa: ANN401
        try:
            return self._child.control.begin(name, **arguments)
        except StreamClosed as error:
            return error

    async def _answer(self, answer: asyncio.Future[Any] | StreamClosed) -> Any:  # noqa: ANN401
        """The answer, or the reason there is none, with the process's name and log."""
        try:
            if isinstance(answer, StreamClosed):
                raise answer
            return await answer
        except RemoteError as error:
            if error.kind in ("SyncError", "Superseded"):  # whoever publishes knows what to do
                raise (SyncError if error.kind == "SyncError" else Superseded)(error.message) from error
            raise self._child.failed(error) from error
        except StreamClosed as error:
            raise await self._child.explain() from error


def _is_of_the_disk(kind: str) -> bool:
    """A full disk, a folder that may not be written …: whatever `CheckpointStore` answers in one process."""
    known = getattr(builtins, kind, None)
    return kind == "SafetensorError" or (isinstance(known, type) and issubclass(known, OSError))


async def _nothing() -> None:
    """What a run in one process has to refresh."""


@dataclass(frozen=True)
class Around:
    """What the launcher does itself, wherever engines and trainer are."""

    scorer: Scorer
    environment: Environment
    encoder: PromptEncoder
    tasks: TaskStream
    canary: Batch
    """A fixed prompt, scored by trainer and engine at every version."""
    special_stops: tuple[int, ...] = ()
    """Special tokens that `sampling.stop` names."""


@dataclass(frozen=True)
class Roles:
    """Who does the work, made by `launch`."""

    engine: Engine
    trainer: TrainerRole
    around: Around
    stop_ids: tuple[int, ...]
    """Tokens that end a turn, by the tokenizer, by the model's generation settings and by `sampling.stop`."""
    services: tuple[Callable[[], Coroutine[None, None, None]], ...]
    """What must run beside the loops: the engine's own loop here, or the watch over other processes."""
    describe: Callable[[], str] = str
    """Each process in words, for an error: what it is at and where its log is."""
    versions: Callable[[], Mapping[str, int]] = dict
    """What each engine holds, where there are several."""
    engine_peak: Callable[[], int] = int
    """Bytes of memory that an engine has come to take at most; of several, the largest."""
    refresh: Callable[[], Awaitable[None]] = _nothing
    """Have every process say now how it has spent its time."""
