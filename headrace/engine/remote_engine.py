"""One engine process as the pool sees it, and the generate calls in flight."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.engine.protocol import Increment, InFlight, NotFinite, PromptTooLong, UnusablePrompt
from headrace.engine.request import CallEnd, Request, SampledTokens, checksum, unpack_tokens
from headrace.errors import LinkError, SyncError
from headrace.records import (
    FinishReason,
    WireError,
    answered,
    check_tokens,
    grown,
    is_prompt,
    join_masks,
    pack_rollouts,
    pack_samplings,
    portions,
    wire_errors,
)
from headrace.rpc import RemoteError, StreamClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.engine.pool import EnginePool
    from headrace.partial import Interrupt
    from headrace.records import Array, Rollout, SamplingMask, WeightUpdate
    from headrace.rpc import Peer

_MOST_HELD_BACK = 32  # calls that an engine with many slots has room for and is not sent until there are more
_MOST_BACKLOG = 8 << 20  # unread bytes at which an engine is sent no more
_NONE_KNOWN = np.empty((0, 3), np.int32)
_SHORT = 1024  # tokens, the prompt's included: rollouts of so many that end together share memory
_UNUSED: list[Any] = []  # for fields of engines alone: a list for each would triple what garbage collection looks at
_REFUSED_UPDATES = {"SyncError": SyncError, "WeightError": SyncError, "LinkError": LinkError}
_REFUSALS = {"PromptTooLong": PromptTooLong, "UnusablePrompt": UnusablePrompt, "NotFinite": NotFinite}


@dataclass(eq=False, slots=True)
class PoolRequest(Request):
    """A generate call in flight, waiting or sent. `rollout` stays as submitted."""

    blocks: list[int] = field(default_factory=lambda: _UNUSED)
    followers: list[Request] = field(default_factory=lambda: _UNUSED)
    masks: list[Array] = field(default_factory=lambda: _UNUSED)
    engine: RemoteEngine | None = None
    """Where it was sent; None while it waits."""
    known: Array = field(default_factory=lambda: _NONE_KNOWN)
    """[≥ n, 3] int32: what its engine has reported (`pack_tokens`), copied out of the messages, and room for more: at most 15
    bytes a token. The first `num_known` are never changed, so that other threads may read them."""
    num_known: int = 0
    mask: SamplingMask | None = None
    """Of the known tokens."""
    entropies: Array | None = None
    """Of the known tokens, if its engine records them."""
    oldest: int | None = None
    """The oldest version of the tokens of earlier calls, or else the version of the first known one."""
    policy: str = ""

    def add(self, new: Array, mask: SamplingMask | None, entropies: Array | None) -> None:
        """Its engine has reported more tokens."""
        start, stop = self.num_known, self.num_known + len(new)
        if self.oldest is None and stop > start:
            self.oldest = int(new[0, 2])
        if mask is not None or self.mask is not None:
            self.mask = join_masks(self.mask, mask, num_old=start, num_new=len(new))
        if stop > len(self.known):
            known, self.known = self.known, np.empty((stop + stop // 4, 3), np.int32)
            self.known[:start] = known[:start]
        self.known[start:stop], self.num_known = new, stop
        if entropies is not None:  # an engine that records none still has a column of earlier calls when the call ends
            self.entropies = grown(np.zeros(start, np.float32) if self.entropies is None else self.entropies, entropies)

    def in_flight(self) -> InFlight:
        return InFlight(self.rollout, self.num_known, self.oldest, functools.partial(self.partial, *self.reported))

    @property
    def reported(self) -> tuple[Array, SamplingMask | None, Array | None]:
        return self.known[: self.num_known], self.mask, self.entropies

    def partial(self, known: Array, mask: SamplingMask | None, entropies: Array | None, end: CallEnd | None = None) -> Rollout:
        """The rollout with the known tokens and `ABORT`, or as submitted if there are none; or as its call ended."""
        if end is None and not len(known):
            return self.rollout
        assert self.engine is not None and self.lineage is not None
        tokens = SampledTokens(*unpack_tokens(known), entropies=entropies)
        names: dict[str, Any] = {"engine": self.engine.name, "policy": self.policy, "lineage": self.lineage}
        if end is None:
            return self.extended(tokens, FinishReason.ABORT, **names, mask=mask)
        return self.extended(tokens, end.reason, **names, mask=mask, routing=end.routing, finished=end.finished)


class _Ended(NamedTuple):
    """A call that has ended."""

    request: PoolRequest
    end: CallEnd
    unknown: Array
    """What was not reported before."""
    known: Array
    """All its tokens."""
    mask: SamplingMask | None
    entropies: Array | None

    @property
    def is_first(self) -> bool:
        """The rollout's first call, with nothing but tokens."""
        has_more = self.mask is not None or self.entropies is not None or self.end.routing is not None
        return not has_more and is_prompt(self.request.rollout)

    @property
    def is_short(self) -> bool:
        return len(self.request.rollout) + len(self.known) <= _SHORT


