"""The engine proper: a plain object that is stepped. It owns the weights and the cache, and no thread.

Each step asks the scheduler what to compute, launches it, and takes in what an earlier step drew: on a GPU the next step
is prepared while this one runs. Weights change only between two steps.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine import stops
from headrace.engine.append_tokens import lengthen
from headrace.engine.native.cache import CacheShape, PagedCache
from headrace.engine.native.memory import Memory, make_memory
from headrace.engine.native.plain import PlainRunner
from headrace.engine.native.request import Step
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.work import Slots
from headrace.engine.protocol import EngineAsleep, Increment, InFlight, NotFinite, PromptTooLong, UnusablePrompt
from headrace.engine.request import Growth, Request
from headrace.model import Arena, Head, ModelError, WeightError, find_readable_routers
from headrace.records import Call, FinishReason, Rollout, unknown_routing
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.engine.native.request import Drawings
    from headrace.engine.native.work import Drawn, Runner
    from headrace.model import Routers, SpareWeights
    from headrace.records import Array

__all__ = ["EngineCore", "Growth", "Request", "Step"]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step under way."""

    ticket: object
    slots: Array
    epochs: Array
    version: int


class EngineCore:
    """Submits, steps, finishes. Everything is called from one thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        slots: int,
        context: int,
        block_size: int = 16,
        num_blocks: int = 0,
        most_blocks: int = 0,
        max_tokens: int = 0,
        exact: bool = False,
        decode: Callable[[list[int]], str] | None = None,
        kernels: bool | None = None,
        graphs: bool = True,
    ) -> None:
        """`num_blocks`: of the KV cache; 0 takes `most_blocks`, or where that is 0 too as many as the slots can use, within a
        share of the free memory. `max_tokens`: that a rollout draws at most, where `most_blocks` is given.
        `kernels`: paged attention and sampling as Triton kernels; None has them on a GPU, but for exact mode. `graphs`: capture
        steps there."""
        self.model, self.name, self.context, self.exact = model, name, context, exact
        self.version, self.lineage, self.policy = 0, "", "policy"
        self.num_slots = slots
        self._has_graphs = graphs
        self.num_drawn = 0
        self._weights: list[Memory] = []
        """Where the weights lie on a GPU."""
        self._kept: Tensor | None = None
        """The weights, while they sleep in the host's memory."""
        self.is_asleep = False
        self.arena = Arena.adopt(model, allocate=self._allocate if next(model.parameters()).is_cuda else None)
        self.head = Head(model, exact=exact)
        self._decode = decode
        device = next(model.parameters()).device
        use_kernels = kernels if kernels is not None else device.type == "cuda" and not exact
        twin = None
        if use_kernels:
            _check_triton(device)
            from headrace.engine.native.cuda.compiled import make_twin

            twin = make_twin(model, self.arena)
        routers = find_readable_routers(model)
        shape = CacheShape.of(model)
        per_slot = math.ceil(context / block_size)
        fitting, usable = shape.blocks_that_fit(block_size), most_blocks or slots * per_slot + 1
        one = min(context, max_tokens + 1) if most_blocks else context  # longer prompts are refused one by one
        least = math.ceil(one / block_size) + 1
        if not num_blocks and fitting < least:
            lower = "sampling.max_tokens" if most_blocks else "model.context"
            raise ConfigError(
                f"engine.kv_blocks = 0: one rollout of {one} tokens needs {least} KV blocks, and the memory that an engine may "
                f"take holds {fitting} of the {usable} it could use; free some, lower {lower}, or set engine.kv_blocks"
            )
        num_blocks = num_blocks or min(usable, fitting)
        self.cache = PagedCache(shape, num_blocks=num_blocks, block_size=block_size, routers=routers)
        lines = Slots(slots=slots, context=context, blocks=per_slot)
        self.runner = self._make_runner(twin, lines, routers)
        self.scheduler = Scheduler(
            lines,
            block_size=block_size,
            num_blocks=num_blocks,
            most_draws=self.runner.most_draws,
            most_tokens=self.runner.most_tokens,
        )
        self._slots = lines
        self._flights: deque[_Flight] = deque()

    def _make_runner(self, twin: PreTrainedModel | None, lines: Slots, routers: Routers | None) -> Runner:
        if twin is None:
            return PlainRunner(self.model, self.head, self.cache, lines, exact=self.exact, routers=routers)
        from headrace.engine.native.cuda.runner import CudaRunner

        runner = CudaRunner(self.model, twin, self.head, self.cache, lines, routers=routers)
        if self._has_graphs and self.cache.keys[0].is_cuda:
            runner.start_warming()
        return runner

    def _allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        self._weights.append(make_memory(num_bytes, device))
        return self._weights[-1].tensor

    @property
    def is_admitting(self) -> bool:
        """Whether new requests are begun; those retracted always are."""
        return self.scheduler.is_admitting

    @is_admitting.setter
    def is_admitting(self, value: bool) -> None:
        self.scheduler.is_admitting = value

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting + len(self.scheduler.retracted)

    @property
    def num_begun(self) -> int:
        """Requests that have begun and not ended."""
        return len(self.scheduler.running) + len(self.scheduler.retracted)

    @property
    def num_free_blocks(self) -> int:
        return len(self.scheduler.pool)

    @property
    def mapped_bytes(self) -> int:
        """Of a GPU's memory, what does not come from torch: the weights and the cache, when they are not asleep."""
        if self.arena.device.type != "cuda":
            return 0
        return self.cache.num_bytes + sum(memory.tensor.numel() for memory in self._weights)

    @property
    def has_sleeping_weights(self) -> bool:
        """Whether the weights wait in the host's memory: nothing may be computed."""
        return self._kept is not None

    @property
    def has_work(self) -> bool:
        is_wanted = bool(self.num_begun) or bool(self._flights) or bool(self.scheduler.num_waiting and self.is_admitting)
        return is_wanted and not self.is_asleep

    def submit(self, request: Request) -> None:
        """Queue a request; it is admitted by a later step."""
        rollout = request.rollout
        length = len(rollout)
        if length >= self.context:
            raise PromptTooLong(f"rollout {rollout.id!r} has {length} tokens; the context is {self.context}")
        if length == 0:
            raise UnusablePrompt(f"rollout {rollout.id!r} is empty; a prompt has at least one token")
        most, room = (
            min(self.context, length + request.sampling.max_tokens),
            (self.cache.num_blocks - 1) * self.cache.block_size,
        )
        if most > room:
            raise PromptTooLong(
                f"rollout {rollout.id!r} has {length} tokens and may come to have {most}; the whole KV cache holds {room}: "
                f"raise engine.kv_blocks to {math.ceil(most / self.cache.block_size) + 1}, or lower sampling.max_tokens"
            )
        highest = int(rollout.token_ids.max())
        if highest >= self.head.vocabulary:
            raise UnusablePrompt(f"rollout {rollout.id!r} holds token {highest}; the vocabulary has {self.head.vocabulary}")
        if request.sampling.stop and self._decode is None:
            raise UnusablePrompt(f"rollout {rollout.id!r} has stop strings; this engine was given no tokenizer")
        self.scheduler.submit(request)

    def cancel(self, request: Request) -> None:
        """Forget a request; its slot and blocks are free at once."""
        if request.slot >= 0:
            self.scheduler.release(request)
        else:
            self.scheduler.withdraw(request)

    def abort_running(self) -> None:
        """End every rollout that has begun where it is, with `ABORT`."""
        self.settle()
        self.scheduler.keep_slots(self.num_begun)
        for request in [*self.scheduler.running.values(), *self.scheduler.retracted]:
            if request.slot >= 0 or request in self.scheduler.retracted:  # ended, one takes its followers with it
                self._finish(request, FinishReason.ABORT)

    def retract_running(self) -> None:
        """Drop the keys and values of everything that runs; each goes on from its tokens."""
        self.settle()
        self.scheduler.retract_all()

    def sleep(self, *, weights: bool) -> None:
        """Give the cache's memory back, and with `weights` that of the weights too, which wait in the host's. Rollouts that
        run are retracted and go on after `wake`; pins are lost. Graphs stay valid: the addresses are kept."""
        if self.is_asleep:
            return
        self.retract_running()
        self.scheduler.forget_everything()
        self.runner.rest()
        self.cache.memory.give_back()
        self.is_asleep = True
        if weights and self._weights:
            self._kept = self.arena.memory.cpu()
            for memory in self._weights:
                memory.give_back()

    def wake(self) -> None:
        """Take the memory again."""
        if not self.is_asleep:
            return
        if self._kept is not None:
            for memory in self._weights:
                memory.take()
            self.arena.memory.copy_(self._kept)
            self._kept = None
        self.cache.memory.take()
        self.runner.settle()
        self.runner.rouse()
        self.is_asleep = False

    def stop_admitting(self) -> None:
        """Begin nothing new, so that what is in flight drains."""
        if self.is_asleep and self.num_begun:
            raise EngineAsleep(f"{self.name} sleeps with {self.num_begun} rollouts in flight; wake it, then they can drain")
        self.is_admitting = False

    def exchange_weights(self, spare: SpareWeights) -> None:
        """Run what was filled, from the next step on."""
        if self.has_sleeping_weights:
            raise WeightError("the engine's weights are asleep; wake it before it is given others")
        self.runner.in_order(spare.exchange)

    def changed_weights(self, *, policy: str, lineage: str, version: int) -> None:
        """What is drawn from now on is drawn by these weights. Where they begin another life of the trainer, what has drawn
        something keeps the name of the life it drew it in: `lengthen` says why."""
        if lineage != self.lineage:
            for request in [*self.scheduler.running.values(), *self.scheduler.retracted]:
                if request.lineage is None and len(self.scheduler.drawings(request).token_ids):
                    request.lineage = self.lineage
        self.policy, self.lineage, self.version = policy, lineage, version
        self.scheduler.new_weights((lineage, version))

    def growth(self, requests: Iterable[Request] | None = None) -> list[Growth]:
        """News of these requests, or of all that run, since the last news of each."""
        grown = []
        slots = self._slots
        for request in list(self.scheduler.running.values()) if requests is None else list(requests):
            if request.slot < 0:
                continue
            start, stop = len(request.rollout) + request.told, int(slots.length[request.slot])
            if stop > start:
                part = (request.slot, slice(start, stop))
                masks = request.masks[request.told :]
                request.told = stop - len(request.rollout)
                drawn = (slots.tokens[part].copy(), slots.logprobs[part].copy(), slots.versions[part].copy())
                grown.append(Growth(request, *drawn, masks, self._lineage_of(request)))
        return grown

    def in_flight(self) -> list[InFlight]:
        """Every request that has not ended."""
        scheduler = self.scheduler
        return [self._in_flight(each) for each in (*scheduler.running.values(), *scheduler.retracted, *scheduler.waiting())]

    def _in_flight(self, request: Request) -> InFlight:
        drawn, masks = self.scheduler.drawings(request), list(request.masks)
        policy, lineage = self.policy, self._lineage_of(request)

        def partial() -> Rollout:
            """From what was seen, in whatever thread; routing is not looked up for it, and is recorded anew when it goes on."""
            call = self._call(request, len(drawn.token_ids), FinishReason.ABORT)
            return _lengthened(request.rollout, call, drawn, masks, policy=policy, lineage=lineage)

        first = int(drawn.versions[0]) if len(drawn.versions) else -1
        return InFlight.of(request.rollout, num_drawn=len(drawn.versions), first=first, partial=partial)

    def step(self) -> Step:
        """Launch what comes next, and take in what was drawn as many steps ago as the runner is ahead."""
        work = self.scheduler.plan(self.runner)
        if work is None:
            if self._flights:
                self._collect()
            return Step(0, 0)
        slots = work.slots
        self._flights.append(_Flight(self.runner.launch(work), slots, self._slots.epoch[slots].copy(), self.version))
        self._slots.flying[slots] += 1
        if len(self._flights) > self.runner.ahead:
            self._collect()
        return Step(prompt_rows=work.prompt_rows, decode_rows=len(work.decoding))

    def wait_warm(self) -> None:
        """Until steps run as fast as they will: on a GPU, until their graphs are captured."""
        self.runner.wait_warm()

    def close(self) -> None:
        """Begin nothing more beside the thread that steps."""
        self.runner.close()

    def settle(self) -> None:
        """Take in whatever is under way."""
        while self._flights:
            self._collect()

    def _collect(self) -> None:
        flight = self._flights.popleft()
        drawn = self.runner.collect(flight.ticket)
        is_held = self._slots.epoch[flight.slots] == flight.epochs
        self._slots.flying[flight.slots[is_held]] -= 1
        rows = np.flatnonzero(is_held & (drawn.token_ids >= 0))
        if len(rows):
            self._record(rows, flight, drawn)

    def _record(self, rows: Array, flight: _Flight, drawn: Drawn) -> None:
        slots, lines = flight.slots[rows], self._slots
        token_ids, logprobs = drawn.token_ids[rows], drawn.logprobs[rows]
        at = lines.length[slots]
        lines.tokens[slots, at] = token_ids
        lines.logprobs[slots, at] = logprobs
        lines.versions[slots, at] = flight.version
        lines.length[slots] = at + 1
        self.num_drawn += len(slots)
        is_stop = (lines.stops[slots] == token_ids[:, None]).any(axis=1)
        is_lost = ~np.isfinite(logprobs)
        is_full = lines.length[slots] >= lines.limit[slots]
        for index in np.flatnonzero(is_stop | is_lost | is_full | lines.is_watched[slots]).tolist():
            request = self.scheduler.running.get(int(slots[index]))
            if request is None:
                continue  # it went with one that failed
            if request.sampling.is_truncated:
                request.masks.append(_NOTHING if drawn.allowed is None else drawn.allowed[rows[index]])
            if is_lost[index]:
                self._fail(request, NotFinite(f"rollout {request.rollout.id!r}: the model's logits are not finite"))
                continue
            reason = None
            if is_stop[index] or (request.sampling.stop and self._ends_in_stop(request)):
                reason = FinishReason.STOP
            elif is_full[index]:
                reason = FinishReason.LENGTH
            if request.on_tokens is not None:
                token, logprob = (int(token_ids[index]),), (float(logprobs[index]),)
                request.on_tokens(Increment(token, logprob, (flight.version,), reason))
            if reason is not None:
                self._finish(request, reason)

    def _ends_in_stop(self, request: Request) -> bool:
        """Whether the last token drawn completes a stop string, looked for one step after it was drawn."""
        assert self._decode is not None
        length = int(self._slots.length[request.slot])
        first = stops.window(request.rollout, request.sampling, length)
        if first is None:
            return False
        return stops.completes(request.sampling.stop, self._slots.tokens[request.slot, first:length].tolist(), self._decode)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        lengthened = self._lengthen(request, reason)
        self.cancel(request)
        request.on_done(lengthened)

    def _fail(self, request: Request, error: Exception) -> None:
        self.cancel(request)
        if request.on_failed is None:
            raise error
        request.on_failed(error)

    def _lengthen(self, request: Request, reason: FinishReason) -> Rollout:
        """The request's rollout with what it has drawn appended."""
        drawn = self.scheduler.drawings(request)
        call = self._call(request, len(drawn.token_ids), reason)
        names = {"policy": self.policy, "lineage": self._lineage_of(request)}
        routing = self._routing(request, call.stop)
        return _lengthened(request.rollout, call, drawn, request.masks, expert_routing=routing, **names)

    def _call(self, request: Request, num_drawn: int, reason: FinishReason) -> Call:
        start = len(request.rollout)
        return Call(
            start=start,
            stop=start + num_drawn,
            engine=self.name,
            sampling=request.sampling,
            finish_reason=reason,
            started=request.started,
            finished=time.time(),
        )

    def _lineage_of(self, request: Request) -> str:
        return self.lineage if request.lineage is None else request.lineage

    def _routing(self, request: Request, length: int) -> Array | None:
        """[tokens, MoE layers, top k] of a request's tokens, as kept with its blocks; unknown where nothing was computed."""
        if self.cache.routing is None:
            return None
        size, computed = self.cache.block_size, self.scheduler.computed(request)
        at = np.arange(computed)
        known = self.runner.routing(self._slots.table[request.slot, at // size] * size + at % size)
        assert known is not None
        unknown = unknown_routing(length - computed, num_layers=known.shape[1], top_k=known.shape[2], dtype=known.dtype)
        return np.concatenate([known, unknown])


def _lengthened(
    rollout: Rollout,
    call: Call,
    drawn: Drawings,
    masks: list[Array],
    *,
    policy: str,
    lineage: str,
    expert_routing: Array | None = None,
) -> Rollout:
    return lengthen(
        rollout,
        call,
        token_ids=drawn.token_ids,
        logprobs=drawn.logprobs,
        versions=drawn.versions,
        masks=masks,
        policy=policy,
        lineage=lineage,
        expert_routing=expert_routing,
    )


def _check_triton(device: torch.device) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ModelError(
            f"the native engine on {device} needs the package triton, which is not installed: `pip install triton`, or run "
            f"its engines on the CPU"
        )


_NOTHING = np.zeros(0, dtype=np.int32)
