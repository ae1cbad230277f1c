"""Thousands of requests that are shared, forked, cancelled, interrupted and starved of blocks, and nothing lost or changed.

Every test is one seed: what happens in a step is drawn from it, so that a failure happens again. Whoever was drawn under
one set of weights must be, token for token, what a fresh core draws of it alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from stepping import Asked, ask, assert_nothing_is_held, make_core
from strategies import quick

from headrace.engine.native.blocks import SCRATCH, BlockPool
from headrace.model.load import prepare
from headrace.records import FinishReason, Rollout, Sampling

CONTEXT, BLOCK, VOCABULARY = 48, 4, 32
SLOTS = 12
STOP_ID, STOP_TEXT = 3, "4 5"


def tiny(seed: int) -> transformers.PreTrainedModel:
    """One layer: what is tested is not the model."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.4)
    return prepare(model.eval().float(), name="tiny")


def text_of(token_ids: list[int]) -> str:
    return " ".join(str(token) for token in token_ids)


@dataclass
class Told:
    """A request as the test knows it."""

    asked: Asked
    weights: set[int] = field(default_factory=set)
    """Every set of weights it ran under; while it waits, those it would begin under."""
    is_cancelled: bool = False
    is_from_older_keys: bool = False
    """It was forked from one that other weights may have computed."""


