"""A trainer in other processes: forwards every call to the `LocalTrainer` of each of its ranks."""

from __future__ import annotations

import asyncio
import builtins
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.algorithms import PROXIMAL
from headrace.errors import SyncError
from headrace.records import Batch, WeightUpdate, pack_batch
from headrace.rpc import RemoteError, StreamClosed
from headrace.trainer.protocol import Published, Superseded

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence
    from pathlib import Path

    from headrace.durable import Fingerprints
    from headrace.launch import RoleProcess
    from headrace.records import Array
    from headrace.trainer.protocol import Metrics

T = TypeVar("T")
_BLAME_SECONDS = 5.0
"""How long a rank that lost another waits for the launcher to notice which."""
_OF_GROUP = ("RankError", "DistBackendError", "DistNetworkError")
_PEAK = "memory_peak"


class Answer(Generic[T]):
    """The answer to a call already sent. Cancelling the await does not cancel the call; awaiting it is optional."""

    def __init__(self, answering: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.ensure_future(answering)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.shield(self._task).__await__()


class RemoteTrainer:
    """A `PolicyTrainer` over the streams of its ranks' processes. A call is sent to all of them at once, and each runs its
    calls in the order they were sent, so that the ranks meet in every collective. The answer is rank 0's, unless each has a
    part of it."""

    is_inline = False

    def __init__(self, ranks: Sequence[RoleProcess], *, deadline: float) -> None:
        """`deadline`: seconds that loading a checkpoint may take. Saving runs beside training, however slow the disk."""
        self._ranks, self._deadline = tuple(ranks), deadline
        self._releasing = asyncio.Lock()  # ranks must agree on which updates they have released
        self._senders = list(ranks)  # those with a part of the weights: not all, if some are replicas of others
        self._is_broken = False  # one rank raised an error, and others wait for it in a collective
        self.num_steps = 0

    @property
    def is_lost(self) -> bool:
        return self._is_broken or any(rank.lost.is_set() for rank in self._ranks)

    @property
    def num_passes(self) -> int:
        return min(int(rank.state.get("passes", 0)) for rank in self._ranks)

    async def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        return list(await self._call("forward", batch=batch, column=column))

    def step(self, batch: Batch, *, learning_rate: float) -> Answer[Metrics]:
        self.num_steps += batch.is_last
        return self._call("step", _joined_metrics, batch=batch, learning_rate=learning_rate)

    def publish(self, version: int, *, canary: Batch, whole: bool = False) -> Answer[Published]:
        def joined(answers: Sequence[tuple[WeightUpdate, Array]]) -> Published:
            updates, canaries = zip(*answers, strict=True)
            self._senders = [rank for rank, update in zip(self._ranks, updates, strict=True) if update.parts]
            return Published(_join([update for update in updates if update.parts] or updates[:1]), canaries[0])

        return self._call("publish", joined, version=version, canary=canary, whole=whole)

    async def send(self, update: WeightUpdate, receivers: Sequence[str]) -> None:
        """Each rank pushes its part, in the order in which receivers fetch them: none waits for another's."""
        for rank in self._senders:
            await self._call("send", ranks=[rank], update=update, receivers=list(receivers))

    async def catch_up(self, version: int | None) -> list[WeightUpdate]:
        async with self._releasing:
            offered = await self._call("catch_up", list, ranks=self._senders, version=version)
        if len({len(each) for each in offered}) > 1:
            raise SyncError(f"the ranks of the trainer offer {[len(each) for each in offered]} updates to catch up")
        return [_join(updates) for updates in zip(*offered, strict=True)]

    async def release(self, update: WeightUpdate) -> None:
        async with self._releasing:
            await self._call("release", update=update)

    async def abort(self, update: WeightUpdate) -> None:
        await self._call("abort", update=update)

    async def abandon(self) -> None:
        await self._call("abandon")

    def save(self, folder: Path) -> Answer[Fingerprints]:
        return Answer(self._saved(folder, self._send_folder("save", folder)))

    async def _saved(self, folder: Path, answers: Sequence[asyncio.Future[Any]]) -> Fingerprints:
        """What the ranks have written, once it is in the folder."""
        saved = await self._collect("save", self._ranks, answers)
        return {name: found for files in saved for name, found in files.items()}

    async def load(self, folder: Path) -> None:
        answers = self._send_folder("load", folder)
        try:
            async with asyncio.timeout(self._deadline):
                await self._collect("load", self._ranks, answers)
        except TimeoutError as error:
            late = [rank for rank, answer in zip(self._ranks, answers, strict=True) if not answer.done()]
            for rank in late:
                rank.give_up(f"does not load a checkpoint within {self._deadline:g} s (deadline)")
            raise await late[0].explain() from error

    def _call(
        self,
        name: str,
        make: Callable[[list[Any]], T] = lambda answers: answers[0],
        *,
        ranks: Sequence[RoleProcess] = (),
        **arguments: Any,  # noqa: ANN401
    ) -> Answer[T]:
        """Send a call to these ranks, or all, now; `make` turns their answers into one."""
        answers = self._send(name, ranks or self._ranks, **arguments)

        async def result() -> T:
            return make(await self._collect(name, ranks or self._ranks, answers))

        return Answer(result())

    def _send_folder(self, name: str, folder: Path) -> list[asyncio.Future[Any]]:
        return [_begin(rank, name, {"folder": self._folder_of(rank, folder)}) for rank in self._ranks]

    def _folder_of(self, rank: RoleProcess, folder: Path) -> str:
        """What a rank calls a folder of the launcher's."""
        return str(folder)

    def _send(self, name: str, ranks: Sequence[RoleProcess], **arguments: Any) -> list[asyncio.Future[Any]]:  # noqa: ANN401
        packed = {key: pack_batch(value) if isinstance(value, Batch) else value for key, value in arguments.items()}
        return [_begin(rank, name, packed) for rank in ranks]

    async def _collect(self, name: str, ranks: Sequence[RoleProcess], answers: Sequence[asyncio.Future[Any]]) -> list[Any]:
        await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        if any(answer.done() and answer.exception() for answer in answers):
            raise await self._failure(name, ranks, answers)
        return [answer.result() for answer in answers]

    async def _failure(self, name: str, ranks: Sequence[RoleProcess], answers: Sequence[asyncio.Future[Any]]) -> Exception:
        """Who is to blame. When a rank dies, raises or hangs, the collectives of the others fail, often before it is noticed
        here."""

        def errors() -> dict[RoleProcess, BaseException | None]:
            return {rank: answer.exception() for rank, answer in zip(ranks, answers, strict=True) if answer.done()}

        seen, end = errors(), time.monotonic() + _BLAME_SECONDS
        while all(error is None or _is_of_group(error) for error in seen.values()) and not self.is_lost:
            if len(seen) == len(ranks) or time.monotonic() > end:
                break
            await asyncio.sleep(_BLAME_SECONDS / 100)
            seen = errors()
        for rank, error in seen.items():
            if isinstance(error, RemoteError) and not _is_of_group(error):
                raised = self._raised(rank, name, error)
                if isinstance(raised, OSError):
                    await asyncio.wait(answers)  # the others still write into the folder, which is removed now
                self._is_broken = len(seen) < len(ranks) and not isinstance(raised, SyncError | Superseded | OSError)
                return raised
        closed = [rank for rank, error in seen.items() if isinstance(error, StreamClosed)]
        gone = next((rank for rank in (*closed, *self._ranks) if rank in closed or rank.lost.is_set()), None)
        if gone is None:  # none has ended, so one hangs: the one that has not even missed the others
            silent = [rank for rank in self._ranks if rank not in seen]
            gone = (silent or list(ranks))[0]
            told = next(str(error) for error in seen.values() if error is not None)
            gone.give_up(f"hangs in {name!r}" if silent else f"has lost the other ranks: {told}")
        return await gone.explain()

    def _raised(self, rank: RoleProcess, name: str, error: RemoteError) -> Exception:
        """Return the original error if publishing or the checkpoint store handles it, else a failure of the process."""
        if error.kind in ("SyncError", "Superseded"):
            return (SyncError if error.kind == "SyncError" else Superseded)(error.message)
        known = getattr(builtins, error.kind, None)
        is_of_disk = error.kind == "SafetensorError" or (isinstance(known, type) and issubclass(known, OSError))
        return OSError(error.message) if name == "save" and is_of_disk else rank.failed(error)


def _begin(rank: RoleProcess, name: str, arguments: dict[str, Any]) -> asyncio.Future[Any]:
    try:
        return rank.control.begin(name, **arguments)
    except StreamClosed as error:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(error)
        return answer


def _is_of_group(error: BaseException) -> bool:
    """Whether a rank only reports that it has lost another, or has itself ended."""
    return isinstance(error, StreamClosed) or (isinstance(error, RemoteError) and error.kind in _OF_GROUP)


def _joined_metrics(answers: Sequence[Metrics]) -> Metrics:
    """Ranks have the same, but each its own memory."""
    peaks = [each[_PEAK] for each in answers if _PEAK in each]
    return {**answers[0], **({_PEAK: max(peaks)} if peaks else {})}


def _join(updates: Sequence[WeightUpdate]) -> WeightUpdate:
    try:
        return WeightUpdate.join(updates)
    except ValueError as error:
        raise SyncError(str(error)) from error
