"""Plans the next step: admission, shared prompts, chunks of long prompts, and retraction when blocks run out.

Running rollouts come first: each gets a block when its last one is full. If none is free, the rollout admitted last is
retracted: it loses its blocks, keeps its tokens, and is admitted again before anything new. The one admitted first is never
retracted for another, so some rollout always finishes, however few blocks there are.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from headrace.engine.native.blocks import NOTHING, BlockPool, Computed
from headrace.engine.native.step import Chunk, StepPlan
from headrace.engine.request import MOST_LEASES, SampledTokens
from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from headrace.engine.native.step import Runner, Slots
    from headrace.engine.request import HeldAdapter, Request
    from headrace.records import Array

    PrefixKey = tuple[tuple[str, int] | None, bytes, bool, int, str]
    """Where a rollout was forked, if it was, its token ids, whether it is shaped, the adapter it holds, and its id if it has
    sampled: requests with equal keys share their KV blocks."""

_KEEP_SECONDS = 0.25  # slots are kept this long for aborted rollouts: many times their round trip to the launcher


class Scheduler:
    """Owns the slots and the blocks; computes and samples nothing."""

    def __init__(
        self,
        slots: Slots,
        *,
        block_size: int,
        num_blocks: int,
        max_sampled: int,
        max_prompt_tokens: int,
        keeps_leases: bool = False,
    ) -> None:
        """`keeps_leases`: a rollout keeps the adapter it began with in its next turns too, until `forget`."""
        self.slots, self.block_size = slots, block_size
        num_slots = len(slots.length)
        self.pool = BlockPool(num_blocks)
        self._new: OrderedDict[Request, None] = OrderedDict()
        self._resumed: OrderedDict[Request, None] = OrderedDict()  # aborted rollouts that wait to resume
        self.retracted: OrderedDict[Request, None] = OrderedDict()
        self.running: dict[int, Request] = {}  # by slot, in order of admission, including those still computing their prompt
        self.is_admitting = True  # whether new requests are started; retracted ones always are
        self.num_retractions = 0
        self._root: Hashable = ("", 0)
        self._held: WeakSet[HeldAdapter] = WeakSet()  # those that blocks in the prefix cache were computed with
        self._max_sampled, self._max_prompt_tokens = max_sampled, max_prompt_tokens
        self._computing: dict[Request, PrefixKey] = {}  # prompts in progress; followers wait for theirs
        self._leaders: dict[PrefixKey, Request] = {}  # those that others with the same key follow
        self._num_chunks = 0  # planned so far
        self._copies_before: list[tuple[int, int]] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_blocks_of = np.zeros(num_slots, dtype=np.int64)
        self._turn = np.zeros(num_slots, dtype=np.int64)  # number of the admission; the highest is retracted first
        self._turns = itertools.count()
        self._is_decoding = np.zeros(num_slots, dtype=bool)
        self._num_kept, self._kept_until = 0, 0.0
        self._keeps_leases = keeps_leases
        self.leases: dict[str, HeldAdapter | None] = {}  # of rollouts that left their slot, by id; None: the newest adapter

    # Queues

    def submit(self, request: Request) -> None:
        is_resumed = request.rollout.finish_reason is FinishReason.ABORT  # it resumes before anything new starts
        if is_resumed:
            self._num_kept = max(0, self._num_kept - 1)
        (self._resumed if is_resumed else self._new)[request] = None

    def keep_slots(self, count: int) -> None:
        """Let nothing new take the slots of `count` aborted rollouts until they return, for at most `_KEEP_SECONDS`."""
        self._num_kept, self._kept_until = count, time.monotonic() + _KEEP_SECONDS

    @property
    def is_keeping_slots(self) -> bool:
        """Whether a new request would start if no slots were kept."""
        is_kept = 0 < len(self._free_slots) <= self._num_kept and time.monotonic() < self._kept_until
        return is_kept and bool(self._new) and not self._resumed and not self.retracted

    def withdraw(self, request: Request) -> None:
        """Drop a waiting request."""
        for queue in (self.retracted, self._resumed, self._new):
            queue.pop(request, None)

    def started(self) -> list[Request]:
        """Requests that run or were retracted."""
        return [*self.running.values(), *self.retracted]

    def waiting(self) -> list[Request]:
        """Requests that have not started, in the order they will."""
        return [*self._resumed, *self._new]

    @property
    def num_waiting(self) -> int:
        return len(self._resumed) + len(self._new)

    def forget(self, rollout_id: str) -> None:
        """It will not continue."""
        self.leases.pop(rollout_id, None)
        self.pool.release(rollout_id)

    # One step

    def plan(self, runner: Runner) -> StepPlan:
        """The next step; empty if nothing can be computed before an earlier one is collected."""
        decoding = self._add_blocks(runner)
        self._admit(runner)
        chunks, copies_after = self._plan_chunks()
        copies_before, self._copies_before = self._copies_before, []
        return StepPlan(chunks, decoding, copies_before, copies_after)

    def _add_blocks(self, runner: Runner) -> Array:
        """Give every decoding slot a block for its next token; returns those that have one."""
        slots = self.slots
        reached = slots.length + slots.in_flight
        is_active = self._is_decoding & (reached < slots.limit)
        if slots.shapers:  # their logits depend on the token in flight
            shaped = list(slots.shapers)
            is_active[shaped] &= slots.in_flight[shaped] == 0
        active = np.flatnonzero(is_active)
        needed = (reached[active] - 1) // self.block_size + 1
        short = active[needed > self._num_blocks_of[active]]
        for slot in short[np.argsort(self._turn[short])].tolist():
            request = self.running.get(slot)
            if request is None or not self._free_a_block(request):
                continue
            block = self.pool.take(1)[0]
            index = int(self._num_blocks_of[slot])
            request.blocks.append(block)
            slots.table[slot, index] = block
            self._num_blocks_of[slot] = index + 1
            runner.add_block(slot, index, block)
        active = active[self._is_decoding[active]]
        if slots.held:  # rows of one adapter lie side by side, those of the newest, as of padding, last
            active = active[np.lexsort((slots.held_serial[active], -slots.held_version[active]))]
        return active

    def _free_a_block(self, request: Request) -> bool:
        """Retract rollouts admitted later until a block is free; False if `request` itself had to be retracted."""
        while not len(self.pool):
            last = max(self.running.values(), key=lambda each: self._turn[each.slot])
            self.retract(last)
            if last is request:
                return False
        return True

    def _admit(self, runner: Runner) -> None:
        while self._free_slots:
            queue = self.retracted or ((self._resumed or self._new) if self.is_admitting else None)
            if not queue or (queue is self._new and self.is_keeping_slots):
                return
            request = next(iter(queue))
            if not self._place(request, runner):
                return
            del queue[request]

    def _place(self, request: Request, runner: Runner) -> bool:
        """Give a request a slot, and blocks for its tokens; False if too few are free.

        Once refused, it is looked up in the prefix cache again only when as many blocks are free as it needed then, or a prompt
        was computed that it may share: hashing a long one takes milliseconds, and it may wait for thousands of steps."""
        reserve = len(self.running) // 4 + 1 if self.running else 0  # running rollouts will soon need more
        if request.refused_after == self._num_chunks and len(self.pool) < request.needed_blocks + reserve:
            return False
        rollout, saved = request.rollout, request.saved
        token_ids = rollout.token_ids if saved is None else np.concatenate([rollout.token_ids, saved.token_ids])
        if request.held is None and rollout.num_sampled:
            request.held = self.leases.get(rollout.id)
        # What was kept of a rollout, or of a fork's parent, may be of older weights; shaped requests may run on another runner.
        own = rollout.id if _has_sampled(request) else ""
        key = rollout.parent, token_ids.tobytes(), request.shaping is not None, request.adapter, own
        leader = self._leaders.get(key)
        if leader is not None and len(leader.followers) + 1 < self._max_sampled:
            is_placed = self._follow(request, leader, len(token_ids), reserve)
        elif is_placed := self._lead(request, token_ids, reserve):
            self._computing[request], self._leaders[key] = key, request
        if not is_placed:
            request.refused_after = self._num_chunks
            return False
        slot = request.slot = self._free_slots.pop()
        self.running[slot] = request
        self._turn[slot], self._num_blocks_of[slot] = next(self._turns), len(request.blocks)
        self.slots.start(request, token_ids)
        request.saved, request.needed_blocks, request.started = None, 0, request.started or time.time()
        runner.start_slot(slot)
        return True

    def _follow(self, request: Request, leader: Request, length: int, reserve: int) -> bool:
        """Share the prompt a sibling is computing; its last block, if partly full, is copied once computed."""
        full, has_tail = length // self.block_size, length % self.block_size > 0
        if len(self.pool) < has_tail + reserve:
            request.needed_blocks = int(has_tail)
            return False
        shared = leader.blocks[:full]
        self.pool.share(shared)
        request.blocks = shared + self.pool.take(int(has_tail))
        request.computed, request.leader = length, leader
        leader.followers.append(request)
        return True

    def _lead(self, request: Request, token_ids: Array, reserve: int) -> bool:
        """Take blocks for all tokens of a request: cached ones for a prefix, then new ones."""
        size, length = self.block_size, len(token_ids)
        shared, computed, source, chain = self._cached_prefix(request, token_ids)
        needed, free = math.ceil(length / size) - len(shared), len(self.pool)
        self.pool.share(shared)
        if len(self.pool) < needed + reserve:
            request.needed_blocks = needed + free - len(self.pool)  # cached blocks that nobody holds count as free
            self.pool.give_back(shared)
            return False
        request.blocks = shared + self.pool.take(needed)
        request.computed, request.chain, request.num_cached = computed, chain, len(shared)
        if source is not None:
            earlier = {target: origin for origin, target in self._copies_before}  # all copies of a step are made at once
            self._copies_before.append((earlier.get(source, source), request.blocks[computed // size]))
        return True

    def _cached_prefix(self, request: Request, token_ids: Array) -> tuple[list[int], int, int | None, Hashable]:
        """(blocks to share, tokens they and the block to copy cover, block to copy, number of the last in the cache)."""
        size, most = self.block_size, len(token_ids) - 1  # the last token is computed again: it predicts the next
        kept = self._kept(request.rollout.id, request.adapter) if _has_sampled(request) else None
        if kept is not None and 0 < kept.num_tokens <= most and np.array_equal(kept.token_ids, token_ids[: kept.num_tokens]):
            full, rest = divmod(kept.num_tokens, size)
            return kept.blocks[:full], kept.num_tokens, kept.blocks[full] if rest else None, kept.chain
        if request.rollout.parent is not None:
            parent, at = request.rollout.parent
            computed = self._computed_tokens(parent, request.adapter)
            covered = min(most, at, computed.num_tokens)
            if covered > 0 and np.array_equal(computed.token_ids[:covered], token_ids[:covered]):
                source = computed.blocks[covered // size] if covered % size else None
                return computed.blocks[: covered // size], covered, source, None
        root = self._root
        if request.held is not None:
            self._held.add(request.held)
            root = _root_of(request.held)
        found, chain = self.pool.find(root, self._pieces(token_ids, 0, most // size))
        return found, len(found) * size, None, chain

    def _computed_tokens(self, rollout_id: str, adapter: int) -> Computed:
        """Of a running rollout with this adapter, else what was kept when it left its slot."""
        for request in self.running.values():
            if request.rollout.id == rollout_id and request.adapter == adapter and self.computed(request) > 0:
                return Computed(self.slots.tokens[request.slot], request.blocks, self.computed(request))
        return self._kept(rollout_id, adapter)

    def _kept(self, rollout_id: str, adapter: int) -> Computed:
        kept = self.pool.kept(rollout_id)
        return kept if kept.adapter == adapter else NOTHING

    def _pieces(self, token_ids: Array, start: int, stop: int) -> Iterator[bytes]:
        """The tokens of blocks `start` to `stop`."""
        size = self.block_size
        return (token_ids[block * size : (block + 1) * size].tobytes() for block in range(start, stop))

    def _plan_chunks(self) -> tuple[list[Chunk], list[tuple[int, int]]]:
        """The chunks of this step, and the blocks to copy after it."""
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        rows_left, sampled_left = self._max_prompt_tokens, self._max_sampled
        for request in list(self._computing):
            length, start = int(self.slots.length[request.slot]), request.computed
            stop = min(length, start + rows_left)
            sampling = [request, *request.followers] if stop == length else []
            if stop == start or len(sampling) > sampled_left:
                break
            chunks.append(Chunk(request.slot, start, stop, [each.slot for each in sampling]))
            rows_left, sampled_left = rows_left - (stop - start), sampled_left - len(sampling)
            request.computed = stop
            self._cache_blocks(request, stop)
            if sampling:
                copies += self._complete(request, length)
        self._num_chunks += len(chunks)
        return chunks, copies

    def _complete(self, request: Request, length: int) -> list[tuple[int, int]]:
        """The prompt is done: the request and its followers decode from the next step on. Returns the blocks to copy."""
        full = length // self.block_size
        copies = []
        for follower in request.followers:
            follower.leader, follower.chain, follower.num_cached = None, request.chain, request.num_cached
            if length % self.block_size:
                copies.append((request.blocks[full], follower.blocks[full]))
            self._is_decoding[follower.slot] = True
        request.followers = []
        self._is_decoding[request.slot] = True
        self._stop_computing(request)
        return copies

    def _stop_computing(self, request: Request) -> None:
        key = self._computing.pop(request, None)
        if key is not None and self._leaders.get(key) is request:
            del self._leaders[key]

    def _cache_blocks(self, request: Request, computed: int) -> None:
        """Put the full blocks of the first `computed` tokens into the prefix cache."""
        if request.chain is None:
            return
        start, full = request.num_cached, computed // self.block_size
        pieces = self._pieces(self.slots.tokens[request.slot], start, full)
        for block, piece in zip(request.blocks[start:full], pieces, strict=True):
            request.chain = self.pool.remember(block, request.chain, piece)
        request.num_cached = max(start, full)

    # Leaving a slot

    def release(self, request: Request) -> None:
        """Take a request off its slot. Followers that wait for its prompt are retracted."""
        slot = request.slot
        followers, request.followers = request.followers, []
        for follower in followers:
            follower.leader, follower.computed = None, 0
            self.retract(follower)
        if request.leader is not None:
            request.leader.followers.remove(request)
            request.leader, request.computed = None, 0  # what it shares is not computed yet
        computed = self.computed(request)
        self._cache_blocks(request, computed)
        if computed > 0:
            blocks = request.blocks[: math.ceil(computed / self.block_size)]
            token_ids = self.slots.tokens[slot, :computed].copy()
            self.pool.keep(request.rollout.id, Computed(token_ids, blocks, computed, request.chain, request.adapter))
        if self._keeps_leases:
            self.leases.pop(request.rollout.id, None)
            self.leases[request.rollout.id] = request.held
            if len(self.leases) > MOST_LEASES:
                self.forget(next(iter(self.leases)))
        self._stop_computing(request)
        del self.running[slot]
        self.slots.shapers.pop(slot, None)
        self.slots.let_go(slot)
        self._is_decoding[slot] = False
        self.slots.epoch[slot] += 1
        self.slots.in_flight[slot] = 0
        self._free_slots.append(slot)
        self.pool.give_back(request.blocks)
        request.slot, request.blocks = -1, []
        request.computed, request.num_cached, request.chain = 0, 0, None

    def retract(self, request: Request) -> None:
        """Take a request's blocks; it resumes from its tokens before anything new starts."""
        request.saved = self.sampled_tokens(request)
        self.release(request)
        self.retracted[request] = None
        self.retracted.move_to_end(request, last=False)
        self.num_retractions += 1

    def retract_all(self) -> None:
        """Retract everything; the first admitted resumes first."""
        for request in sorted(self.running.values(), key=lambda each: -self._turn[each.slot]):
            if request.slot >= 0:  # a follower was retracted with its leader
                self.retract(request)

    def sampled_tokens(self, request: Request, *, skip: int = 0) -> SampledTokens:
        """What a request has sampled in this call, whether it runs or waits; `skip` applies to running ones only."""
        if request.saved is not None:
            return request.saved
        slots, slot = self.slots, request.slot
        part = slot, slice(len(request.rollout) + skip, int(slots.length[slot]) if slot >= 0 else 0)
        arrays = (slots.tokens[part].copy(), slots.logprobs[part].copy(), slots.versions[part].copy())
        entropies = None if slots.entropies is None else slots.entropies[part].copy()
        return SampledTokens(*arrays, request.masks[skip:], entropies)

    def computed(self, request: Request) -> int:
        """How many tokens' keys and values are in its blocks: while decoding, all but the last sampled."""
        if request.slot < 0 or request.leader is not None:
            return 0
        return int(self.slots.length[request.slot]) - 1 if self._is_decoding[request.slot] else request.computed

    # Weights

    @property
    def has_holders(self) -> bool:
        """Whether a rollout runs the newest adapter, or will in its next turn, and may keep it."""
        return any(request.held is None for request in self.started()) or None in self.leases.values()

    def hold(self, held: HeldAdapter) -> None:
        """Let the rollouts that have begun keep the adapter they run, if they do not keep an older one."""
        self.leases.update([(name, held) for name, kept in self.leases.items() if kept is None])
        self.pool.hold(held)
        for request in self.started():
            if request.held is None:
                request.held = held
                if request.slot >= 0:
                    self.slots.hold(request.slot, held)

    def new_weights(self, root: Hashable) -> None:
        """Empty the prefix cache, except of adapters that are still held. Blocks of running rollouts, which now mix versions,
        never enter it. Kept ones stay."""
        self._root = root
        left = self.pool.forget_prefixes(but=map(_root_of, self._held))
        self._leaders.clear()
        for request in self.running.values():
            if request.chain not in left:
                request.chain = None

    def forget_cache(self) -> None:
        """Called before the KV cache's memory is released, when nothing runs."""
        assert not self.running
        self.pool.forget_kept()
        self.pool.forget_prefixes()
        self._copies_before.clear()


def _root_of(held: HeldAdapter) -> Hashable:
    """Where the blocks computed with it start in the prefix cache."""
    return "adapter", held.serial


def _has_sampled(request: Request) -> bool:
    """Whether its tokens are its own. Before, they are a prompt, whose blocks siblings share if one version computed them."""
    return request.rollout.num_sampled > 0 or (request.saved is not None and len(request.saved.token_ids) > 0)
