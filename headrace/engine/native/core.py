"""The engine proper: a plain object that is stepped. It owns the weights and the KV cache, and no thread.

Each step takes the scheduler's plan, launches it on the runner, and collects an earlier step: a GPU runs one while the host
prepares the next. Weights change only between two steps.
"""

from __future__ import annotations

import importlib.util
import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.engine.native.engine_memory import ADAPTER_PLACES
from headrace.engine.native.kv_cache import CacheShape, PagedCache
from headrace.engine.native.plain_runner import PlainRunner
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.step import Slots
from headrace.engine.native.weights import EngineWeights
from headrace.engine.protocol import EngineAsleep, Increment, InFlight, NotFinite, PromptTooLong
from headrace.engine.request import HeldAdapter, SampledSince
from headrace.engine.shaping import GrammarError
from headrace.engine.stop_strings import ends_call
from headrace.model import Arena, Head, ModelError, WeightError, adapter_of, find_readable_routers
from headrace.records import FinishReason, unknown_routing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transformers import PreTrainedModel

    from headrace.engine.native.cuda.runner import CudaRunner
    from headrace.engine.native.step import Runner, StepOutput, StepPlan
    from headrace.engine.request import Request
    from headrace.model import StagedWeights
    from headrace.records import Array

_NO_IDS = np.zeros(0, dtype=np.int32)


class _LaunchedStep(NamedTuple):
    """A step in flight, with its slots' epochs at the launch."""

    launched: object
    slots: Array
    epochs: Array
    versions: Array