class Storm:
    """One core and everything that is done to it."""

    def __init__(self, seed: int, *, num_requests: int, num_blocks: int) -> None:
        self.num_requests = num_requests
        self.random = np.random.default_rng(seed)
        self.model = tiny(seed=1)
        self.core = make_core(
            self.model,
            slots=SLOTS,
            context=CONTEXT,
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_prompt_tokens=24,
            max_sampled=5,
            decode=text_of,
        )
        self.told: dict[str, Told] = {}
        self.weights, self.version = 0, 0
        self.kept = [[parameter.detach().clone() for parameter in tiny(seed=other).parameters()] for other in range(1, 4)]
        self.happened: Counter[str] = Counter()
        beginnings = [self.random.integers(4, VOCABULARY, size=length) for length in (3, 8, 17)]
        self.pool = [
            np.concatenate([beginnings[self.random.integers(3)], self.random.integers(4, VOCABULARY, size=extra)])
            for extra in self.random.integers(0, 14, size=25)
        ]

    # What may happen in a step

    def sampling(self) -> Sampling:
        choice = self.random.integers(6)
        return Sampling(
            max_tokens=1 if choice == 0 else int(self.random.integers(2, 25)),
            top_k=4 if choice == 1 else 0,
            stop_ids=(STOP_ID,) if choice in (2, 3) else (),
            stop=(STOP_TEXT,) if choice in (3, 4) else (),
            min_tokens=2 if choice == 3 else 0,
            temperature=0.0 if choice == 5 else 1.0,
            seed=int(self.random.integers(1 << 40)),
        )

    def submit(self, rollout: Rollout, sampling: Sampling, *, is_from_older_keys: bool = False) -> Asked:
        asked = ask(self.core, rollout, sampling)
        self.told[rollout.id] = Told(asked, {self.weights}, is_from_older_keys=is_from_older_keys)
        return asked

    def name(self, kind: str) -> str:
        self.happened[kind] += 1
        return f"{kind} {len(self.told)}"

    def prompt(self) -> None:
        ids = self.pool[self.random.integers(len(self.pool))]
        self.submit(Rollout.from_prompt(ids, id=self.name("prompt")), self.sampling())

    def siblings(self) -> None:
        ids, sampling = self.pool[self.random.integers(len(self.pool))], self.sampling()
        for _ in range(self.random.integers(2, 9)):
            seed = int(self.random.integers(1 << 40))
            self.submit(Rollout.from_prompt(ids, id=self.name("sibling")), sampling.with_seed(seed))

    def fork_finished(self) -> None:
        ended = [each.asked.rollout for each in self.told.values() if each.asked.rollout is not None]
        if ended:
            self.fork(ended[self.random.integers(max(0, len(ended) - 20), len(ended))], "fork of one finished")

    def turn(self) -> None:
        """A finished rollout goes on after a reply."""
        recent = [each for each in list(self.told.values())[-20:] if each.asked.rollout is not None]
        names = [each.asked.done.id for each in recent if len(each.asked.done) < CONTEXT - 20 and self.is_newest(each)]
        if names:
            before = self.told.pop(name := names[self.random.integers(len(names))])
            self.told[f"{name} until turn {len(before.asked.done.calls)}"] = before
            reply = self.random.integers(4, VOCABULARY, size=self.random.integers(1, 9))
            is_mixed = before.is_from_older_keys or before.weights != {self.weights}
            self.submit(before.asked.done.append(reply), self.sampling(), is_from_older_keys=is_mixed)
            self.happened["turn"] += 1

    def is_newest(self, each: Told) -> bool:
        return self.told.get(each.asked.done.id) is each

    def fork_running(self) -> None:
        running = list(self.core.scheduler.running.values())
        if running:
            request = running[self.random.integers(len(running))]
            drawn = self.core.scheduler.sampled_tokens(request).token_ids
            ids = np.concatenate([request.rollout.token_ids, drawn])
            at = int(self.random.integers(1, len(ids) + 1))
            if at < CONTEXT:
                fork = Rollout.from_prompt(ids[:at], id=self.name("fork of one running"))
                is_mixed = self.is_mixed(request.rollout.id)
                self.submit(fork.replace(parent=(request.rollout.id, at)), self.sampling(), is_from_older_keys=is_mixed)

    def fork(self, parent: Rollout, kind: str) -> None:
        at = int(self.random.integers(1, len(parent) + 1))
        if at < CONTEXT:
            fork = parent.forked(at, id=self.name(kind))
            self.submit(fork, self.sampling(), is_from_older_keys=self.is_mixed(parent.id))

    def is_mixed(self, rollout_id: str) -> bool:
        told = self.told[rollout_id]
        return told.is_from_older_keys or told.weights != {self.weights}

    def cancel(self) -> None:
        going = [each for each in self.told.values() if not each.asked.is_over and not each.is_cancelled]
        if going:
            each = going[self.random.integers(len(going))]
            each.is_cancelled = True
            self.core.cancel(each.asked.request)
            self.happened["cancel"] += 1

    def abort(self) -> None:
        """And resume each, as the orchestrator does."""
        begun = [each for each in self.told.values() if not each.asked.is_over and not each.is_cancelled]
        self.core.abort_running()
        self.core.forget_kept()
        for each in begun:
            rollout = each.asked.rollout
            if rollout is not None and rollout.finish_reason is FinishReason.ABORT:
                left = rollout.calls[-1].sampling.max_tokens - (rollout.calls[-1].stop - rollout.calls[-1].start)
                resumed = Sampling(max_tokens=max(1, left), seed=rollout.calls[-1].sampling.seed)
                self.submit(
                    rollout, resumed, is_from_older_keys=rollout.parent is not None and self.is_mixed(rollout.parent[0])
                )
                self.happened["resume"] += 1

    def retract(self) -> None:
        self.core.retract_running()
        self.happened["retract"] += 1

    def swap(self) -> None:
        """Other weights, or the same under another version."""
        self.version += 1
        if self.random.integers(2):
            self.weights = (self.weights + 1) % len(self.kept)
            self.happened["swap"] += 1
            self.use(self.weights)
        self.core.changed_weights(policy="policy", lineage="life", version=self.version)
        for each in self.told.values():
            if (
                each.asked.request.slot < 0
                and each.asked.request not in self.core.scheduler.retracted
                and not each.asked.is_over
            ):
                rollout = each.asked.request.rollout
                may_reuse = rollout.parent is not None or rollout.num_sampled > 0
                each.is_from_older_keys |= may_reuse and each.weights != {self.weights}
                each.weights = {self.weights}
            elif not each.asked.is_over:
                each.weights.add(self.weights)

    def use(self, weights: int) -> None:
        with torch.no_grad():
            for parameter, kept in zip(self.model.parameters(), self.kept[weights], strict=True):
                parameter.copy_(kept)

    # The whole

    def blow(self) -> None:
        rare = {self.abort: 0.02, self.retract: 0.02, self.swap: 0.015}
        often = {self.prompt: 0.5, self.siblings: 0.12, self.cancel: 0.12, self.turn: 0.2}
        forks = {self.fork_finished: 0.3, self.fork_running: 0.1}
        for number in range(100_000):
            if len(self.told) < self.num_requests:
                for action, chance in {**rare, **often, **forks}.items():
                    if self.random.random() < chance and (action in rare or self.core.num_waiting < 60):
                        action()
            elif not self.core.has_work:
                break
            self.core.step()
            if number % 16 == 0:
                self.check_blocks()

    def check_blocks(self) -> None:
        """Who holds a block is counted, and nobody writes to one that another reads."""
        scheduler = self.core.scheduler
        holders: Counter[int] = Counter()
        for request in scheduler.running.values():
            holders.update(request.blocks)
            table = scheduler.slots.table[request.slot]
            assert table[: len(request.blocks)].tolist() == request.blocks
            assert (table[len(request.blocks) :] == SCRATCH).all()
        assert SCRATCH not in holders
        assert scheduler.pool._references == [holders[block] for block in range(scheduler.pool.num_blocks)]
        for slot in np.flatnonzero(scheduler._is_decoding).tolist():
            request, index = scheduler.running[slot], (int(scheduler.slots.length[slot]) - 1) // BLOCK
            if index < len(request.blocks):
                assert holders[request.blocks[index]] == 1

    def ended(self) -> list[Told]:
        return [each for each in self.told.values() if not each.is_cancelled]