WaitingQueue = OrderedDict[PoolRequest, None]


class RemoteEngine:
    """One engine process."""

    def __init__(
        self,
        name: str,
        pool: EnginePool,
        *,
        control: Peer,
        on_report: Callable[[str, dict[str, Any]], None],
        log: str = "",
        clock_ahead: float = 0.0,
    ) -> None:
        """`clock_ahead`: seconds by which its host's clock is ahead of the launcher's."""
        self.name, self.control, self._log = name, control, log
        self.data: Peer | None = None
        self.credit = 0  # calls it may still be sent: it pulls as many as it has room for
        self.requests: dict[int, PoolRequest] = {}  # those sent to it that have not ended, by key
        self.bound: WaitingQueue = OrderedDict()  # calls that continue rollouts it generated
        self.update: WeightUpdate | None = None  # the weights it holds
        self.is_behind = False  # others hold newer weights: it finishes its calls, and gets no new ones until it catches up
        self.is_lost = False
        self.is_leaving = False  # it finishes its calls, and gets no others
        self.relieved_by: RemoteEngine | None = None  # gets the calls that it returns
        self.has_returned_all = asyncio.Event()  # since it was recalled, or it is lost
        self._pool, self._on_report = pool, on_report
        self._cancelled: list[int] = []
        self._released: list[str] = []
        self._joined_at = time.time() + clock_ahead  # as its own clock says, as `Call.started`

    def notices(self) -> dict[str, Callable[[Any], None]]:
        """Handlers of the data stream's messages."""
        return {
            "pull": self._take_pull,
            "sampled": self._take_sampled,
            "refused": self._take_refused,
            "missing": self._take_missing,
            "returned": self._take_returned,
            "recalled": lambda _: self.has_returned_all.set(),
            "report": self._take_report,
        }

    @property
    def takes_work(self) -> bool:
        return self.has_room and self.is_taking and not (self.is_lost or self.data is None or self.has_backlog)

    @property
    def has_room(self) -> bool:
        """Whether it has pulled enough for a message: a quarter of its slots, or one call that continues its own. With less
        room it still has calls waiting for three quarters of its slots, and another one would only wait there too."""
        num_slots = self.room // 2
        return self.credit >= (1 if self.bound else max(1, min(num_slots // 4, _MOST_HELD_BACK)))

    @property
    def is_taking(self) -> bool:
        """Whether it gets calls at all."""
        return not (self.is_behind or self.is_leaving)

    @property
    def num_free_slots(self) -> int:
        """It pulls twice as many calls as it has slots."""
        return (self.credit - len(self.requests)) // 2

    @property
    def room(self) -> int:
        """Calls it has pulled and not ended."""
        return self.credit + len(self.requests)

    @property
    def share_of_room(self) -> float:
        return self.credit / self.room

    @property
    def has_backlog(self) -> bool:
        """It has yet to read much of what it was sent."""
        return self.data is not None and self.data.stream.backlog >= _MOST_BACKLOG

    async def load(self, update: WeightUpdate, interrupt: Interrupt) -> None:
        await self.call("load", update=update, interrupt=interrupt.value)

    def version_of(self, lineage: str) -> int | None:
        """The version it holds of this lineage, if any."""
        return self.update.version if self.update is not None and self.update.lineage == lineage else None

    async def call(self, name: str, **arguments: Any) -> Any:  # noqa: ANN401
        """A control call. The engine's exceptions are raised here, with its name and log."""
        try:
            return await self.control.call(name, **arguments)
        except RemoteError as error:
            if error.kind == "EngineDied":  # its process ends too, and is restarted
                raise StreamClosed(f"{self.name}: {error.message}") from error
            told = _REFUSED_UPDATES[error.kind](error.message) if error.kind in _REFUSED_UPDATES else error
            told.add_note(f"in {self.name}, log {self._log}" if self._log else f"in {self.name}")
            raise told from error

    def send(self, requests: list[PoolRequest]) -> None:
        assert self.data is not None
        for request in requests:
            request.engine = self
            self.requests[request.key] = request
        self.credit -= len(requests)
        self._send_since(self.data, requests, [self._num_held(request.rollout) for request in requests])

    def _num_held(self, rollout: Rollout) -> int:
        """How many of its tokens the engine should have, because it sent them; the rest is all that it is sent."""
        if not rollout.calls or rollout.calls[-1].engine != self.name or rollout.expert_routing is not None:
            return 0
        if rollout.calls[-1].started < self._joined_at:
            return 0  # the process before it, of the same name, had them: to ask first would let newer calls go before
        stop = rollout.calls[-1].stop
        return stop if rollout.parent is None or rollout.parent[1] < stop else 0  # a new fork has another id

    def _send_since(self, data: Peer, requests: list[PoolRequest], starts: list[int]) -> None:
        rollouts = [request.rollout for request in requests]
        parts = [each.since(start, num_calls=len(each.calls)) for each, start in zip(rollouts, starts, strict=True)]
        for span in portions([each.num_bytes for each in parts]):
            self._send_portion(data, requests[span], parts[span], starts[span])

    def _send_portion(self, data: Peer, requests: list[PoolRequest], parts: list[Rollout], starts: list[int]) -> None:
        pairs = zip(requests, starts, strict=True)
        try:
            data.notify(
                "work",
                {
                    "keys": np.asarray([request.key for request in requests], dtype=np.int64),
                    "rollouts": pack_rollouts(parts),
                    "held": [[start, checksum(request.rollout, start)] if start else None for request, start in pairs],
                    "samplings": pack_samplings([request.sampling for request in requests]),
                    "streamed": [request.key for request in requests if request.on_tokens is not None],
                },
            )
        except WireError as error:  # fails the one that cannot be sent, not those beside it
            for request, part, start in zip(requests, parts, starts, strict=True):
                if len(requests) > 1:
                    self._send_portion(data, [request], [part], [start])
                elif self.requests.pop(request.key, None) is not None:
                    self.credit += 1
                    self._pool.on_pull(self)
                    assert request.on_failed is not None
                    request.on_failed(error)

    def cancel(self, request: PoolRequest) -> None:
        """Tell it in the next turn of the event loop, so that calls cancelled together go in one message."""
        if self.requests.pop(request.key, None) is None:
            return  # it has ended
        self._tell_soon()
        self._cancelled.append(request.key)

    def release(self, rollout_ids: Sequence[str]) -> None:
        """Likewise."""
        self._tell_soon()
        self._released += rollout_ids

    def give_back(self, count: int, *, to: RemoteEngine) -> None:
        """Have it return up to so many calls that it has not started."""
        assert self.data is not None
        self.relieved_by = to
        self.data.notify("give_back", count)

    async def return_all(self) -> None:
        """Have it return everything it was sent; what it has started ends where it is."""
        assert self.data is not None
        self.has_returned_all.clear()
        self.data.notify("recall", None)  # on the data stream, behind the work that it may not have read yet
        await self.has_returned_all.wait()

    def _tell_soon(self) -> None:
        if not self._cancelled and not self._released:
            asyncio.get_running_loop().call_soon(self._tell_ended)

    def _tell_ended(self) -> None:
        told, self._cancelled, self._released = {"cancel": self._cancelled, "release": self._released}, [], []
        assert self.data is not None
        try:
            for name, values in told.items():
                if values:
                    self.data.notify(name, values)  # on the data stream, behind the work it is about
        except StreamClosed:
            self._pool.lose(self)

    def _take_pull(self, count: int) -> None:
        self.credit += int(count)
        self._pool.on_pull(self)

    def _take_sampled(self, value: Any) -> None:  # noqa: ANN401
        calls, tokens, ended = value["calls"], value["tokens"], list[_Ended]()
        offsets = [0, *itertools.accumulate(count for _, count, *_ in calls)]
        if tokens.dtype != np.int32 or tokens.shape != (offsets[-1], 3):
            raise WireError(f"{self.name} reported {tokens.dtype} {tokens.shape}, not the tokens of {len(calls)} calls")
        entropies, masks = value["entropies"], value["masks"]
        with wire_errors(f"{self.name} reported"):  # checked once, before they are kept
            arrays = dict(zip(("token_ids", "logprobs", "versions"), unpack_tokens(tokens), strict=True))
            check_tokens(arrays, ids=[f"of call {key}" for key, *_ in calls], offsets=offsets)
        try:
            for place, (key, count, started, lineage, end) in enumerate(calls):
                start, stop = offsets[place], offsets[place + 1]
                request = self.requests.get(key)
                if request is None:
                    continue  # it was cancelled, or moved to another engine because this one is lost
                if not request.num_known:
                    request.started, request.lineage, request.policy = float(started), lineage, value["policy"]
                new, mask, of_new = tokens[start:stop], masks.get(str(place)), entropies.get(str(place))
                if (mask is not None and len(mask.offsets) != count + 1) or (of_new is not None and of_new.shape != (count,)):
                    raise WireError(f"{self.name} reported {count} tokens, and masks or entropies of another number")
                if end is not None:
                    ended.append(self._ended(request, new, mask, of_new, end))
                    continue
                request.add(new, mask, of_new)
                if request.on_tokens is not None:
                    request.on_tokens(_increment(new))
        finally:  # what comes before something wrong is right: calls that ended are not resumed
            if ended:
                self._end(ended)

    def _ended(
        self, request: PoolRequest, new: Array, mask: SamplingMask | None, entropies: Array | None, told: list[Any]
    ) -> _Ended:
        """`new`: what the call has sampled since the last report, or all of it."""
        with wire_errors(f"{self.name} ended a call"):
            num_before, reason, finished, routing = told
            end = CallEnd(num_before, FinishReason(reason), float(finished), routing)
            if num_before not in (0, request.num_known):
                problem = f"it goes on from token {num_before}, but {request.num_known} were reported"
                raise WireError(f"{request.rollout.id!r}: {problem}")
        if not num_before:
            return _Ended(request, end, new[request.num_known :], new, mask, entropies)
        request.add(new, mask, entropies)
        return _Ended(request, end, new, *request.reported)

    def _end(self, ended: list[_Ended]) -> None:
        """Calls have ended. Short ones are extended together; a long one gets memory of its own, which no other keeps. One that
        is wrong stays in flight, alone."""
        short: list[_Ended] = []
        done: list[tuple[_Ended, Rollout]] = []
        wrong: WireError | None = None
        for each in ended:
            if not each.is_first:
                try:
                    with wire_errors(f"{self.name} ended {each.request.rollout.id!r}"):
                        done.append((each, each.request.partial(each.known, each.mask, each.entropies, each.end)))
                except WireError as error:
                    wrong = wrong or error
            elif each.is_short:
                short.append(each)
            else:
                done += self._answered([each])
        for each, rollout in done + self._answered(short):
            request = each.request
            del self.requests[request.key]
            self._pool.num_sampled[self.name] += len(each.known)
            if request.on_tokens is not None:
                request.on_tokens(_increment(each.unknown, rollout.finish_reason))
            request.on_done(rollout)
        if wrong is not None:
            raise wrong

    def _answered(self, ended: list[_Ended]) -> list[tuple[_Ended, Rollout]]:
        """Each with its rollout, which share memory."""
        if not ended:
            return []
        requests, counts = [each.request for each in ended], [len(each.known) for each in ended]
        known = ended[0].known if len(ended) == 1 else np.concatenate([each.known for each in ended])
        made = answered(
            [request.rollout for request in requests],
            *unpack_tokens(known),
            counts=counts,
            engine=self.name,
            policies=[request.policy for request in requests],
            lineages=[str(request.lineage) for request in requests],
            reasons=[each.end.reason for each in ended],
            sampling=[request.sampling for request in requests],
            started=[request.started for request in requests],
            finished=[each.end.finished for each in ended],
        )
        return list(zip(ended, made, strict=True))

    def _take_refused(self, value: Any) -> None:  # noqa: ANN401
        for key, kind, message in value:
            request = self.requests.pop(key, None)
            if request is not None:
                assert request.on_failed is not None
                request.on_failed(_REFUSALS.get(kind, WireError)(message))

    def _take_missing(self, keys: list[int]) -> None:
        """It has no longer what it was sent the rest of: it is sent the whole, or if it leaves another engine is."""
        assert self.data is not None
        if self.is_leaving:  # sent again behind a recall, they would stay with an engine that sleeps
            self.credit += len(keys)
            return self._take_returned(keys)
        requests = [self.requests[key] for key in keys if key in self.requests]
        if len(requests) < len(keys):  # cancelled meanwhile: the engine has never heard of them
            self.credit += len(keys) - len(requests)
            self._pool.on_pull(self)
        try:
            self._send_since(self.data, requests, [0] * len(requests))
        except StreamClosed:
            self._pool.lose(self)

    def _take_returned(self, keys: list[int]) -> None:
        requests = [self.requests.pop(key, None) for key in keys]
        self._pool.on_returned(self, [request for request in requests if request is not None])  # not cancelled meanwhile

    def _take_report(self, report: dict[str, Any]) -> None:
        if not self.is_lost:  # otherwise it is a last, late report, which has been counted already
            self._on_report(self.name, report)


def _increment(new: Array, reason: FinishReason | None = None) -> Increment:
    token_ids, logprobs, versions = (tuple(each.tolist()) for each in unpack_tokens(new))
    return Increment(token_ids, logprobs, versions, reason)
