"""One generate call inside an engine, and how `generate` and `stream` wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headrace.engine.protocol import Increment, PromptTooLong, UnusablePrompt
from headrace.records import FinishReason, Rollout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Sequence

    from headrace.records import Array, Sampling

    PrefixKey = tuple[tuple[str, int] | None, bytes]
    """Where a rollout was forked, if it was, and its token ids: requests for which both are equal share their KV blocks."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens sampled so far in a call."""

    token_ids: Array
    logprobs: Array
    versions: Array


@dataclass(eq=False, slots=True)
class Request:
    """One generate call. The fields below `is_streamed` are the native engine's bookkeeping."""

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
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values are in its blocks, counting steps in flight."""
    chain: Hashable = None
    """Key of its last block in the prefix cache; None once its blocks mix versions."""
    num_cached: int = 0
    """How many of its blocks are in the prefix cache."""
    leader: Request | None = None
    """The sibling that computes the prompt both share."""
    followers: list[Request] = field(default_factory=list)
    leading: PrefixKey | None = None
    """The key under which others find the prompt it computes, to follow it."""
    saved: SampledTokens | None = None
    """What it had sampled when its blocks were taken away."""
    started: float = 0.0
    masks: list[Array] = field(default_factory=list)
    num_reported: int = 0
    """Sampled tokens that `growth` has reported."""
    lineage: str | None = None
    """The lineage that sampled its first token, once the engine runs another; None until then."""

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


@dataclass(frozen=True, slots=True)
class SampledSince:
    """What a running request has sampled since the last report."""

    request: Request
    token_ids: Array
    logprobs: Array
    versions: Array
    masks: list[Array]
    lineage: str
    """The lineage that sampled its first token."""


class RequestQueue(Protocol):
    """What `generate` and `stream` need of an engine."""

    def submit(self, requests: Sequence[Request], on_refused: Callable[[Request, ValueError], None]) -> None:
        """Queue requests; those that cannot be generated go to `on_refused`."""

    def cancel(self, requests: Sequence[Request]) -> None:
        """Free what they hold; requests that have ended are ignored."""


async def generate(engine: RequestQueue, rollout: Rollout, sampling: Sampling) -> Rollout:
    """The rollout with one more call's tokens; cancelling the await cancels the call."""
    with _submitted(engine, rollout, sampling, is_streamed=False) as answers:
        answer = await answers.get()
        if isinstance(answer, Rollout):
            return answer
        assert isinstance(answer, Exception)
        raise answer


async def stream(engine: RequestQueue, rollout: Rollout, sampling: Sampling) -> AsyncIterator[Increment]:
    """The same call, token by token; closing the iterator cancels the call."""
    with _submitted(engine, rollout, sampling, is_streamed=True) as answers:
        while True:
            answer = await answers.get()
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, Rollout):  # the reason came with its last token, unless it was aborted between two
                if answer.finish_reason is FinishReason.ABORT:
                    yield Increment((), (), (), FinishReason.ABORT)
                return
            yield answer


@contextlib.contextmanager
def _submitted(
    engine: RequestQueue, rollout: Rollout, sampling: Sampling, *, is_streamed: bool
) -> Iterator[asyncio.Queue[Increment | Rollout | Exception]]:
    """The queue of a call's results: increments of a stream, then the rollout or an error. Leaving early cancels the call."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    answers: asyncio.Queue[Increment | Rollout | Exception] = asyncio.Queue()
    is_over = False

    def tell(answer: Increment | Rollout | Exception) -> None:
        nonlocal is_over
        is_over = is_over or not isinstance(answer, Increment)
        if threading.get_ident() == thread:
            answers.put_nowait(answer)
        else:
            loop.call_soon_threadsafe(answers.put_nowait, answer)

    request = Request(rollout, sampling, on_done=tell, on_failed=tell, on_tokens=tell if is_streamed else None)
    engine.submit([request], lambda _, error: tell(error))
    try:
        yield answers
    finally:
        if not is_over:
            engine.cancel([request])


async def run_to_the_end(work: Coroutine[Any, Any, None], *, on_cancel: Callable[[], None]) -> None:
    """Await work that must not stop halfway: when cancelled, call `on_cancel` and still wait for it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait([task])
        raise
