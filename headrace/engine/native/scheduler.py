"""Who computes what in the next step: admission, shared prompts, chunks of long ones, and whose blocks are taken back.

Rollouts that run come first: each gets a block when its last one is full. If none is free, the rollout admitted last is
retracted: its blocks are taken, its tokens stay, and it is admitted again before anything new. The one admitted first is
never retracted for another, so that however few blocks there are, somebody always ends.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from headrace.engine.native.blocks import BlockPool
from headrace.engine.native.request import Drawings, Pinned
from headrace.engine.native.work import Chunk, Work
from headrace.records import FinishReason

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from headrace.engine.native.work import Runner, Slots
    from headrace.engine.request import Beginning, Request
    from headrace.records import Array


_KEPT_SECONDS = 0.25
"""How long slots are kept for rollouts that were aborted: what they take to the launcher and back, many times over."""


class Scheduler:
    """Owns the slots and the blocks. It computes nothing and draws nothing."""

    def __init__(self, lines: Slots, *, block_size: int, num_blocks: int, most_draws: int, most_tokens: int) -> None:
        self.slots, self.block_size = lines, block_size
        slots, self.context = lines.tokens.shape
        self.pool = BlockPool(num_blocks)
        self._new: OrderedDict[Request, None] = OrderedDict()
        self._resumed: OrderedDict[Request, None] = OrderedDict()
        """Rollouts that were aborted, and wait to go on."""
        self.retracted: OrderedDict[Request, None] = OrderedDict()
        self.running: dict[int, Request] = {}
        """By slot, in the order of admission; those still computing their prompt are among them."""
        self.is_admitting = True
        self.num_retractions = 0
        self._root: Hashable = ("", 0)
        self._most_draws, self._most_tokens = most_draws, most_tokens
        self._computing: OrderedDict[Request, None] = OrderedDict()
        """Those whose prompt is not complete, followers apart."""
        self._leaders: dict[Beginning, Request] = {}
        self._pins: OrderedDict[str, Pinned | None] = OrderedDict()
        self._copies_before: list[tuple[int, int]] = []
        self._free_slots = list(range(slots - 1, -1, -1))
        self._owned = np.zeros(slots, dtype=np.int64)
        """Blocks of each slot."""
        self._turn = np.zeros(slots, dtype=np.int64)
        """Admissions are numbered; the highest is retracted first."""
        self._turns = itertools.count()
        self._is_decoding = np.zeros(slots, dtype=bool)
        self._num_kept, self._kept_until = 0, 0.0

    # What waits

    def submit(self, request: Request) -> None:
        is_interrupted = request.rollout.finish_reason is FinishReason.ABORT  # it goes on before anything new begins
        if is_interrupted:
            self._num_kept = max(0, self._num_kept - 1)
        (self._resumed if is_interrupted else self._new)[request] = None

    def keep_slots(self, count: int) -> None:
        """So many rollouts were aborted, and are about to be resumed by whoever asked for them: until they are, nothing new
        takes their slots. Those who do not come back have them kept for `_KEPT_SECONDS`."""
        self._num_kept, self._kept_until = count, time.monotonic() + _KEPT_SECONDS

    @property
    def is_keeping_slots(self) -> bool:
        """Whether something new would begin, were it not for rollouts that are yet to be resumed."""
        is_kept = 0 < len(self._free_slots) <= self._num_kept and time.monotonic() < self._kept_until
        return is_kept and bool(self._new) and not self._resumed and not self.retracted

    def withdraw(self, request: Request) -> None:
        """Forget one that waits."""
        for queue in (self.retracted, self._resumed, self._new):
            queue.pop(request, None)

    def waiting(self) -> Iterator[Request]:
        """Requests that have not begun, in the order they will."""
        yield from self._resumed
        yield from self._new

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._resumed) + len(self._new)

    # One step

    def plan(self, runner: Runner) -> Work | None:
        """The next step, or None if there is nothing to compute until more is known."""
        decoding = self._grow(runner)
        self._admit(runner)
        chunks, copies_after = self._chunks()
        if not chunks and not len(decoding):
            return None
        copies_before, self._copies_before = self._copies_before, []
        return Work(chunks, decoding, copies_before, copies_after)

    def _grow(self, runner: Runner) -> Array:
        """Slots that decode, each with a block for the token it is fed."""
        slots = self.slots
        reached = slots.length + slots.flying
        active = np.flatnonzero(self._is_decoding & (reached < slots.limit))
        needed = (reached[active] - 1) // self.block_size + 1
        short = active[needed > self._owned[active]]
        for slot in short[np.argsort(self._turn[short])].tolist():
            request = self.running.get(slot)
            if request is None or not self._make_room(request):
                continue
            block = self.pool.take(1)[0]
            index = int(self._owned[slot])
            request.blocks.append(block)
            slots.table[slot, index] = block
            self._owned[slot] = index + 1
            runner.grow(slot, index, block)
        return active[self._is_decoding[active]]

    def _make_room(self, request: Request) -> bool:
        """See that a block is free, at the cost of rollouts admitted later; False if that cost was the request itself."""
        while not len(self.pool):
            last = max(self.running.values(), key=lambda each: self._turn[each.slot])
            if last is request and len(self.running) == 1 and self._drop_a_pin():
                continue
            self.retract(last)
            if last is request:
                return False
            if not len(self.pool):
                self._drop_a_pin()  # what was taken back is pinned, or shared with what runs
        return True

    def _admit(self, runner: Runner) -> None:
        while self._free_slots:
            queue = self.retracted or ((self._resumed or self._new) if self.is_admitting else None)
            if not queue or (queue is self._new and self.is_keeping_slots):
                return
            request = next(iter(queue))
            if not self._place(request, runner):
                if self.running or not self._drop_a_pin():
                    return
                continue
            del queue[request]

    def _place(self, request: Request, runner: Runner) -> bool:
        """Give a request a slot and the blocks of its tokens; False if there are too few."""
        rollout, sampling, saved = request.rollout, request.sampling, request.saved
        token_ids = rollout.token_ids if saved is None else np.concatenate([rollout.token_ids, saved.token_ids])
        length = len(token_ids)
        reserve = len(self.running) // 4 + 1 if self.running else 0  # those that run will soon want more
        beginning = rollout.parent, token_ids.tobytes()  # a fork may go on from older keys than the same tokens elsewhere
        leader = self._leaders.get(beginning)
        if leader is not None and len(leader.followers) + 1 < self._most_draws:
            is_placed = self._follow(request, leader, length, reserve)
        else:
            leader = None
            is_placed = self._begin(request, token_ids, reserve)
        if not is_placed:
            return False
        slot = request.slot = self._free_slots.pop()
        self.running[slot] = request
        self._turn[slot], self._owned[slot] = next(self._turns), len(request.blocks)
        slots = self.slots
        slots.epoch[slot] += 1
        slots.tokens[slot, :length] = token_ids
        if saved is not None:
            drawn = slice(len(rollout), length)
            slots.logprobs[slot, drawn], slots.versions[slot, drawn] = saved.logprobs, saved.versions
            request.saved = None
        limit = min(self.context, len(rollout) + sampling.max_tokens)
        slots.is_watched[slot] = request.on_tokens is not None or sampling.is_truncated or bool(sampling.stop)
        slots.begin(slot, sampling, length=length, start=len(rollout), limit=limit, blocks=request.blocks)
        request.started = request.started or time.time()
        if leader is None:
            self._computing[request] = None
            self._leaders[beginning], request.leads = request, beginning
        runner.begin(slot)
        return True

    def _follow(self, request: Request, leader: Request, length: int, reserve: int) -> bool:
        """Share the prompt that a sibling is computing; the block it ends in is copied once computed."""
        full, has_tail = length // self.block_size, length % self.block_size > 0
        if len(self.pool) < has_tail + reserve:
            return False
        shared = leader.blocks[:full]
        self.pool.share(shared)
        request.blocks = shared + self.pool.take(int(has_tail))
        request.computed, request.leader = length, leader
        leader.followers.append(request)
        return True

    def _begin(self, request: Request, token_ids: Array, reserve: int) -> bool:
        """Blocks for all its tokens: those that hold a beginning of it already, then new ones."""
        size, length = self.block_size, len(token_ids)
        shared, computed, source, chain = self._beginning(request, token_ids)
        needed = math.ceil(length / size) - len(shared)
        self.pool.share(shared)
        if len(self.pool) < needed + reserve:
            self.pool.give_back(shared)
            return False
        request.blocks = shared + self.pool.take(needed)
        request.computed, request.chain, request.remembered = computed, chain, len(shared)
        if source is not None:
            earlier = {target: origin for origin, target in self._copies_before}  # all copies of a step are made at once
            self._copies_before.append((earlier.get(source, source), request.blocks[computed // size]))
        return True

    def _beginning(self, request: Request, token_ids: Array) -> tuple[list[int], int, int | None, Hashable]:
        """(blocks to share, tokens they and a copied block cover, the block to copy, the chain they make)."""
        size, most = self.block_size, len(token_ids) - 1  # the last token is computed again: it predicts the next
        parent = request.rollout.parent
        pinned = None if parent is None else self._lookup(parent[0])
        if parent is not None and pinned is not None:
            covered = min(most, parent[1], pinned.computed)
            if covered > 0 and np.array_equal(pinned.token_ids[:covered], token_ids[:covered]):
                source = pinned.blocks[covered // size] if covered % size else None
                return pinned.blocks[: covered // size], covered, source, None
        found = self.pool.find(self._root, self._pieces(token_ids, 0, most // size))
        chain = found[-1].number if found else self._root
        return [prefix.block for prefix in found], len(found) * size, None, chain

    def _pieces(self, token_ids: Array, start: int, stop: int) -> Iterator[bytes]:
        """The tokens of blocks `start` to `stop`."""
        size = self.block_size
        return (token_ids[block * size : (block + 1) * size].tobytes() for block in range(start, stop))

    def _chunks(self) -> tuple[list[Chunk], list[tuple[int, int]]]:
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        rows, draws = self._most_tokens, self._most_draws
        for request in list(self._computing):
            length, start = int(self.slots.length[request.slot]), request.computed
            stop = min(length, start + rows)
            drawing = [request, *request.followers] if stop == length else []
            if stop == start or len(drawing) > draws:
                break
            chunks.append(Chunk(request.slot, start, stop, [each.slot for each in drawing]))
            rows, draws = rows - (stop - start), draws - len(drawing)
            request.computed = stop
            self._remember(request, stop)
            if drawing:
                copies += self._complete(request, length)
        return chunks, copies

    def _complete(self, request: Request, length: int) -> list[tuple[int, int]]:
        """A prompt is computed: it and its followers decode from the next step on."""
        full = length // self.block_size
        copies = []
        for follower in request.followers:
            follower.leader, follower.chain, follower.remembered = None, request.chain, request.remembered
            if length % self.block_size:
                copies.append((request.blocks[full], follower.blocks[full]))
            self._is_decoding[follower.slot] = True
        request.followers = []
        self._is_decoding[request.slot] = True
        self._lead_no_more(request)
        return copies

    def _lead_no_more(self, request: Request) -> None:
        self._computing.pop(request, None)
        if request.leads is not None:
            if self._leaders.get(request.leads) is request:
                del self._leaders[request.leads]
            request.leads = None

    def _remember(self, request: Request, computed: int) -> None:
        """Let the full blocks of what is computed be found by others."""
        if request.chain is None:
            return
        full = computed // self.block_size
        tokens = self.slots.tokens[request.slot]
        for block, piece in zip(
            request.blocks[request.remembered : full], self._pieces(tokens, request.remembered, full), strict=True
        ):
            request.chain = self.pool.remember(block, request.chain, piece)
        request.remembered = max(request.remembered, full)

    # Leaving a slot

    def release(self, request: Request) -> None:
        """Take a request off its slot: it has ended, or nobody wants it. Followers that still wait for it go back."""
        slot = request.slot
        followers, request.followers = request.followers, []
        for follower in followers:
            follower.leader, follower.computed = None, 0
            self.retract(follower)
        if request.leader is not None:
            request.leader.followers.remove(request)
            request.leader, request.computed = None, 0  # what it shares is not computed yet
        computed = self.computed(request)
        self._remember(request, computed)
        self._keep_if_pinned(request, computed)
        self._lead_no_more(request)
        del self.running[slot]
        self._is_decoding[slot] = False
        self.slots.epoch[slot] += 1
        self.slots.flying[slot] = 0
        self._free_slots.append(slot)
        self.pool.give_back(request.blocks)
        request.slot, request.blocks = -1, []
        request.computed, request.remembered, request.chain = 0, 0, None

    def retract(self, request: Request) -> None:
        """Take its blocks; it goes on from its tokens before anything new begins."""
        request.saved = self.drawings(request)
        self.release(request)
        self.retracted[request] = None
        self.retracted.move_to_end(request, last=False)
        self.num_retractions += 1

    def retract_all(self) -> None:
        """Everything that runs is computed again, the first admitted first."""
        for request in sorted(self.running.values(), key=lambda each: -self._turn[each.slot]):
            if request.slot >= 0:  # a follower went with its leader
                self.retract(request)

    def drawings(self, request: Request) -> Drawings:
        """What it has drawn, whether it runs or waits."""
        if request.saved is not None:
            return request.saved
        slot, start = request.slot, len(request.rollout)
        if slot < 0:
            nothing = self.slots.tokens[0, :0]
            return Drawings(nothing, self.slots.logprobs[0, :0], self.slots.versions[0, :0])
        drawn = slice(start, int(self.slots.length[slot]))
        slots = self.slots
        return Drawings(
            slots.tokens[slot, drawn].copy(), slots.logprobs[slot, drawn].copy(), slots.versions[slot, drawn].copy()
        )

    def computed(self, request: Request) -> int:
        """Tokens whose keys and values are there; of one that decodes, all but the last drawn."""
        if request.slot < 0 or request.leader is not None:
            return 0
        return int(self.slots.length[request.slot]) - 1 if self._is_decoding[request.slot] else request.computed

    # Weights, pins

    def new_weights(self, root: Hashable) -> None:
        """Nothing computed before is found from now on, and what runs on mixes versions: it is not remembered."""
        self._root = root
        self.pool.forget_all()
        self._leaders.clear()
        for request in self.running.values():
            request.chain = None

    def pin(self, rollout_id: str) -> None:
        """Keep a rollout's keys and values when it ends, until it is unpinned or their memory is wanted."""
        self._pins.setdefault(rollout_id, None)

    def unpin(self, rollout_id: str) -> None:
        pinned = self._pins.pop(rollout_id, None)
        if pinned is not None:
            self.pool.give_back(pinned.blocks)

    def unpin_all(self) -> None:
        for rollout_id in list(self._pins):
            self.unpin(rollout_id)

    def forget_everything(self) -> None:
        """The cache is gone: nothing may run."""
        assert not self.running
        self.unpin_all()
        self.pool.forget_all()
        self._copies_before.clear()

    @property
    def num_pinned_blocks(self) -> int:
        return sum(len(pinned.blocks) for pinned in self._pins.values() if pinned is not None)

    def _keep_if_pinned(self, request: Request, computed: int) -> None:
        name = request.rollout.id
        if name in self._pins and computed > 0:
            blocks = request.blocks[: math.ceil(computed / self.block_size)]
            self.pool.share(blocks)
            before = self._pins[name]
            self._pins[name] = Pinned(self.slots.tokens[request.slot, :computed].copy(), blocks, computed)
            if before is not None:
                self.pool.give_back(before.blocks)

    def _lookup(self, rollout_id: str) -> Pinned | None:
        """A rollout that runs, or else one pinned: what a pinned one left when it was retracted is older than what it has."""
        for request in self.running.values():
            if request.rollout.id == rollout_id and self.computed(request) > 0:
                return Pinned(self.slots.tokens[request.slot], request.blocks, self.computed(request))
        return self._pins.get(rollout_id)

    def _drop_a_pin(self) -> bool:
        """Its memory is wanted: who goes on from it computes it again."""
        for name, pinned in self._pins.items():
            if pinned is not None:
                self.pool.give_back(pinned.blocks)
                self._pins[name] = None
                self._pins.move_to_end(name)
                return True
        return False
