"""An environment's view of the system: make a prompt, generate, append what follows, read text."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from headrace.engine import Increment, PromptTooLong
from headrace.envs.episode_clock import EpisodeClock
from headrace.envs.turns import Conversation, History
from headrace.partial import is_continuation, recorded_turn
from headrace.records import FinishReason, Rollout, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.engine import Engine, OnTokens
    from headrace.envs.encoder import PromptEncoder
    from headrace.records import Array, Plain, Sampling


_NO_CLOCK, _NOTHING = EpisodeClock(), contextlib.nullcontext()
Appended: TypeAlias = "str | Sequence[int] | Sequence[dict[str, Any]] | Array"


@dataclass(eq=False, kw_only=True)
class Client(abc.ABC):
    """Given to `Environment.run`, one per episode. All of it but `generate` needs no engine, so that an environment in another
    process has its own."""

    encoder: PromptEncoder
    episode: str
    """The episode's id."""
    group: str
    """The id it shares with the siblings it is compared with."""
    index: int
    policy: str = "policy"
    num_prompts: int = 0
    _histories: dict[str, History] = field(default_factory=dict)
    """Of rollouts by id: what their tokens up to the policy's next answer stand for."""

    @abc.abstractmethod
    async def generate(
        self, rollout: Rollout, *, max_tokens: int = 0, stop: tuple[str, ...] = (), on_tokens: OnTokens | None = None
    ) -> Rollout:
        """The rollout with one more completion. If a weight update aborts it, the client resumes it until it finishes. It is
        sampled as the run says; `max_tokens`, if not 0, and `stop` may end it sooner. `on_tokens` is told of new tokens as they
        come."""

    def prompt(self, prompt: Plain, template_kwargs: Plain = None, tools: Sequence[Any] = ()) -> Rollout:
        """A rollout of this episode with nothing sampled yet. `template_kwargs`: variables of the chat template; `tools`: JSON
        schemas of functions that it shows to the policy."""
        shared, history = self.encoder.start(prompt, template_kwargs, tools)
        names: dict[str, Any] = {"id": self._new_id(), "episode": self.episode, "group": self.group, "policy": self.policy}
        rollout = shared.named(**names, index=self.index)
        self._histories[rollout.id] = history
        return rollout

    def append(self, rollout: Rollout, new: Appended, *, source: Source = Source.TOOL) -> Rollout:
        """The rollout with what the policy did not sample: text, tokenized once, or token ids, both of this `source`; or chat
        messages, as the template shows them behind the policy's answer. If the template rewrites what came before, the result
        is a fork, with an id of its own, and the environment returns both."""
        if isinstance(new, str):
            return rollout.append(self.encoder.tokens(new), source=source)
        if len(new) and isinstance(new[0], dict):
            return self._append_messages(rollout, cast("Sequence[dict[str, Any]]", new))
        return rollout.append(cast("Array", new), source=source)

    def _append_messages(self, rollout: Rollout, messages: Sequence[dict[str, Any]]) -> Rollout:
        history = self._history(rollout)
        if len(rollout) <= history.num_tokens:
            raise ValueError(f"rollout {rollout.id!r}: messages follow an answer of the policy; generate one first")
        answer = self.encoder.turns.answer(history, rollout)
        history, rollout = self.follow(history, rollout, answer, messages)
        self._histories[rollout.id] = history
        return rollout

    def follow(
        self,
        history: History,
        rollout: Rollout,
        answer: dict[str, Any],
        messages: Sequence[dict[str, Any]],
        *,
        is_taken: bool = False,
    ) -> tuple[History, Rollout]:
        """The history and the rollout with messages behind the policy's answer. It is a fork if the template rewrites what came
        before, or if other messages follow that answer already: `is_taken`."""
        turns = self.encoder.turns
        followed = turns.follow(history, rollout, answer, messages)
        if followed is None:
            history, ids = turns.rewritten(history, answer, messages)
            return history, fork(rollout, ids, id=self._new_id())
        history, ids, sources = followed
        if is_taken:
            rollout = _untrained(rollout.forked(len(rollout), id=self._new_id()))
        return history, _append(rollout, ids, sources)

    def messages(self, rollout: Rollout) -> list[dict[str, Any]]:
        """Those that the rollout holds, the policy's answers parsed: content, reasoning, tool calls."""
        history = self._history(rollout)
        told = list(history.messages)
        return told if len(rollout) <= history.num_tokens else [*told, self.encoder.turns.answer(history, rollout)]

    def drop_fork(self, fork: Rollout, before: Rollout) -> Rollout:
        """The rollout `before` its fork, which has no room for an answer; it ends as truncated."""
        self._histories[before.id] = self._histories[fork.id]
        return _truncated(before)

    def chat(self, prompt: Plain, *, tools: Sequence[Any] = (), template_kwargs: Plain = None) -> Conversation:
        """A conversation, which keeps the rollouts of `prompt`, `generate` and `append` together."""
        return Conversation(self, prompt, tools=tools, template_kwargs=template_kwargs)

    def text(self, rollout: Rollout) -> str:
        """The generated text, for display and for rewards; it is never tokenized again."""
        return self.encoder.decode(rollout)

    def _history(self, rollout: Rollout) -> History:
        history = self._histories.get(rollout.id)
        if history is None:
            raise ValueError(
                f"rollout {rollout.id!r} is not one of client.prompt or client.append, so its messages are unknown"
            )
        return history

    def _new_id(self) -> str:
        self.num_prompts += 1
        return self.episode if self.num_prompts == 1 else f"{self.episode}.{self.num_prompts - 1}"


