"""An environment's view of the system: make a prompt, generate, read text."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import sys
from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headrace.partial import is_continuation
from headrace.records import FinishReason, Rollout, check_messages
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    from headrace.engine import Engine
    from headrace.records import Array, Plain, Sampling

_MAX_CACHED = 64 << 20
"""Bytes of cached prompts: their text and their tokens."""


class Client(Protocol):
    """Given to `Environment.run`, one per episode."""

    @property
    def episode(self) -> str:
        """The episode's id."""

    @property
    def group(self) -> str:
        """The id it shares with the siblings it is compared with."""

    def prompt(self, prompt: Plain, template_kwargs: Plain = None) -> Rollout:
        """A rollout of this episode with nothing sampled yet. `template_kwargs`: variables of the chat template."""

    async def generate(self, rollout: Rollout) -> Rollout:
        """The rollout with one more completion. If a weight update aborts it, the client resumes it until it finishes."""

    def text(self, rollout: Rollout) -> str:
        """The generated text, for display and for rewards; it is never tokenized again."""


class PromptEncoder:
    """Turns prompts into token ids, with the chat template if they are messages; the policy continues a final assistant
    message. Recent prompts are cached up to a number of bytes, because siblings share one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[str, Rollout] = {}
        self._num_cached = 0  # bytes
        self._decode = _decoder(tokenizer)

    def encode(self, prompt: Plain, template_kwargs: Plain = None) -> Array:
        return self.rollout(prompt, template_kwargs).token_ids

    def rollout(self, prompt: Plain, template_kwargs: Plain = None) -> Rollout:
        """A rollout of this prompt that belongs to no episode yet; siblings share its arrays."""
        key = prompt if isinstance(prompt, str) else json.dumps([prompt, template_kwargs] if template_kwargs else prompt)
        if key not in self._cache:
            rollout = Rollout.from_prompt(self._encode(prompt, template_kwargs), id="prompt")
            size = sys.getsizeof(key) + rollout.num_bytes
            if self._num_cached + size > _MAX_CACHED:
                self._cache.clear()
                self._num_cached = 0
            self._cache[key] = rollout  # of any size, because its siblings come next
            self._num_cached += size
        return self._cache[key]

    def decode(self, rollout: Rollout) -> str:
        return self._decode(rollout.completion_ids)

    def _encode(self, prompt: Plain, template_kwargs: Any) -> Any:  # noqa: ANN401
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        if self.tokenizer.chat_template is None:
            raise ConfigError("tasks: prompts are chat messages but the model's tokenizer has no chat template; give text")
        messages: Any = prompt
        try:
            check_messages(messages)
        except ValueError as error:
            raise ConfigError(f"tasks: {error}") from error
        is_open = messages[-1]["role"] == "assistant"  # the policy continues it, as in TRL and vLLM
        how = {"add_generation_prompt": not is_open, "continue_final_message": is_open, "return_dict": False}
        return self.tokenizer.apply_chat_template(messages, **how, **(template_kwargs or {}))


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """`tokenizer.decode` without special tokens; the backend's where equal, because the wrapper costs more than decoding."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer).decode is PreTrainedTokenizerBase.decode
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    ):
        backend = tokenizer.backend_tokenizer
        return lambda ids: str(backend.decode(ids, skip_special_tokens=True))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


class CallLimit:
    """A semaphore for generate calls. An episode holds a place during a call, not while it waits for a tool. Its later calls
    go before the first calls of other episodes, so that started episodes finish first."""

    def __init__(self, limit: int) -> None:
        self.num_free = limit
        self._later: deque[asyncio.Future[None]] = deque()
        self._first: deque[asyncio.Future[None]] = deque()

    async def acquire(self, *, is_first: bool) -> None:
        """Waits for a place. Woken by `release`, which hands it over."""
        if self.num_free:
            self.num_free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._first if is_first else self._later).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.release()  # `release` handed it over just before
            raise

    def release(self) -> None:
        for waiting in (self._later, self._first):
            while waiting:
                place = waiting.popleft()
                if not place.done():
                    place.set_result(None)
                    return
        self.num_free += 1


