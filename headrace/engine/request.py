"""One generate call inside an engine or a pool of them, and how `generate` and `stream` wait for it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from headrace.engine.protocol import Increment, PromptTooLong, UnusablePrompt
from headrace.records import SAMPLED_ENTROPY, Call, FinishReason, Rollout, SamplingMask, join_masks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence

    from torch import Tensor

    from headrace.engine.protocol import OnTokens, RequestQueue
    from headrace.engine.shaping import Shaping
    from headrace.records import Array, Sampling

T = TypeVar("T")
LEAST_GROWTH = 1 / 8
"""An engine process reports a call again once it has grown by this share of what was reported, so that a long call needs few
reports; every `TELL_ALL`th time it reports all of them."""
TELL_ALL = 10
MOST_LEASES = 1 << 16
"""Of rollouts that an engine remembers: a bound on those that nobody releases."""


class SampledTokens(NamedTuple):
    """Tokens that a call has sampled, all of them or those of one report."""

    token_ids: Array
    logprobs: Array
    versions: Array
    masks: Sequence[Array] = ()
    entropies: Array | None = None
    """Of the distributions they were sampled from, if the engine records them."""


def pack_tokens(token_ids: Array, logprobs: Array, versions: Array) -> Array:
    """[n, 3] int32: the form in which sampled tokens are reported."""
    rows = np.empty((len(token_ids), 3), np.int32)
    rows[:, 0], rows.view(np.float32)[:, 1], rows[:, 2] = token_ids, logprobs, versions
    return rows


def unpack_tokens(rows: Array) -> tuple[Array, Array, Array]:
    """Token ids, logprobs and versions, as views."""
    return rows[:, 0], rows[:, 1].view(np.float32), rows[:, 2]


@dataclass(frozen=True, eq=False)
class HeldAdapter:
    """An older version of the adapter, whose memory is free when the last rollout that holds it ends; or one that is served
    under its own name."""

    version: int
    tensors: Mapping[str, Tensor]
    memory: Tensor | None = None
    """All of them as bytes, if they lie as the engine's own do."""
    lineage: str | None = None
    """Of the run that made it, if it is served under its own name; "" if that is unknown."""
    serial: int = field(default_factory=itertools.count(1).__next__)
    """Names it in the prefix cache: no other ever has it."""


