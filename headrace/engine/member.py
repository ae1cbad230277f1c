"""One engine process as the pool sees it: what it was sent, what it has told, what it may still be sent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.engine.append_tokens import lengthen
from headrace.engine.protocol import Increment, InFlight, NotFinite, PromptTooLong, UnusablePrompt
from headrace.errors import SyncError
from headrace.records import Call, FinishReason, WireError, pack_rollouts, pack_samplings, unpack_rollouts
from headrace.rpc import RemoteError, StreamClosed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from headrace.engine.pool import EnginePool
    from headrace.partial import Interrupt
    from headrace.records import Array, Rollout, Sampling, WeightUpdate
    from headrace.rpc import Peer

_REFUSED_UPDATES = {"SyncError", "WeightError"}
_REFUSALS = {"PromptTooLong": PromptTooLong, "UnusablePrompt": UnusablePrompt, "NotFinite": NotFinite}


@dataclass(eq=False, slots=True)
class PoolRequest:
    key: int
    rollout: Rollout
    sampling: Sampling
    answer: asyncio.Future[Rollout]
    increments: asyncio.Queue[Increment | Exception] | None = None
    """Where the news of a streamed rollout goes, a refusal too."""
    grown: list[Grown] = field(default_factory=list)
    """What is known to have been drawn so far."""


@dataclass(frozen=True, slots=True)
class Grown:
    token_ids: Array
    logprobs: Array
    versions: Array
    masks: list[Array]
    started: float
    policy: str
    lineage: str


class Member:
    """One engine process."""

    def __init__(self, name: str, *, control: Peer, on_report: Callable[[str, dict[str, Any]], None], log: str = "") -> None:
        self.name, self.control, self._log = name, control, log
        self.data: Peer | None = None
        self.credit = 0
        self.requests: dict[int, PoolRequest] = {}
        self.update: WeightUpdate | None = None
        """What it holds."""
        self.is_behind = False
        """The others hold newer weights: it goes on with what it has begun, and begins nothing."""
        self.pool: EnginePool | None = None
        self.is_lost = False
        self._on_report = on_report

    def notices(self) -> dict[str, Callable[[Any], None]]:
        """What its data stream may say."""
        return {
            "pull": self._take_pull,
            "done": self._take_done,
            "grown": self._take_grown,
            "refused": self._take_refused,
            "report": self._take_report,
        }

    async def load(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        await self.call("load", update=update, interrupt=interrupt.value)

    def version_of(self, lineage: str) -> int | None:
        """What it holds of a life of the trainer, if anything."""
        return self.update.version if self.update is not None and self.update.lineage == lineage else None

    async def call(self, name: str, **arguments: Any) -> Any:  # noqa: ANN401
        """A control call; what it raises there says here whose it is."""
        try:
            return await self.control.call(name, **arguments)
        except RemoteError as error:
            if error.kind == "EngineDied":  # its process ends too, and is started again
                raise StreamClosed(f"{self.name}: {error.message}") from error
            told = SyncError(error.message) if error.kind in _REFUSED_UPDATES else error
            told.add_note(f"in {self.name}, log {self._log}" if self._log else f"in {self.name}")
            raise told from error

    def send(self, requests: list[PoolRequest]) -> None:
        assert self.data is not None
        for request in requests:
            self.requests[request.key] = request
        self.credit -= len(requests)
        self.data.notify(
            "work",
            {
                "keys": np.asarray([request.key for request in requests], dtype=np.int64),
                "rollouts": pack_rollouts([request.rollout for request in requests]),
                "samplings": pack_samplings([request.sampling for request in requests]),
                "streamed": [request.key for request in requests if request.increments is not None],
            },
        )

    def partial(self, request: PoolRequest) -> Rollout:
        """A rollout as far as it is known to have come."""
        first, last = request.grown[0], request.grown[-1]  # the life it began in, and what is known last
        token_ids = np.concatenate([each.token_ids for each in request.grown])
        start = len(request.rollout)
        call = Call(
            start=start,
            stop=start + len(token_ids),
            engine=self.name,
            sampling=request.sampling,
            finish_reason=FinishReason.ABORT,
            started=first.started,
            finished=time.time(),
        )
        return lengthen(
            request.rollout,
            call,
            token_ids=token_ids,
            logprobs=np.concatenate([each.logprobs for each in request.grown]),
            versions=np.concatenate([each.versions for each in request.grown]),
            masks=[row for each in request.grown for row in each.masks],
            policy=last.policy,
            lineage=first.lineage,
        )

    def in_flight(self, request: PoolRequest) -> InFlight:
        """What is known of one that was sent here."""
        grown = request.grown
        return InFlight.of(
            request.rollout,
            num_drawn=sum(len(each.token_ids) for each in grown),
            first=int(grown[0].versions[0]) if grown else -1,
            partial=lambda: self.partial(request),
        )

    def _take_pull(self, count: int) -> None:
        self.credit += int(count)
        if self.pool is not None:
            self.pool.send_soon()

    def _take_done(self, value: Any) -> None:  # noqa: ANN401
        for key, rollout in zip(value["keys"].tolist(), unpack_rollouts(value["rollouts"]), strict=True):
            request = self.requests.pop(key, None)
            if request is None:
                continue  # cancelled meanwhile
            if request.increments is not None:
                request.increments.put_nowait(_last_increment(request, rollout))
            if not request.answer.done():
                request.answer.set_result(rollout)

    def _take_grown(self, value: Any) -> None:  # noqa: ANN401
        ends = np.cumsum(value["counts"])
        for place, key in enumerate(value["keys"].tolist()):
            request = self.requests.get(key)
            if request is None:
                continue
            part = slice(int(ends[place] - value["counts"][place]), int(ends[place]))
            mask = value["masks"].get(str(place))
            grown = Grown(
                token_ids=value["token_ids"][part],
                logprobs=value["logprobs"][part],
                versions=value["versions"][part],
                masks=[] if mask is None else [mask.row(row) for row in range(len(mask.offsets) - 1)],
                started=float(value["started"][place]),
                policy=value["policy"],
                lineage=value["lineages"][place],
            )
            request.grown.append(grown)
            if request.increments is not None:
                request.increments.put_nowait(_increment(grown))

    def _take_refused(self, value: Any) -> None:  # noqa: ANN401
        for key, kind, message in value:
            request = self.requests.pop(key, None)
            if request is None:
                continue
            refusal = _REFUSALS.get(kind, WireError)(message)
            if request.increments is not None:
                request.increments.put_nowait(refusal)
            elif not request.answer.done():
                request.answer.set_exception(refusal)

    def _take_report(self, report: dict[str, Any]) -> None:
        if not self.is_lost:  # a last one may lie unread when what it reported has been counted already
            self._on_report(self.name, report)


def _increment(grown: Grown) -> Increment:
    return Increment(
        tuple(grown.token_ids.tolist()), tuple(grown.logprobs.tolist()), tuple(grown.versions.tolist()), finish_reason=None
    )


def _last_increment(request: PoolRequest, rollout: Rollout) -> Increment:
    told = len(request.rollout) + sum(len(each.token_ids) for each in request.grown)
    return Increment(
        tuple(rollout.token_ids[told:].tolist()),
        tuple(rollout.logprobs[told:].tolist()),
        tuple(rollout.versions[told:].tolist()),
        rollout.finish_reason,
    )