class EngineCore:
    """Queues requests, steps them and finishes them. Everything is called from one thread."""

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
        record_routing: bool = False,
        record_entropy: bool = False,
        adapter_places: int = ADAPTER_PLACES,
        keeps_leases: bool = False,
    ) -> None:
        """`num_blocks`: of the KV cache; 0 takes `most_blocks`, or if that is 0 too as many as the slots can use, within a
        share of the free memory. `max_tokens`: the most one call samples, used with `most_blocks`. `kernels`: paged attention
        and sampling in Triton; None means on a GPU, except in exact mode. `graphs`: capture steps as CUDA graphs.
        `record_routing`: keep which experts each token was sent to, if the model's routers can be read.
        `record_entropy`: keep the entropy of each token's distribution. `adapter_places`: versions of an adapter that fast
        steps on a GPU hold; more make them slower. `keeps_leases`: `Interrupt.LEASE` is for all turns, until `release`."""
        self.model, self.name, self.context, self.exact = model, name, context, exact
        self.version, self.lineage, self.policy = 0, "", "policy"
        self.num_slots, self.num_sampled, self.is_asleep = slots, 0, False
        self._decode = decode
        self._launched: deque[_LaunchedStep] = deque()
        device = next(model.parameters()).device
        has_kernels = kernels if kernels is not None else device.type == "cuda" and not exact
        self.weights = EngineWeights(model, room=self._room_for_adapter(adapter_places) if has_kernels else None)
        self.arena = self.weights.arena
        self.adapter = adapter_of(model)
        self.received = self.arena if self.adapter is None else Arena.adopt(self.adapter)  # what updates replace
        self.head = Head(model, exact=exact)
        self.keeps_addresses = has_kernels
        if has_kernels and adapter_places > 1 and self.adapter is not None and (told := self.adapter.beyond_linear):
            raise ModelError(
                f"{told}, of which a batch on a GPU has one version: set partial.interrupt to 'keep', serve its folder as "
                f"the model, or run engines on the CPU"
            )
        twin = self._make_twin() if has_kernels else None  # before anything is hooked to the model
        self.routers = routers = find_readable_routers(model)
        shape = CacheShape.of(model)
        num_blocks = num_blocks or shape.choose_num_blocks(
            block_size, slots=slots, context=context, most_blocks=most_blocks, max_tokens=max_tokens
        )
        self.cache = PagedCache(
            shape, num_blocks=num_blocks, block_size=block_size, routers=routers if record_routing else None
        )
        most = math.ceil(context / block_size)
        self._slots = Slots(slots=slots, context=context, blocks=most, records_entropy=record_entropy)
        self.runner: Runner
        if twin is None:
            self.runner = PlainRunner(model, self.head, self.cache, self._slots, exact=exact, routers=routers)
        else:
            self.runner = runner = self._make_fast_runner(twin, adapter_places)
            if graphs and device.type == "cuda":
                runner.graphs.start()
        self.scheduler = Scheduler(
            self._slots,
            block_size=block_size,
            num_blocks=num_blocks,
            max_sampled=self.runner.max_sampled,
            max_prompt_tokens=self.runner.max_prompt_tokens,
            keeps_leases=keeps_leases and self.adapter is not None,
        )

    def _room_for_adapter(self, places: int) -> dict[str, int]:
        if importlib.util.find_spec("triton") is None:
            raise ModelError(
                f"the native engine on {self.model.device} needs the package triton, which is not installed: "
                f"`pip install triton`, or run its engines on the CPU"
            )
        from headrace.engine.native.cuda.compiled import room_for_adapter

        return room_for_adapter(self.model, places)

    def _make_twin(self) -> PreTrainedModel:
        from headrace.engine.native.cuda.compiled import make_twin

        return make_twin(self.model, self.arena)

    def _make_fast_runner(self, twin: PreTrainedModel, adapter_places: int) -> CudaRunner:
        from headrace.engine.native.cuda.adapters import AdapterBank
        from headrace.engine.native.cuda.runner import CudaRunner

        slots, bank = self._slots, None
        if self.adapter is not None:
            bank = AdapterBank(self.adapter, self.received, slots=len(slots.length), places=adapter_places)
        return CudaRunner(self.model, twin, self.head, self.cache, slots, routers=self.routers, bank=bank)

    # What it holds

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting + len(self.scheduler.retracted)

    @property
    def num_started(self) -> int:
        """Requests that run or were retracted."""
        return len(self.scheduler.running) + len(self.scheduler.retracted)

    @property
    def num_free_blocks(self) -> int:
        return len(self.scheduler.pool)

    @property
    def mapped_bytes(self) -> int:
        """GPU memory that torch does not count: the weights' and the cache's, while awake."""
        return self.cache.num_bytes + self.weights.mapped_bytes if self.arena.device.type == "cuda" else 0

    @property
    def has_work(self) -> bool:
        is_wanted = bool(self.num_started or self._launched or (self.scheduler.num_waiting and self.scheduler.is_admitting))
        return is_wanted and not self.is_asleep

    # Requests

    def submit(self, request: Request) -> None:
        """Queue a request; a later step admits it. Raises if it can never be generated."""
        request.check(context=self.context, vocabulary=self.head.vocabulary, has_tokenizer=self._decode is not None)
        length = len(request.rollout)
        most = min(self.context, length + request.sampling.max_tokens)
        room = (self.cache.num_blocks - 1) * self.cache.block_size
        if most > room:
            raise PromptTooLong(
                f"rollout {request.rollout.id!r} has {length} tokens and may come to have {most}; the whole KV cache holds "
                f"{room}: raise engine.kv_blocks to {math.ceil(most / self.cache.block_size) + 1}, or lower sampling.max_tokens"
            )
        self.scheduler.submit(request)

    def cancel(self, request: Request) -> None:
        """Drop a request; its slot and blocks are free at once."""
        if request.slot >= 0:
            self.scheduler.release(request)
        else:
            self.scheduler.withdraw(request)

    def growth(self, requests: Iterable[Request] | None = None, *, least: float = 0.0) -> list[SampledSince]:
        """What these requests (default: all running) have sampled since their last report, if more than this share of it."""
        grown = []
        for request in list(self.scheduler.running.values() if requests is None else requests):
            told = request.num_reported
            if request.slot >= 0 and self._slots.length[request.slot] - len(request.rollout) - told > least * told:
                new, lineage = self.scheduler.sampled_tokens(request, skip=told), self._lineage_of(request)
                request.num_reported += len(new.token_ids)
                tokens = (new.token_ids, new.logprobs, new.versions, new.masks)
                grown.append(SampledSince(request, *tokens, lineage, new.entropies))
        return grown

    def in_flight(self) -> list[InFlight]:
        """Every request that has not ended."""
        return [self._in_flight(each) for each in (*self.scheduler.started(), *self.scheduler.waiting())]

    def _in_flight(self, request: Request) -> InFlight:
        """A snapshot: `partial` may be called in any thread. It has no expert routing, which is recorded again on a resume."""
        sampled = self.scheduler.sampled_tokens(request)
        extended = partial(request.extended, sampled, FinishReason.ABORT, **self._names(request))
        first = int(sampled.versions[0]) if len(sampled.versions) else -1
        return InFlight.of(request.rollout, num_sampled=len(sampled.versions), first=first, partial=extended)

    # Interrupting and sleeping

    def stop_admitting(self) -> None:
        """Start nothing new, so that the requests in flight drain."""
        if self.is_asleep and self.num_started:
            raise EngineAsleep(f"{self.name} sleeps with {self.num_started} rollouts in flight; wake it, then they can drain")
        self.scheduler.is_admitting = False

    def abort_running(self) -> None:
        """End every started rollout where it is, with `ABORT`."""
        self.settle()
        self.scheduler.keep_slots(self.num_started)
        for request in self.scheduler.started():
            if request.slot >= 0 or request in self.scheduler.retracted:  # ending a leader retracts its followers
                self._finish(request, FinishReason.ABORT)

    def retract_running(self) -> None:
        """Drop the KV cache of all running rollouts; each resumes from its tokens."""
        self.settle()
        self.scheduler.retract_all()
        self.forget_kept()

    def forget_kept(self) -> None:
        """Drop the KV cache of rollouts without a slot; what the prefix cache has of them stays until the weights change."""
        self.scheduler.pool.forget_kept()

    def sleep(self, *, weights: bool) -> None:
        """Release the KV cache's memory and, with `weights`, move the weights to host memory. Running rollouts are retracted
        and resume after `wake`. CUDA graphs stay valid: addresses do not change."""
        if self.is_asleep:
            return
        self.retract_running()
        self.scheduler.forget_cache()
        self.runner.suspend()
        self.cache.memory.release()
        self.is_asleep = True
        if weights:
            self.weights.sleep()

    def wake(self) -> None:
        """Restore what `sleep` released."""
        if not self.is_asleep:
            return
        self.weights.wake()
        self.cache.memory.restore()
        self.runner.resume()
        self.is_asleep = False

    # Weights

    def exchange_weights(self, spare: StagedWeights, *, keep: bool = False) -> Arena | None:
        """Swap in the received weights; the next step runs them. `keep`: returns those that ran before."""
        if self.weights.are_asleep:
            raise WeightError("the engine's weights are asleep; wake it before it is given others")
        with self.runner.in_order():
            replaced = spare.exchange(keep=keep)
            self.runner.exchanged()
            return replaced

    def changed_weights(self, *, policy: str, lineage: str, version: int, held: HeldAdapter | None = None) -> None:
        """Called after a swap. `held`: what ran before, which started requests keep. A request that has sampled keeps the
        lineage of its first token: `append_call` says why."""
        if lineage != self.lineage:
            self.forget_kept()
            for request in self.scheduler.started():
                is_bound = held is not None or request.held is not None  # what it samples later is of this lineage too
                if request.lineage is None and (is_bound or len(self.scheduler.sampled_tokens(request).token_ids)):
                    request.lineage = self.lineage
        if held is not None:
            self.scheduler.hold(held)
            self.runner.hold_adapters()
        self.policy, self.lineage, self.version = policy, lineage, version
        self.scheduler.new_weights((lineage, version))

    def _lineage_of(self, request: Request) -> str:
        if request.held is not None and request.held.lineage is not None:
            return request.held.lineage
        return self.lineage if request.lineage is None else request.lineage

    def _names(self, request: Request) -> dict[str, Any]:
        return {"engine": self.name, "policy": self.policy, "lineage": self._lineage_of(request)}

    # Steps

    def step(self) -> StepPlan:
        """Launch the next step, if any, and collect the one launched `runner.ahead` steps ago."""
        plan = self.scheduler.plan(self.runner)
        if not plan.is_empty:
            slots = plan.slots
            epochs, versions = self._slots.epoch[slots].copy(), self._slots.versions_of(slots, newest=self.version)
            self._launched.append(_LaunchedStep(self.runner.launch(plan), slots, epochs, versions))
            self._slots.in_flight[slots] += 1
        if self._launched and (plan.is_empty or len(self._launched) > self.runner.ahead):
            self._collect()
        return plan

    def settle(self) -> None:
        """Collect every step in flight."""
        while self._launched:
            self._collect()

    def wait_warm(self) -> None:
        """Wait until steps run at full speed: on a GPU, until their graphs are captured."""
        if self.runner.graphs is not None:
            self.runner.graphs.wait()

    def close(self) -> None:
        """Stop compiling and capturing."""
        if self.runner.graphs is not None:
            self.runner.graphs.close()

    def _collect(self) -> None:
        step = self._launched.popleft()
        output = self.runner.collect(step.launched)
        is_held = self._slots.epoch[step.slots] == step.epochs
        self._slots.in_flight[step.slots[is_held]] -= 1
        rows = np.flatnonzero(is_held & (output.token_ids >= 0))
        if len(rows):
            self._record(rows, step, output)

    def _record(self, rows: Array, step: _LaunchedStep, output: StepOutput) -> None:
        slots, state = step.slots[rows], self._slots
        token_ids, logprobs, versions = output.token_ids[rows], output.logprobs[rows], step.versions[rows]
        at = state.length[slots]
        state.tokens[slots, at], state.logprobs[slots, at], state.versions[slots, at] = token_ids, logprobs, versions
        if state.entropies is not None:
            assert output.entropies is not None
            state.entropies[slots, at] = output.entropies[rows]
        state.length[slots] = at + 1
        self.num_sampled += len(slots)
        is_stop = (state.stops[slots] == token_ids[:, None]).any(axis=1)
        is_lost = ~np.isfinite(logprobs)
        is_full = state.length[slots] >= state.limit[slots]
        for index in np.flatnonzero(is_stop | is_lost | is_full | state.is_watched[slots]).tolist():
            request = self.scheduler.running.get(int(slots[index]))
            if request is None:
                continue  # retracted because its leader failed
            if request.sampling.needs_mask:
                request.masks.append(_NO_IDS if output.masks is None else output.masks[rows[index]])
            if is_lost[index]:
                shaper = state.shapers.get(request.slot)
                error: Exception = NotFinite(f"rollout {request.rollout.id!r}: the model's logits are not finite")
                if shaper is not None and shaper.error:
                    error = GrammarError(shaper.error)
                self._fail(request, error)
                continue
            reason = FinishReason.LENGTH if is_full[index] else None
            if is_stop[index] or self._ends_in_stop_string(request):
                reason = FinishReason.STOP
            if request.on_tokens is not None:
                top = output.tops.get(int(rows[index]))
                sampled = (int(token_ids[index]),), (float(logprobs[index]),), (int(versions[index]),)
                request.on_tokens(Increment(*sampled, reason, () if top is None else (top,)))
            if reason is not None:
                self._finish(request, reason)

    def _ends_in_stop_string(self, request: Request) -> bool:
        rollout, slot = request.rollout, request.slot
        sampled = self._slots.tokens[slot, len(rollout) : self._slots.length[slot]]
        return self._decode is not None and ends_call(rollout, request.sampling, sampled, self._decode)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        sampled = self.scheduler.sampled_tokens(request)
        routing = self._routing(request, len(request.rollout) + len(sampled.token_ids))
        self.cancel(request)
        request.on_done(request.extended(sampled, reason, **self._names(request), routing=routing))

    def _fail(self, request: Request, error: Exception) -> None:
        self.cancel(request)
        if request.on_failed is None:
            raise error
        request.on_failed(error)

    def _routing(self, request: Request, length: int) -> Array | None:
        """[tokens, MoE layers, top k] as kept with a request's blocks; unknown where nothing was computed."""
        if self.cache.routing is None:
            return None
        size, computed = self.cache.block_size, self.scheduler.computed(request)
        at = np.arange(computed)
        with self.runner.in_order():
            known = self.cache.read_routing(self._slots.table[request.slot, at // size] * size + at % size)
        unknown = unknown_routing(length - computed, num_layers=known.shape[1], top_k=known.shape[2], dtype=known.dtype)
        return np.concatenate([known, unknown])