@dataclass(eq=False, slots=True)
class Request:
    """One generate call. The fields below `started` are the native engine's bookkeeping."""

    rollout: Rollout
    sampling: Sampling
    on_done: Callable[[Rollout], None]
    """Called once, between two steps, with the extended rollout."""
    on_tokens: Callable[[Increment], None] | None = None
    """Called after every step of a stream."""
    on_failed: Callable[[Exception], None] | None = None
    """Called once instead of `on_done` if it cannot be generated; without it the engine itself fails."""
    is_streamed: bool = False
    """A client in another process waits for each of its tokens."""
    shaping: Shaping | None = None
    """What only `headrace serve` asks for."""
    key: int = -1
    """Its name between the pool and an engine process."""
    lineage: str | None = None
    """The lineage that sampled its first token. In an engine: None as long as that is the one it runs."""
    held: HeldAdapter | None = None
    """The adapter that it keeps, by `Interrupt.LEASE` or by its name; None as long as it runs the engine's own."""
    started: float = 0.0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values are in its blocks, counting steps in flight."""
    chain: Hashable = None
    """Key of its last block in the prefix cache; None once its blocks mix versions."""
    num_cached: int = 0
    """How many of its blocks are in the prefix cache."""
    needed_blocks: int = 0
    """How many had to be free when it was last refused a slot; 0 if it was not."""
    refused_after: int = 0
    """Chunks of prompts that had been computed by then: each may add a prefix that it shares to the cache."""
    leader: Request | None = None
    """The sibling that computes the prompt both share."""
    followers: list[Request] = field(default_factory=list)
    saved: SampledTokens | None = None
    """What it had sampled when its blocks were taken away."""
    masks: list[Array] = field(default_factory=list)
    num_reported: int = 0
    """Sampled tokens that `growth` has reported."""

    @property
    def adapter(self) -> int:
        """The serial number of the adapter that it holds; 0 if none."""
        return 0 if self.held is None else self.held.serial

    def check(self, *, context: int, vocabulary: int, has_tokenizer: bool) -> None:
        """Raise if no engine with this context and vocabulary can generate it."""
        rollout, length = self.rollout, len(self.rollout)
        if length >= context:
            raise PromptTooLong(f"rollout {rollout.id!r} has {length} tokens; the context is {context}")
        if length == 0:
            raise UnusablePrompt(f"rollout {rollout.id!r} is empty; a prompt has at least one token")
        highest = int(rollout.token_ids.max())
        if highest >= vocabulary:
            raise UnusablePrompt(f"rollout {rollout.id!r} holds token {highest}; the vocabulary has {vocabulary}")
        if self.sampling.stop and not has_tokenizer:
            raise UnusablePrompt(f"rollout {rollout.id!r} has stop strings; this engine was given no tokenizer")

    def extended(
        self,
        new: SampledTokens,
        reason: FinishReason,
        *,
        engine: str,
        policy: str,
        lineage: str,
        routing: Array | None = None,
        mask: SamplingMask | None = None,
        finished: float | None = None,
    ) -> Rollout:
        """Its rollout with the tokens that the call sampled; `mask` instead of `new.masks` if those are joined already. It has
        `finished` now, unless another time is given."""
        call = Call(
            start=len(self.rollout),
            stop=len(self.rollout) + len(new.token_ids),
            engine=engine,
            sampling=self.sampling,
            finish_reason=reason,
            started=self.started,
            finished=time.time() if finished is None else finished,
        )
        return append_call(
            self.rollout,
            call,
            token_ids=new.token_ids,
            logprobs=new.logprobs,
            versions=new.versions,
            masks=new.masks if mask is None else mask,
            entropies=new.entropies,
            policy=policy,
            lineage=lineage,
            expert_routing=routing,
        )


class CallEnd(NamedTuple):
    """How a call ended."""

    num_before: int
    """Its tokens before those that come with this."""
    reason: FinishReason
    finished: float
    routing: Array | None
    """Of all tokens of the rollout, if it is recorded."""


class SampledSince(NamedTuple):
    """What a request has sampled since the last report."""

    request: Request
    token_ids: Array
    logprobs: Array
    versions: Array
    masks: Sequence[Array] | SamplingMask
    lineage: str
    """The lineage that sampled its first token."""
    entropies: Array | None = None
    end: CallEnd | None = None
    """None while it runs."""

    @classmethod
    def rest(cls, request: Request, rollout: Rollout, *, num_before: int) -> SampledSince:
        """What an ended call has sampled but for its first `num_before` tokens."""
        first, mask, entropies = len(request.rollout) + num_before, rollout.sampling_mask, rollout.columns.get(SAMPLED_ENTROPY)
        end = CallEnd(num_before, rollout.calls[-1].finish_reason, rollout.calls[-1].finished, rollout.expert_routing)
        tokens = (rollout.token_ids[first:], rollout.logprobs[first:], rollout.versions[first:])
        masks = () if mask is None else mask.rest(first)
        return cls(request, *tokens, masks, rollout.lineage, None if entropies is None else entropies[first:], end)

    @property
    def rows(self) -> Array:
        return pack_tokens(self.token_ids, self.logprobs, self.versions)

    @property
    def num_bytes(self) -> int:
        """About what it takes in a message."""
        routing = None if self.end is None else self.end.routing
        masks = (self.masks.ids,) if isinstance(self.masks, SamplingMask) else self.masks
        return 12 * len(self.token_ids) + sum(each.nbytes for each in masks) + (0 if routing is None else routing.nbytes)


def pack_sampled(sampled: Sequence[SampledSince], *, policy: str) -> dict[str, Any]:
    """The message in which an engine process reports what calls have sampled, and which of them have ended."""
    return {
        "calls": [[each.request.key, len(each.token_ids), each.request.started, each.lineage, each.end] for each in sampled],
        "tokens": np.concatenate([each.rows for each in sampled]),
        "entropies": {str(place): each.entropies for place, each in enumerate(sampled) if each.entropies is not None},
        "masks": {str(place): mask for place, each in enumerate(sampled) if (mask := _as_mask(each.masks)) is not None},
        "policy": policy,
    }


def append_call(
    rollout: Rollout,
    call: Call,
    *,
    token_ids: Array,
    logprobs: Array,
    versions: Array,
    masks: Sequence[Array] | SamplingMask = (),
    entropies: Array | None = None,
    policy: str,
    lineage: str,
    expert_routing: Array | None = None,
) -> Rollout:
    """The rollout with a call's tokens. `masks` has a row for each of them, or none at all; `expert_routing` has a row for
    every token of the longer rollout, unknown where nothing was recorded.

    A rollout carries one lineage: that of its first sampled token. Say lineage B started from version 40 of lineage A. A's
    tokens up to 40 belong to B's history too; a token of A's version 41 comes from weights that no longer exist, and must not
    pass for one of B's. An engine cannot tell these apart, so a rollout continued in B stays under A's name, and is rejected as
    soon as it holds a token past 40: this may over-reject, never under-reject. A caller that knows the history truncates such a
    rollout before it resumes it, and may rename it (`headrace.partial.surviving_part`).
    """
    if rollout.calls and any(each.stop > each.start for each in rollout.calls):
        lineage = rollout.lineage
    mask = join_masks(rollout.sampling_mask, _as_mask(masks), num_old=call.start, num_new=len(token_ids))
    return rollout.extend(
        call,
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        policy=policy,
        lineage=lineage,
        sampling_mask=mask,
        expert_routing=expert_routing,
        entropies=entropies,
    )


def _as_mask(masks: Sequence[Array] | SamplingMask) -> SamplingMask | None:
    return masks if isinstance(masks, SamplingMask) else SamplingMask.from_rows(list(masks)) if masks else None


def checksum(rollout: Rollout, num_tokens: int) -> int:
    """Of its first tokens: whether two rollouts of the same id begin alike."""
    return zlib.crc32(rollout.token_ids[:num_tokens].data)


async def generate(
    engine: RequestQueue,
    rollout: Rollout,
    sampling: Sampling,
    *,
    on_tokens: OnTokens | None = None,
    make_request: type[Request] = Request,
) -> Rollout:
    """The rollout with one more call's tokens; cancelling the await cancels the call, and an `on_tokens` that raises too."""
    tell = _Teller(asyncio.get_running_loop())
    told = None if on_tokens is None else _from_any_thread(_failing(tell, on_tokens))
    request = make_request(rollout, sampling, on_done=tell, on_failed=tell, on_tokens=told)
    engine.submit([request], _refuse)
    try:
        answer = await tell.done
    except asyncio.CancelledError:
        engine.cancel([request])
        raise
    if isinstance(answer, Exception):
        if told is not None:
            engine.cancel([request])  # it may be what raised
        raise answer
    return answer