def _append(rollout: Rollout, ids: Sequence[int], sources: Sequence[int]) -> Rollout:
    """Appends tokens in spans of one source."""
    for source, span in itertools.groupby(zip(ids, sources, strict=True), key=lambda pair: pair[1]):
        rollout = rollout.append([id for id, _ in span], source=Source(source))
    return rollout


def fork(rollout: Rollout, ids: Sequence[int] | Array, *, id: str) -> Rollout:
    """A rollout of these tokens, forked where they differ. What it shares with the other, the other trains."""
    new, at = np.asarray(ids, dtype=np.int32), num_shared(rollout, ids)
    if not at:
        names: dict[str, Any] = {"episode": rollout.episode, "group": rollout.group, "index": rollout.index}
        return Rollout.from_prompt(new, id=id, **names).replace(policy=rollout.policy, parent=(rollout.id, 0))
    forked = _untrained(rollout.forked(at, id=id))
    return forked.append(new[at:], source=Source.PROMPT) if at < len(new) else forked


def num_shared(rollout: Rollout, ids: Sequence[int] | Array) -> int:
    """How many tokens are the same from the start on."""
    length = min(len(ids), len(rollout))
    differs = np.flatnonzero(np.asarray(ids[:length]) != rollout.token_ids[:length])
    return int(differs[0]) if len(differs) else length


def _untrained(rollout: Rollout) -> Rollout:
    return rollout.replace(loss_mask=np.zeros(len(rollout), dtype=bool), step_rewards=())


class CallLimit:
    """A semaphore for generate calls. An episode holds a place during a call, not while it waits for a tool. Its later calls
    go before the first calls of other episodes, so that started episodes finish first."""

    def __init__(self, limit: int) -> None:
        self._limit = self.num_free = limit
        self._later: deque[asyncio.Future[None]] = deque()
        self._first: deque[asyncio.Future[None]] = deque()

    @property
    def num_calls(self) -> int:
        """That have a place or wait for one."""
        return self._limit - self.num_free + len(self._later) + len(self._first)

    async def acquire(self, *, is_first: bool) -> None:
        """Waits for a place. Woken by `release`, which hands it over."""
        if self.num_free > 0:
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

    def resize(self, limit: int) -> None:
        """Engines have come or gone. Calls past a lower limit go on; the places they leave are not filled."""
        change, self._limit = limit - self._limit, limit
        self.num_free += min(change, 0)
        for _ in range(change):
            self.release()

    def release(self) -> None:
        for waiting in () if self.num_free < 0 else (self._later, self._first):
            while waiting:
                place = waiting.popleft()
                if not place.done():
                    place.set_result(None)
                    return
        self.num_free += 1


