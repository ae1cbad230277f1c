"""The calls of a vLLM engine: as many run at the server as it has slots, each a stream of its own; the others wait here.

So the engine knows what runs and what waits, an interrupt reaches exactly the calls that have started, and when the server is
lost, every call is known up to the last piece received.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.protocol import EngineDied, NotFinite, PromptTooLong, UnusablePrompt
from headrace.engine.vllm.api import VllmError, VllmGone, VllmRefused
from headrace.engine.vllm.running_call import RunningCall
from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headrace.engine.request import Request, SampledSince
    from headrace.engine.vllm.api import Piece, VllmApi
    from headrace.observe import Timeline


@dataclass(frozen=True)
class Limits:
    """What the server was started with, or reports."""

    slots: int
    context: int
    vocabulary: int
    block_size: int = 16
    num_blocks: int = 0
    num_candidates: int = 0
    """The most logprobs per token."""


class CallQueue:
    """Waiting and running calls. Used from one event loop."""

    def __init__(
        self,
        api: VllmApi,
        *,
        name: str,
        model: str,
        limits: Limits,
        timeline: Timeline,
        names_versions: bool,
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        """`model` is the server's name for its model; `names_versions`: it reports the version of every token."""
        self.name, self.limits = name, limits
        self.version, self.lineage, self.policy = -1, "", ""
        self.after_step: Callable[[], None] = lambda: None
        self.died: Future[None] = Future()  # fails with the reason when the engine can no longer generate
        self._api, self._model, self._timeline, self._decode = api, model, timeline, decode
        self._names_versions = names_versions
        self._waiting: OrderedDict[Request, RunningCall] = OrderedDict()
        self._running: dict[Request, RunningCall] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_paused, self._is_admitting, self._is_swapping = False, True, False
        self._has_bad_cache = False  # its KV cache may hold NaN, for good: vLLM multiplies freed blocks by 0, which keeps NaN
        self._num_sampled = self._num_started = 0
        self._heard_at = time.monotonic()
        self._note()

    @property
    def num_slots(self) -> int:
        return self.limits.slots

    @property
    def salt(self) -> str:
        """Keeps new calls from using prefixes that older weights cached."""
        return f"{self.lineage}:{self.version}"

    # Requests come and go

    def begin(self, request: Request) -> None:
        """Queue it; raises if it cannot be generated."""
        self._raise_if_dead()
        self._check(request)
        self._waiting[request] = RunningCall(request)
        self._fill()

    def withdraw(self, request: Request) -> None:
        """Cancel it: closing its stream ends the call at the server."""
        self._waiting.pop(request, None)
        if request in self._running:
            self._running[request].end()

    def submit(self, requests: Sequence[Request], on_refused: Callable[[Request, ValueError], None]) -> None:
        for request in requests:
            try:
                self.begin(request)
            except ValueError as error:
                on_refused(request, error)

    def cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.withdraw(request)

    def growth(self, requests: Iterable[Request] | None = None) -> list[SampledSince]:
        calls = self._running.values() if requests is None else [self._running[r] for r in requests if r in self._running]
        return [grown for call in calls if (grown := call.growth()) is not None]

    def _check(self, request: Request) -> None:
        rollout, limits = request.rollout, self.limits
        length = len(rollout)
        if length >= limits.context:
            raise PromptTooLong(f"rollout {rollout.id!r} has {length} tokens; the context is {limits.context}")
        if length == 0:
            raise UnusablePrompt(f"rollout {rollout.id!r} is empty; a prompt has at least one token")
        highest = int(rollout.token_ids.max())
        if highest >= limits.vocabulary:
            raise UnusablePrompt(f"rollout {rollout.id!r} holds token {highest}; the vocabulary has {limits.vocabulary}")
        if request.sampling.stop and self._decode is None:
            raise UnusablePrompt(f"rollout {rollout.id!r} has stop strings; this engine was given no tokenizer")

    # One call

    def _fill(self) -> None:
        """Send as many calls as there are free slots."""
        while self._waiting and len(self._running) < self.limits.slots and self._is_admitting and not self._is_paused:
            if not self._running:
                self._heard_at = time.monotonic()
            request, call = self._waiting.popitem(last=False)
            self._running[request] = call
            self._idle.clear()
            request.started = time.time()
            self._num_started += 1
            call.task = asyncio.ensure_future(self._run(call, f"{self.name}-{self._num_started}"))
        self._note()

    async def _run(self, call: RunningCall, name: str) -> None:
        request = call.request
        try:
            await self._read(call, name)
        except asyncio.CancelledError:
            if not call.is_over:  # the process is ending
                raise
        except VllmRefused as error:
            _fail(request, UnusablePrompt(f"rollout {request.rollout.id!r}: {error}"))
        except (NotFinite, UnusablePrompt) as error:
            self._has_bad_cache = self._has_bad_cache or isinstance(error, NotFinite)
            _fail(request, error)
        except VllmError as error:
            self._die(error)
        except Exception as error:  # noqa: BLE001  (whatever it is, callers must not wait forever)
            self._die(VllmGone(f"vLLM at {self._api.url}: its answer could not be read: {error!r}, log {self._api.log}"))
        finally:
            if self._running.get(request) is call:
                del self._running[request]
            if not self._running:
                self._idle.set()
            self._fill()
            self.after_step()

    async def _read(self, call: RunningCall, name: str) -> None:
        rollout, sampling, limits = call.request.rollout, call.request.sampling, self.limits
        pieces = self._api.generate(
            rollout.token_ids.tolist(),
            sampling,
            name=name,
            max_tokens=min(sampling.max_tokens, limits.context - len(rollout)),
            seed=call.seed,
            salt=self.salt,
            num_candidates=call.num_candidates(limits.vocabulary, limits.num_candidates),
            model=self._model,
            every=call.tokens_together() if self._names_versions else 1,  # otherwise all must have come before weights change
        )
        async with contextlib.aclosing(pieces):  # however it ends, the stream is closed, which ends the call at the server
            async for piece in pieces:
                self._heard_at = time.monotonic()
                if self._take(call, piece):
                    break

    def _take(self, call: RunningCall, piece: Piece) -> bool:
        """Append a piece; returns whether the call is over."""
        self._num_sampled += len(piece.token_ids)
        vocabulary = self.limits.vocabulary
        reason = call.take(piece, version=self.version, lineage=self.lineage, decode=self._decode, vocabulary=vocabulary)
        if reason is None:
            self.after_step()
            return False
        if piece.spans is not None and self._names_versions:
            call.stamp(piece.spans)
        if call.num_known < call.num_sampled and reason is not FinishReason.ABORT:
            raise VllmGone(f"vLLM at {self._api.url} ended a call without naming the weights of it, log {self._api.log}")
        self._finish(call, reason)
        return True

    def _finish(self, call: RunningCall, reason: FinishReason) -> None:
        rollout = call.rollout(reason, engine=self.name, policy=self.policy, lineage=call.lineage or self.lineage)
        call.is_over = True
        del self._running[call.request]
        call.request.on_done(rollout)

    def _put_back(self, call: RunningCall) -> None:
        """Return a call that has sampled nothing to the front of the queue."""
        self._waiting[call.request] = RunningCall(call.request)
        self._waiting.move_to_end(call.request, last=False)

    # When the server is lost

    def _die(self, error: Exception) -> None:
        """Fail all calls in flight; the pool continues them on other engines from the tokens it knows."""
        if self.died.done():
            return
        self.died.set_exception(error)
        for call in [*self._running.values(), *self._waiting.values()]:
            if not call.is_over:
                _fail(call.request, EngineDied(str(error)))
                call.end()
        self._waiting.clear()
        self._idle.set()

    def _raise_if_dead(self) -> None:
        if self.died.done():
            error = self.died.exception()
            raise EngineDied(str(error)) from error

    def _note(self) -> None:
        """Tell the time budget what the engine does from now on."""
        self._timeline.count(occupied=len(self._running), slots=self.limits.slots)
        paused = "swap" if self._is_swapping else "wait-weights" if self._is_paused else ""
        self._timeline.enter(paused or ("decode" if self._running else "wait-gate"))


def _fail(request: Request, error: Exception) -> None:
    if request.on_failed is None:
        raise error
    request.on_failed(error)