@dataclass(eq=False)
class EngineClient:
    """The client of one episode of a run or an evaluation."""

    engine: Engine
    encoder: PromptEncoder
    _: KW_ONLY
    episode: str
    group: str
    index: int
    sampling: Sampling
    seed: int
    """The run's; a rollout's id gives it random numbers of its own."""
    policy: str = "policy"
    partials: dict[str, Rollout] = field(default_factory=dict)
    """Unfinished rollouts by id: a checkpoint's, which a call with the same prompt continues, and those that a weight update
    aborted, until their call ends."""
    limit: CallLimit | None = None
    """Bounds the calls in flight at the engine."""
    clock: asyncio.Timeout | None = None
    """Ends the episode after `episode.timeout`; it stands still while the first call waits for a place."""
    on_stuck: Callable[[str], None] = logging.getLogger("headrace").warning
    """Called if the environment does not end when it is cancelled."""
    is_over: bool = False
    """An environment that did not end gets nothing more from the engine."""
    num_prompts: int = 0
    has_called: bool = False

    def prompt(self, prompt: Plain, template_kwargs: Plain = None) -> Rollout:
        suffix = f".{self.num_prompts}" if self.num_prompts else ""
        self.num_prompts += 1
        names = {"id": self.episode + suffix, "episode": self.episode, "group": self.group, "policy": self.policy}
        shared = self.encoder.rollout(prompt, template_kwargs)
        return shared.replace(**names, index=self.index, rewards={}, columns={})  # its own dictionaries

    async def generate(self, rollout: Rollout) -> Rollout:
        if self.is_over:
            await asyncio.Event().wait()  # not an exception, which it might catch, and call again without end
        if self.limit is None:
            return await self._generate(rollout)
        is_first, self.has_called = not self.has_called, True
        await self._wait_for_a_place(self.limit, is_first=is_first)
        if self.is_over:  # it ended while this call, of a task that it left behind, waited
            self.limit.release()
            await asyncio.Event().wait()
        try:
            return await self._generate(rollout)  # an interrupted call keeps its place until it is finished
        finally:
            self.limit.release()

    async def _wait_for_a_place(self, limit: CallLimit, *, is_first: bool) -> None:
        """The clock of the episode stands still while its first call waits, also if its environment gives the wait up."""
        until = self.clock.when() if self.clock is not None and is_first else None
        if self.clock is None or until is None:
            await limit.acquire(is_first=is_first)
            return
        waited = asyncio.get_running_loop().time()
        self.clock.reschedule(None)
        try:
            await limit.acquire(is_first=is_first)
        finally:
            if not self.is_over:
                self.clock.reschedule(until + asyncio.get_running_loop().time() - waited)

    async def _generate(self, rollout: Rollout) -> Rollout:
        start, id = len(rollout), rollout.id
        whole = self.sampling.with_seed(_rollout_seed(self.seed, id))
        partial = self.partials.pop(id, None)
        if partial is not None and is_continuation(rollout, partial):
            rollout = partial
        else:
            rollout = await self.engine.generate(rollout, whole)
        try:
            while rollout.finish_reason is FinishReason.ABORT:
                self.partials[id] = rollout
                done = len(rollout) - start
                max_tokens, min_tokens = whole.max_tokens - done, max(0, whole.min_tokens - done)
                rest = dataclasses.replace(whole, max_tokens=max_tokens, min_tokens=min_tokens)
                rollout = await self.engine.generate(rollout, rest)
        finally:
            self.partials.pop(id, None)
        return rollout

    def text(self, rollout: Rollout) -> str:
        return self.encoder.decode(rollout)


def _rollout_seed(seed: int, id: str) -> int:
    """63 bits of (run seed, rollout id): the same rollout gets the same random numbers in any run of the same seed."""
    digest = hashlib.blake2b(f"{seed}:{id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