async def stream(
    engine: RequestQueue,
    rollout: Rollout,
    sampling: Sampling,
    *,
    shaping: Shaping | None = None,
    held: HeldAdapter | None = None,
    make_request: type[Request] = Request,
) -> AsyncIterator[Increment]:
    """The same call, token by token; closing the iterator cancels the call."""
    answers: asyncio.Queue[Increment | Rollout | Exception] = asyncio.Queue()
    answer: Increment | Rollout | Exception = Increment((), (), (), None)
    tell = _from_any_thread(answers.put_nowait)
    request = make_request(rollout, sampling, on_done=tell, on_failed=tell, on_tokens=tell, shaping=shaping, held=held)
    engine.submit([request], _refuse)
    try:
        while True:
            before, answer = answer, await answers.get()
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, Rollout):  # the reason came with its last token, unless it was aborted between two
                if isinstance(before, Increment) and before.finish_reason is None:
                    yield Increment((), (), (), answer.finish_reason)
                return
            yield answer
    finally:
        if isinstance(answer, Increment):
            engine.cancel([request])


class _Teller:
    """Takes a call's answer in any thread. One object where functions and their cells would be ten: with thousands of calls in
    flight, garbage collection takes as long as there are objects to look at."""

    __slots__ = ("_loop", "_thread", "done")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self.done: asyncio.Future[Rollout | Exception] = loop.create_future()

    def __call__(self, answer: Rollout | Exception) -> None:
        if threading.get_ident() != self._thread:
            self._loop.call_soon_threadsafe(self, answer)
        elif not self.done.done():  # otherwise the await was cancelled
            self.done.set_result(answer)


def _failing(tell: _Teller, on_tokens: OnTokens) -> OnTokens:
    """What `on_tokens` raises fails its call: the engine that tells it is not to blame."""

    def told(new: Increment) -> None:
        try:
            on_tokens(new)
        except Exception as error:  # noqa: BLE001  (`generate` raises it)
            tell(error)

    return told


def _refuse(request: Request, error: ValueError) -> None:
    assert request.on_failed is not None
    request.on_failed(error)


def _from_any_thread(tell: Callable[[T], None]) -> Callable[[T], None]:
    """Calls `tell` on this event loop: at once, or through the loop if called in another thread."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def call(value: T) -> None:
        if threading.get_ident() == thread:
            tell(value)
        else:
            loop.call_soon_threadsafe(tell, value)

    return call


async def run_to_the_end(work: Coroutine[Any, Any, None], *, on_cancel: Callable[[], None]) -> None:
    """Await work that must not stop halfway: when cancelled, call `on_cancel` and still wait for it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait([task])
        raise