@dataclass(eq=False, kw_only=True)
class EngineClient(Client):
    """The client of one episode of a run or an evaluation."""

    engine: Engine
    sampling: Sampling
    seed: int
    """The run's; a rollout's id gives it random numbers of its own."""
    partials: dict[str, Rollout] = field(default_factory=dict)
    """Unfinished rollouts by id: a checkpoint's, which a call with the same prompt continues, and those that a weight update
    aborted, until their call ends."""
    keeps_turns: bool = False
    """The environment can resume: what finished calls returned is kept in `partials` too, and returned again to the same calls
    when the episode is run again."""
    group_size: int = 0
    """Episodes of its group; 0 in an evaluation."""
    limit: CallLimit | None = None
    """Bounds the calls in flight at the engine."""
    clock: EpisodeClock = _NO_CLOCK
    """It stands still while the first call waits for a place."""
    on_stuck: Callable[[str], None] = logging.getLogger("headrace").warning
    """Called if the environment does not end when it is cancelled."""
    is_over: bool = False
    """An environment that did not end gets nothing more from the engine."""
    has_called: bool = False
    generated: dict[str, Rollout] = field(default_factory=dict)
    """Rollouts by id as the engine last returned them."""
    leased: set[str] | None = None
    """Ids of the rollouts it has called the engine with, which keep their adapter until `release`; None if they keep none."""

    def begin_again(self) -> None:
        """Its environment runs the task from the start, and no attempt is counted."""
        self.clock.start()
        self.release()
        self.has_called = False
        self.generated.clear()
        if self.leased is not None:
            self.leased.clear()

    def release(self) -> None:
        """The episode has ended: its rollouts will not be continued, and what the engines keep for them may go."""
        turns = (id for id, rollout in self.generated.items() if len(rollout.calls) > 1)
        if ended := list(turns if self.leased is None else self.leased):
            self.engine.release(ended)

    async def generate(
        self, rollout: Rollout, *, max_tokens: int = 0, stop: tuple[str, ...] = (), on_tokens: OnTokens | None = None
    ) -> Rollout:
        if self.is_over:
            await asyncio.Event().wait()  # not an exception, which it might catch, and call again without end
        if self.leased is not None:
            self.leased.add(rollout.id)
        sampling = self.sampling
        if max_tokens or stop:
            most = min(max_tokens or sampling.max_tokens, sampling.max_tokens)
            ends: dict[str, Any] = {"max_tokens": most, "stop": tuple(dict.fromkeys((*sampling.stop, *stop)))}
            sampling = dataclasses.replace(sampling, min_tokens=min(sampling.min_tokens, most), **ends)
        told: dict[str, Any] = {} if on_tokens is None else {"on_tokens": on_tokens}
        is_first, self.has_called = not self.has_called, True
        clock = self.clock
        with clock.busy() if clock.is_running else _NOTHING:
            if self.limit is not None:
                with clock.stopped() if is_first and clock.is_running else _NOTHING:
                    await self.limit.acquire(is_first=is_first)
            try:
                if not self.is_over:  # else it ended while this call, of a task that it left behind, waited
                    self.generated[rollout.id] = generated = await self._generate(rollout, sampling, told)
                    return generated
            finally:
                if self.limit is not None:  # interrupted, the call has kept its place
                    self.limit.release()
                if self.is_over and self.leased is not None:  # `release` came before the engine was done with this call
                    self.engine.release([rollout.id])
        await asyncio.Event().wait()
        raise AssertionError

    async def _generate(self, rollout: Rollout, sampling: Sampling, told: dict[str, Any]) -> Rollout:
        start, id = len(rollout), rollout.id
        whole = sampling.with_seed(_rollout_seed(self.seed, id))
        partial = self.partials.pop(id, None)
        again = None if partial is None or not self.keeps_turns else recorded_turn(rollout, partial)
        if again is not None and partial is not None:
            self.partials[id] = partial  # its later turns
            if again.finish_reason is not FinishReason.ABORT:
                return again
            rollout = again
        elif partial is not None and is_continuation(rollout, partial):
            rollout = partial
        if len(rollout) > start:
            for on_tokens in told.values():  # what was sampled before it was interrupted
                ids, logprobs, versions = (
                    tuple(each[start:].tolist()) for each in (rollout.token_ids, rollout.logprobs, rollout.versions)
                )
                on_tokens(Increment(ids, logprobs, versions, None))
        else:
            try:
                rollout = await self.engine.generate(rollout, whole, **told)
            except PromptTooLong:
                if not rollout.calls:
                    raise
                await asyncio.sleep(0)  # an environment that asks again and again blocks nobody
                return _truncated(rollout)
        try:
            while rollout.finish_reason is FinishReason.ABORT:
                self.partials[id] = rollout
                done = len(rollout) - start
                max_tokens, min_tokens = whole.max_tokens - done, max(0, whole.min_tokens - done)
                rest = dataclasses.replace(whole, max_tokens=max_tokens, min_tokens=min_tokens)
                rollout = await self.engine.generate(rollout, rest, **told)
        finally:
            if not self.keeps_turns:
                self.partials.pop(id, None)
        if self.keeps_turns:
            self.partials[id] = rollout
        return rollout


def _truncated(rollout: Rollout) -> Rollout:
    """A rollout that has no room for another call ends with the last one, as truncated: what was appended is dropped."""
    *calls, last = rollout.calls
    cut = rollout.forked(last.stop, id=f"{rollout.id} cut")
    calls = [*calls, dataclasses.replace(last, finish_reason=FinishReason.LENGTH)]
    ended: dict[str, Any] = {"calls": tuple(calls), "finish_reason": FinishReason.LENGTH}
    parent = None if rollout.parent is None else (rollout.parent[0], min(rollout.parent[1], last.stop))
    return cut.replace(id=rollout.id, parent=parent, **ended)


def _rollout_seed(seed: int, id: str) -> int:
    """63 bits of (run seed, rollout id): the same rollout gets the same random numbers in any run of the same seed."""
    digest = hashlib.blake2b(f"{seed}:{id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