def references(storm: Storm, wanted: list[Told]) -> dict[int, Rollout]:
    """By `id`: each alone under its own weights on a core that has seen nothing."""
    by_weights: dict[int, list[Told]] = defaultdict(list)
    for each in wanted:
        by_weights[next(iter(each.weights))].append(each)
    found = {}
    core = make_core(storm.model, slots=1, context=CONTEXT, block_size=BLOCK, decode=text_of)
    for weights, members in by_weights.items():
        storm.use(weights)
        for each in members:
            request = each.asked.request
            version = core.version + 1
            core.changed_weights(policy="policy", lineage=f"alone {version}", version=version)  # nothing is cached
            alone = ask(core, request.rollout.replace(parent=None), request.sampling)
            while core.has_work:
                core.step()
            found[id(each)] = alone.done
    return found


@pytest.mark.parametrize(
    "num_blocks", [pytest.param(14, id="few blocks"), pytest.param(60, id="blocks for all", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("seed", "num_requests"), [(5, 200), *(pytest.param(seed, 1_000, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_nothing_is_lost_and_nothing_is_changed(seed: int, num_requests: int, num_blocks: int) -> None:
    storm = Storm(seed, num_requests=num_requests, num_blocks=num_blocks)
    storm.blow()
    assert_nothing_is_held(storm.core)
    kinds = ("prompt", "sibling", "cancel", "resume", "retract", "swap", "turn")
    forks = [f"fork of one {kind}" for kind in ("finished", "running")]
    missing = [kind for kind in (*kinds, *forks) if not storm.happened[kind]]
    assert not missing, storm.happened
    if num_blocks < 20:
        assert storm.core.scheduler.num_retractions > num_requests // 10
    for name, each in storm.told.items():
        assert each.asked.is_over != each.is_cancelled, f"{name} was lost, or ended after it was cancelled"
        assert each.asked.error is None
    for each in storm.ended():
        check_ending(each.asked.done, each.asked.request.sampling)
    same = [each for each in storm.ended() if len(each.weights) == 1 and not each.is_from_older_keys]
    assert len(same) > num_requests // 3
    same = [same[index] for index in storm.random.permutation(len(same))[: num_requests // 4]]
    expected = references(storm, same)
    for each in same:
        rollout, alone = each.asked.done, expected[id(each)]
        assert rollout.token_ids.tolist() == alone.token_ids.tolist(), rollout.id
        np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-5, rtol=1e-5)
        assert rollout.finish_reason is alone.finish_reason
        assert rollout.sampling_mask == alone.sampling_mask


def check_ending(rollout: Rollout, sampling: Sampling) -> None:
    """It stopped where it had to, and its versions only rise."""
    call = rollout.calls[-1]
    drawn = rollout.token_ids[call.start :].tolist()
    assert (np.diff(rollout.versions[call.start :]) >= 0).all()
    assert 1 <= len(drawn) <= sampling.max_tokens and len(rollout) <= CONTEXT
    interrupted = rollout.token_ids[start_of_text(rollout) : call.start].tolist()
    ends = [
        count
        for count in range(1, len(drawn) + 1)
        if drawn[count - 1] in sampling.stop_ids
        or (count > sampling.min_tokens and completes(interrupted + drawn[:count], sampling.stop))
    ]
    if ends:
        assert ends == [len(drawn)] and rollout.finish_reason is FinishReason.STOP
    else:
        assert rollout.finish_reason is FinishReason.LENGTH
        assert len(drawn) == sampling.max_tokens or len(rollout) == CONTEXT


def start_of_text(rollout: Rollout) -> int:
    """Where the first of the calls began that were interrupted one after the other, up to the last."""
    start = rollout.calls[-1].start
    for call in reversed(rollout.calls[:-1]):
        if call.finish_reason is not FinishReason.ABORT or call.stop != start:
            break
        start = call.start
    return start


def completes(token_ids: list[int], stops: tuple[str, ...]) -> bool:
    """Whether the last token makes the text hold a stop text once more."""
    before, text = text_of(token_ids[:-1]), text_of(token_ids)
    return any(text.count(stop) > before.count(stop) for stop in stops)


# The pool of blocks


@dataclass
class Held:
    """Blocks somebody holds and what they are filled with."""

    root: str
    blocks: list[int]
    pieces: list[bytes]
    known: int = 0
    """How many of them were remembered."""
    chain: object = None


@quick
@given(st.data())
def test_blocks_are_counted_and_prefixes_are_found_under_their_root(data: st.DataObject) -> None:
    """Against a plain model: who holds what, and what each block was filled with when it was remembered."""
    pool = BlockPool(data.draw(st.integers(2, 12)))
    held: list[Held] = []
    content: dict[int, tuple[str, tuple[bytes, ...]]] = {}
    epoch = 0
    for _ in range(data.draw(st.integers(1, 40))):
        counts = Counter(block for each in held for block in each.blocks)
        assert SCRATCH not in counts
        assert len(pool) == pool.num_blocks - 1 - len(counts)
        action = data.draw(st.sampled_from(["begin", "remember", "share", "give back", "forget"]))
        if action == "begin":
            root = f"{data.draw(st.sampled_from('ab'))} {epoch}"
            pieces = data.draw(st.lists(st.sampled_from([b"x", b"y"]), min_size=1, max_size=4))
            shared, number = pool.find(root, pieces)
            for depth, block in enumerate(shared, start=1):
                assert content[block] == (root, tuple(pieces[:depth]))
            pool.share(shared)
            needed = len(pieces) - len(shared)
            if needed > len(pool):
                pool.give_back(shared)
                continue
            taken = pool.take(needed)
            assert len(set(taken)) == needed and not set(taken) & (counts.keys() | set(shared) | {SCRATCH})
            for block in taken:
                content.pop(block, None)
            held.append(Held(root, shared + taken, pieces, len(shared), number))
        elif action == "forget":
            pool.forget_prefixes()
            epoch += 1
            content.clear()
            for each in held:
                each.chain = None  # as the scheduler does: what it holds is of more than one version
        elif held:
            each = held[data.draw(st.integers(0, len(held) - 1))]
            if action == "remember" and each.chain is not None and each.known < len(each.blocks):
                block, depth = each.blocks[each.known], each.known + 1
                each.chain = pool.remember(block, each.chain, each.pieces[each.known])
                each.known = depth
                content.setdefault(block, (each.root, tuple(each.pieces[:depth])))
            elif action == "share":
                pool.share(each.blocks)
                held.append(Held(each.root, list(each.blocks), each.pieces, each.known, each.chain))
            elif action == "give back":
                held.remove(each)
                pool.give_back(each.blocks)
    for each in held:
        pool.give_back(each.blocks)
    assert len(pool) == pool.num_blocks - 1
    everything = pool.take(len(pool))
    assert sorted(everything) == list(range(1, pool.num_blocks))
    assert not any(pool.find(f"{root} {epoch}", [piece])[0] for root in "ab" for piece in (b"x", b"y"))


def test_a_block_given_back_too_often_is_noticed() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="too often"):
        pool.give_back(blocks)
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        pool.take(4)


def test_the_longest_unused_prefix_is_forgotten_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(5)
    old, new = pool.take(2), pool.take(2)
    for root, blocks in (("old", old), ("new", new)):
        number: object = root
        for block in blocks:
            number = pool.remember(block, number, b"x")
    pool.give_back(old)
    pool.give_back(new)
    assert pool.take(1) == [old[1]]
    assert len(pool.find("old", [b"x", b"x"])[0]) == 1 and len(pool.find("new", [b"x", b"x"])[0]) == 2
    assert pool.take(1) == [old[0]]
    assert not pool.find("old", [b"x"])[0] and len(pool.find("new", [b"x", b"x"])[0]) == 2
