"""Who computes what and when: shared prompts, whose blocks are taken, who waits, what is refused and what fails."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from families import make
from stepping import ask, assert_nothing_is_held, assert_same_draws, generate, make_core, prompt_rows, run

from headrace.engine.native.step import StepOutput, StepPlan
from headrace.engine.protocol import NotFinite, PromptTooLong, UnusablePrompt
from headrace.model.load import ModelError, prepare
from headrace.records import FinishReason, Rollout, Sampling

if TYPE_CHECKING:
    from headrace.engine.native.core import EngineCore


@pytest.fixture(scope="module")
def model():
    return prepare(make("llama"), name="llama")


def prompt(length: int, *, id: str, seed: int = 0) -> Rollout:
    return Rollout.from_prompt(np.random.default_rng(seed).integers(3, 96, size=length), id=id)


class NoModel:
    """A runner that draws token 5 for everybody: what is left is the cost of scheduling."""

    def __init__(self, core: EngineCore) -> None:
        self.ahead, self.max_sampled, self.max_prompt_tokens = 0, 1 << 30, 8192
        self.start_slot, self.add_block = core.runner.start_slot, core.runner.add_block
        self.prompt_rows = 0

    def launch(self, work: StepPlan) -> StepOutput:
        self.prompt_rows += work.prompt_rows
        rows = len(work.slots)
        return StepOutput(np.full(rows, 5), np.full(rows, -1.0, dtype=np.float32), None)

    def collect(self, ticket: StepOutput) -> StepOutput:
        return ticket


# Few blocks


def test_the_oldest_is_never_retracted_for_a_younger_one(model, monkeypatch) -> None:
    """With blocks for three of twelve long rollouts: whoever loses its blocks is the last admitted of those that run."""
    core = make_core(model, slots=12, num_blocks=24 + 1)
    scheduler, victims = core.scheduler, []
    retract = scheduler.retract

    def watched(request) -> None:
        turns = {slot: int(scheduler._turn[slot]) for slot in scheduler.running}
        victims.append((turns[request.slot], max(turns.values()), min(turns.values()), len(turns)))
        retract(request)

    monkeypatch.setattr(scheduler, "retract", watched)
    asked = [ask(core, prompt(4, id=str(index), seed=index), Sampling(max_tokens=59, seed=index)) for index in range(12)]
    ends: list[int] = []
    for number in range(5_000):
        if not core.has_work:
            break
        core.step()
        ends += [number] * (sum(each.is_over for each in asked) - len(ends))
    assert [each.done.num_sampled for each in asked] == [59] * 12
    assert len(victims) > 12
    for turn, newest, oldest, count in victims:
        assert turn == newest
        assert turn > oldest or count == 1
    assert_nothing_is_held(core)


def test_many_long_rollouts_and_blocks_for_few_all_end(model) -> None:
    """The first ends as if it were alone, and they end about in the order they came."""
    core = make_core(model, slots=16, num_blocks=16 + 1)
    asked = [ask(core, prompt(4, id=str(index), seed=index), Sampling(max_tokens=59, seed=index)) for index in range(16)]
    ended: dict[int, int] = {}
    number = 0
    while core.has_work:
        core.step()
        number += 1
        ended.update({index: number for index, each in enumerate(asked) if each.is_over and index not in ended})
    assert ended[0] == 59  # no step of the first is lost to another
    assert number <= 59 * 16  # at the worst one by one
    places = [sorted(ended.values()).index(ended[index]) for index in range(16)]
    assert max(abs(place - index) for index, place in enumerate(places)) <= 4
    assert core.scheduler.num_retractions > 0
    assert_nothing_is_held(core)


def test_a_rollout_that_does_not_fit_now_is_not_overtaken(model) -> None:
    """A long prompt waits for blocks; short ones that came after it do not take them away for ever."""
    core = make_core(model, slots=8, num_blocks=10 + 1)
    first = ask(core, prompt(30, id="first"), Sampling(max_tokens=30))
    core.step()
    long = ask(core, prompt(60, id="long", seed=1), Sampling(max_tokens=3))
    short = [ask(core, prompt(2, id=f"short {index}", seed=index), Sampling(max_tokens=30)) for index in range(20)]
    while not long.is_over:
        core.step()
    assert first.is_over and not any(each.is_over for each in short)
    run(core)
    assert_nothing_is_held(core)


def test_what_is_kept_gives_way_to_what_runs(model) -> None:
    """It takes memory only as long as nobody needs it, and whoever goes on from it then computes it again."""
    core = make_core(model, slots=2, num_blocks=8 + 1)
    parent = generate(core, prompt(20, id="parent"), Sampling(max_tokens=20))
    assert len(core.scheduler.pool.kept("parent").blocks) == 5 and len(core.scheduler.pool) == 8
    whole = generate(core, prompt(4, id="whole", seed=1), Sampling(max_tokens=60))
    assert whole.num_sampled == 60 and not core.scheduler.pool.kept("parent").blocks
    assert core.scheduler.num_retractions == 0
    fork = generate(core, parent.forked(30, id="fork"), Sampling(max_tokens=10))
    assert fork.token_ids[:30].tolist() == parent.token_ids[:30].tolist()
    assert_nothing_is_held(core)


def count_hashed(core: EngineCore, monkeypatch) -> list[int]:
    """Grows by the tokens of every key that the scheduler makes from token ids."""
    hashed: list[int] = []

    class Leaders(dict):
        def get(self, key, default=None):
            hashed.append(len(key[1]) // 4)
            return super().get(key, default)

    scheduler, pieces = core.scheduler, core.scheduler._pieces
    monkeypatch.setattr(scheduler, "_leaders", Leaders())
    monkeypatch.setattr(
        scheduler, "_pieces", lambda *given: (hashed.append(len(piece) // 4) or piece for piece in pieces(*given))
    )
    return hashed


def test_a_long_prompt_that_waits_is_not_hashed_at_every_step(model, monkeypatch) -> None:
    """Its prefix is in the cache, so that each look at the cache would hash all of it."""
    core = make_core(model, slots=4, context=256, num_blocks=24 + 1)
    monkeypatch.setattr(core, "runner", NoModel(core))
    generate(core, prompt(160, id="cached", seed=1), Sampling(max_tokens=1))
    first = ask(core, prompt(30, id="first"), Sampling(max_tokens=100))
    core.step()
    hashed = count_hashed(core, monkeypatch)
    long = ask(core, prompt(160, id="long", seed=1), Sampling(max_tokens=3))
    core.step()
    once = sum(hashed)
    assert core.num_waiting == 1 and once >= 160
    for _ in range(40):
        core.step()
    assert core.num_waiting == 1 and not first.is_over and sum(hashed) == once
    core.changed_weights(policy="policy", lineage="", version=1)
    core.step()
    assert core.num_waiting == 1
    core.runner.prompt_rows = 0
    while not long.is_over:
        core.step()
    assert first.is_over and core.runner.prompt_rows == 160  # nothing of the old weights is shared
    assert sum(hashed) <= once + 4 * 160  # one more look, and what entered the cache as it was computed
    assert_nothing_is_held(core)


def test_a_prompt_that_waits_starts_when_another_has_computed_what_they_share(model) -> None:
    """It needs few blocks of its own by then: it does not wait for as many as it needed at first."""
    core = make_core(model, slots=4, context=128, num_blocks=24 + 1, max_prompt_tokens=16)
    shared = prompt(96, id="shared", seed=1).token_ids
    ends = [[*shared, 90], [*shared, 91]]
    first, second = (ask(core, Rollout.from_prompt(ids, id=str(ids[-1])), Sampling(max_tokens=20)) for ids in ends)
    core.step()
    assert core.num_waiting == 1  # each would take 13 of 24 blocks
    for _ in range(9):
        core.step()
    assert core.num_waiting == 0 and not first.is_over
    run(core)
    assert_same_draws(second.done, generate(make_core(model, context=128), second.request.rollout, Sampling(max_tokens=20)))
    assert_nothing_is_held(core)


# Thousands of requests


def test_the_cost_of_a_request_is_microseconds(model, monkeypatch, capsys) -> None:
    """Submitted, admitted and finished, with thousands that wait."""
    core = make_core(model, slots=64, num_blocks=1024, context=64)
    monkeypatch.setattr(core, "runner", NoModel(core))
    count = 4_000
    rollouts = [prompt(20, id=str(index), seed=index) for index in range(count)]
    sampling = Sampling(max_tokens=1)
    began = time.process_time()
    asked = [ask(core, rollout, sampling) for rollout in rollouts]
    assert core.num_waiting == count
    run(core)
    cost = (time.process_time() - began) / count * 1e6
    with capsys.disabled():
        print(f"\n{cost:.0f} µs to submit, admit and finish a request")
    assert all(each.done.num_sampled == 1 for each in asked)
    assert cost < 300
    assert_nothing_is_held(core)


def test_cancelling_what_waits_does_not_search_for_it(model, monkeypatch) -> None:
    """Twice as many that wait take about twice as long to cancel, not four times."""
    core = make_core(model, slots=1)
    monkeypatch.setattr(core, "runner", NoModel(core))

    def cost(count: int) -> float:
        asked = [ask(core, prompt(2, id=str(index)), Sampling(max_tokens=1)) for index in range(count)]
        began = time.process_time()
        for each in reversed(asked):
            core.cancel(each.request)
        return time.process_time() - began

    cost(100)
    assert cost(16_000) < 16 * cost(4_000)
    assert_nothing_is_held(core)


# Shared prompts


def test_a_group_computes_its_prompt_once(model, monkeypatch) -> None:
    """Eight siblings on a prompt of 1,024 tokens: 1,024 rows."""
    core = make_core(model, slots=8, context=1100, block_size=16)
    runner = NoModel(core)
    monkeypatch.setattr(core, "runner", runner)
    group = [ask(core, prompt(1024, id=str(index)), Sampling(max_tokens=3, seed=index)) for index in range(8)]
    run(core)
    assert runner.prompt_rows == 1024
    assert all(each.done.num_sampled == 3 for each in group)
    assert_nothing_is_held(core)


@pytest.mark.parametrize("length", [16, 21], ids=["whole blocks", "a block in part"])
def test_siblings_draw_what_each_would_alone(model, length: int) -> None:
    core = make_core(model)
    group = [ask(core, prompt(length, id=str(index)), Sampling(max_tokens=12, seed=index)) for index in range(8)]
    assert prompt_rows(run(core)) == length
    assert len({tuple(each.done.token_ids.tolist()) for each in group}) == 8
    for index, each in enumerate(group):
        alone = generate(make_core(model), prompt(length, id="alone"), Sampling(max_tokens=12, seed=index))
        assert_same_draws(each.done, alone)
    assert_nothing_is_held(core)


def test_more_siblings_than_one_step_draws_are_led_by_several(model) -> None:
    core = make_core(model, slots=8, max_sampled=3)
    group = [ask(core, prompt(21, id=str(index)), Sampling(max_tokens=5, seed=index)) for index in range(8)]
    rows = prompt_rows(run(core))
    assert rows < 8 * 21
    for index, each in enumerate(group):
        alone = generate(make_core(model), prompt(21, id="alone"), Sampling(max_tokens=5, seed=index))
        assert_same_draws(each.done, alone)
    assert_nothing_is_held(core)


@pytest.mark.parametrize("after", [0, 1, 2], ids=["before it began", "in the first chunk", "in the second chunk"])
def test_followers_go_on_when_their_leader_is_cancelled(model, after: int) -> None:
    core = make_core(model, slots=4, max_prompt_tokens=8)
    leader, *followers = [ask(core, prompt(21, id=str(index)), Sampling(max_tokens=9, seed=index)) for index in range(4)]
    for _ in range(after):
        core.step()
    core.cancel(leader.request)
    run(core)
    assert not leader.is_over
    for index, each in enumerate(followers, start=1):
        alone = generate(make_core(model), prompt(21, id="alone"), Sampling(max_tokens=9, seed=index))
        assert_same_draws(each.done, alone)
    assert_nothing_is_held(core)


def test_a_follower_can_be_cancelled_while_it_waits(model) -> None:
    core = make_core(model, slots=4, max_prompt_tokens=8)
    leader, follower, other = [ask(core, prompt(21, id=str(index)), Sampling(max_tokens=9, seed=index)) for index in range(3)]
    core.step()
    core.cancel(follower.request)
    run(core)
    assert leader.done.num_sampled == other.done.num_sampled == 9 and not follower.is_over
    assert_nothing_is_held(core)


def test_a_leader_that_ends_at_once_leaves_its_followers_their_prompt(model) -> None:
    core = make_core(model, slots=4)
    leader = ask(core, prompt(21, id="leader"), Sampling(max_tokens=1))
    followers = [ask(core, prompt(21, id=str(index)), Sampling(max_tokens=9, seed=index)) for index in range(3)]
    assert prompt_rows(run(core)) == 21
    assert leader.done.num_sampled == 1 and leader.done.finish_reason is FinishReason.LENGTH
    for index, each in enumerate(followers):
        alone = generate(make_core(model), prompt(21, id="alone"), Sampling(max_tokens=9, seed=index))
        assert_same_draws(each.done, alone)
    assert_nothing_is_held(core)


def test_followers_of_an_aborted_leader_end_with_it(model) -> None:
    """Each with nothing drawn, and each can be resumed."""
    core = make_core(model, slots=4, max_prompt_tokens=8)
    group = [ask(core, prompt(21, id=str(index)), Sampling(max_tokens=9, seed=index)) for index in range(4)]
    core.step()
    core.abort_running()
    assert [each.done.finish_reason for each in group] == [FinishReason.ABORT] * 4
    assert [each.done.num_sampled for each in group] == [0] * 4
    assert_nothing_is_held(core)
    again = [ask(core, each.done, Sampling(max_tokens=9, seed=index)) for index, each in enumerate(group)]
    run(core)
    for index, each in enumerate(again):
        alone = generate(make_core(model), prompt(21, id="alone"), Sampling(max_tokens=9, seed=index))
        assert_same_draws(each.done, alone)


# Turns


def reply(rollout: Rollout, length: int, *, seed: int = 9) -> Rollout:
    return rollout.append(np.random.default_rng(seed).integers(3, 96, size=length))


@pytest.mark.parametrize("length", range(12, 21))
def test_a_next_turn_computes_what_is_new_and_nothing_else(model, length: int) -> None:
    """Wherever in a block the turn before it ended, and though others ran meanwhile. What is new: the last token of that turn,
    whose keys nobody needed so far, and the reply."""
    core = make_core(model, num_blocks=40)
    rollout = generate(core, prompt(length, id="r"), Sampling(max_tokens=10, seed=1))
    for turn in range(1, 4):
        generate(core, prompt(30, id=f"other {turn}", seed=turn), Sampling(max_tokens=9))
        asked = ask(core, reply(rollout, 3 + turn), Sampling(max_tokens=6, seed=turn))
        assert prompt_rows(run(core)) == 1 + 3 + turn
        rollout = asked.done
        alone = generate(make_core(model), asked.request.rollout, Sampling(max_tokens=6, seed=turn))
        assert_same_draws(rollout, alone)
    assert_nothing_is_held(core)
    same = ask(core, Rollout.from_prompt(rollout.token_ids, id="same tokens"), Sampling(max_tokens=1))
    assert prompt_rows(run(core)) <= core.cache.block_size, "whole blocks of all turns are in the prefix cache"
    assert same.is_over


@pytest.mark.parametrize("length", [3, 12])
def test_a_turn_over_older_keys_leaves_nothing_in_the_prefix_cache(length: int) -> None:
    """Neither under the new version nor, when that is loaded again, under the old one."""
    model = prepare(make("llama"), name="llama")
    core = make_core(model)
    rollout = generate(core, prompt(length, id="r"), Sampling(max_tokens=3))
    core.changed_weights(policy="policy", lineage="", version=1)
    asked = ask(core, reply(rollout, 12), Sampling(max_tokens=9))
    assert prompt_rows(run(core)) == 1 + 12
    again = Rollout.from_prompt(asked.done.token_ids, id="again")
    for version in (1, 0):
        core.changed_weights(policy="policy", lineage="", version=version)
        ask(core, again, Sampling(max_tokens=1))
        assert prompt_rows(run(core)) == len(again)


def test_a_new_lineage_keeps_nothing(model) -> None:
    core = make_core(model)
    rollout = generate(core, prompt(12, id="r"), Sampling(max_tokens=9))
    core.changed_weights(policy="policy", lineage="next", version=0)
    ask(core, reply(rollout, 5), Sampling(max_tokens=3))
    assert prompt_rows(run(core)) == 12 + 9 + 5


def test_the_rollout_that_ended_first_gives_way_first(model) -> None:
    core = make_core(model, slots=2, num_blocks=12 + 1)
    ended = [generate(core, prompt(20, id=str(index), seed=index), Sampling(max_tokens=8)) for index in range(3)]
    generate(core, prompt(4, id="more", seed=7), Sampling(max_tokens=2))
    assert [core.scheduler.pool.kept(str(index)).num_tokens for index in range(3)] == [0, 27, 27]
    for rollout in ended[1:]:
        ask(core, reply(rollout, 2), Sampling(max_tokens=2))
        assert prompt_rows(run(core)) == 1 + 2
    ask(core, reply(ended[0], 2), Sampling(max_tokens=2))
    assert prompt_rows(run(core)) > 1 + 2


def test_a_rollout_that_will_not_continue_gives_way_before_older_ones(model) -> None:
    """But not what it shares with one that may."""
    core = make_core(model, slots=2, num_blocks=16 + 1)
    ended = [generate(core, prompt(20, id=str(index), seed=index), Sampling(max_tokens=8)) for index in range(3)]
    sibling = generate(core, prompt(20, id="sibling", seed=2), Sampling(max_tokens=8, seed=1))
    core.scheduler.forget("2")
    generate(core, prompt(20, id="more", seed=7), Sampling(max_tokens=8))
    for rollout in (ended[0], ended[1], sibling):
        ask(core, reply(rollout, 2), Sampling(max_tokens=2))
        assert prompt_rows(run(core)) == 1 + 2
    assert not core.scheduler.pool.kept("2").blocks
    assert_nothing_is_held(core)


def test_a_turn_that_needs_every_block_takes_the_one_it_continues(model) -> None:
    """The only block left is the half full one that it goes on from."""
    core = make_core(model, slots=2, num_blocks=4 + 1)
    rollout = generate(core, prompt(20, id="r"), Sampling(max_tokens=8))
    asked = ask(core, reply(rollout, 2), Sampling(max_tokens=2))
    assert prompt_rows(run(core)) == 1 + 2
    assert_same_draws(asked.done, generate(make_core(model), asked.request.rollout, Sampling(max_tokens=2)))
    assert_nothing_is_held(core)


def test_a_history_that_was_rewritten_is_computed_again(model) -> None:
    core = make_core(model)
    rollout = generate(core, prompt(20, id="r"), Sampling(max_tokens=8))
    tokens = rollout.token_ids.copy()
    tokens[2] = 95 if tokens[2] != 95 else 94
    other = reply(rollout.replace(token_ids=tokens), 2)
    asked = ask(core, other, Sampling(max_tokens=4))
    assert prompt_rows(run(core)) == len(other)
    assert_same_draws(asked.done, generate(make_core(model), other, Sampling(max_tokens=4)))


# Forks


def test_a_fork_of_a_fork_that_begins_in_the_same_step(model) -> None:
    """The second goes on from a block that the first has yet to copy."""
    core = make_core(model)
    parent = generate(core, prompt(12, id="parent"), Sampling(max_tokens=20))
    first = parent.forked(22, id="first")
    second = first.forked(20, id="second")
    asked = {fork.id: ask(core, fork, Sampling(max_tokens=9, seed=7)) for fork in (first, second)}
    assert prompt_rows(run(core)) == 2
    for fork, each in zip((first, second), (asked["first"], asked["second"]), strict=True):
        alone = generate(make_core(model), fork, Sampling(max_tokens=9, seed=7))
        assert_same_draws(each.done, alone)


@pytest.mark.parametrize("is_fork_first", [True, False])
def test_a_prompt_does_not_follow_a_fork_on_older_keys(is_fork_first: bool) -> None:
    """Nor a fork a prompt on newer ones, though their tokens are the same: each is computed as it would be alone."""
    model = prepare(make("llama"), name="llama")
    core = make_core(model)
    parent = generate(core, prompt(12, id="parent"), Sampling(max_tokens=20))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    core.changed_weights(policy="policy", lineage="", version=1)
    fork = parent.forked(22, id="fork")
    fresh = Rollout.from_prompt(fork.token_ids, id="fresh")
    order = [fork, fresh] if is_fork_first else [fresh, fork]
    asked = {rollout.id: ask(core, rollout, Sampling(max_tokens=9)) for rollout in order}
    assert prompt_rows(run(core)) == 1 + 22
    alone = generate(make_core(model), fresh, Sampling(max_tokens=9))
    assert_same_draws(asked["fresh"].done, alone)
    again = generate(core, parent.forked(22, id="again"), Sampling(max_tokens=9))
    assert_same_draws(asked["fork"].done, again)
    assert abs(again.logprobs[22] - alone.logprobs[22]) > 1e-3


def test_a_fork_of_a_parent_computed_again_goes_on_from_its_new_keys() -> None:
    """Retracted with the old weights, a parent left its old keys; what it computes with the new ones is newer."""
    model = prepare(make("llama"), name="llama")
    core = make_core(model)
    parent = ask(core, prompt(12, id="parent"), Sampling(max_tokens=40))
    for _ in range(10):
        core.step()
    core.retract_running()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    core.changed_weights(policy="policy", lineage="", version=1)
    core.step()
    tokens = np.concatenate([parent.request.rollout.token_ids, core.scheduler.sampled_tokens(parent.request).token_ids])
    begun = Rollout.from_prompt(tokens[:20], id="fork")
    fork = ask(core, begun.replace(parent=("parent", 20)), Sampling(max_tokens=9, seed=3))
    assert prompt_rows(run(core)) == 1
    assert_same_draws(fork.done, generate(make_core(model), begun, Sampling(max_tokens=9, seed=3)))
    assert_nothing_is_held(core)


def test_a_sibling_cancelled_before_their_prompt_is_computed_leaves_nothing_to_fork(model) -> None:
    """It shares blocks that its sibling was to compute, and that nobody will."""
    core = make_core(model, max_prompt_tokens=8)
    leader = ask(core, prompt(30, id="leader"), Sampling(max_tokens=4))
    follower = ask(core, prompt(30, id="follower"), Sampling(max_tokens=4))
    core.step()
    core.cancel(follower.request)
    core.cancel(leader.request)
    assert not core.scheduler.pool.kept("follower").blocks
    begun = Rollout.from_prompt(follower.request.rollout.token_ids[:28], id="fork")
    fork = generate(core, begun.replace(parent=("follower", 28)), Sampling(max_tokens=9, seed=3))
    assert_same_draws(fork, generate(make_core(model), begun, Sampling(max_tokens=9, seed=3)))
    assert_nothing_is_held(core)


def test_what_ran_across_a_swap_is_remembered_under_no_version(model) -> None:
    """Not even under its own, when a version is loaded again: its first keys may be of other weights."""
    core = make_core(model)
    across = ask(core, prompt(4, id="across"), Sampling(max_tokens=30))
    for _ in range(3):
        core.step()
    core.changed_weights(policy="policy", lineage="", version=core.version)
    run(core)
    ask(core, Rollout.from_prompt(across.done.token_ids, id="after"), Sampling(max_tokens=1))
    assert prompt_rows(run(core)) == 34


def test_nobody_follows_a_prompt_that_was_begun_under_other_weights(model) -> None:
    """Its first keys are of the old ones: who is asked the same afterwards computes it anew, and leads those after it."""
    core = make_core(model, max_prompt_tokens=8)
    before = ask(core, prompt(21, id="before"), Sampling(max_tokens=3))
    core.step()
    core.changed_weights(policy="policy", lineage="", version=1)
    after = [ask(core, prompt(21, id=str(index)), Sampling(max_tokens=3, seed=index)) for index in range(2)]
    assert prompt_rows(run(core)) == 21 - 8 + 21
    assert all(each.done.num_sampled == 3 for each in (before, *after))
    assert_nothing_is_held(core)


def test_a_fork_of_a_sibling_that_waits_finds_what_the_first_one_computed(model) -> None:
    """A parent that has computed nothing of its own yet is no reason to compute a known prompt again."""
    core = make_core(model, max_prompt_tokens=8)
    leader, parent = [ask(core, prompt(24, id=str(index)), Sampling(max_tokens=9, seed=index)) for index in range(2)]
    core.step()
    core.step()
    assert parent.request.leader is leader.request
    fork = ask(core, parent.request.rollout.forked(20, id="fork"), Sampling(max_tokens=9))
    assert prompt_rows(run(core)) == 8 + 4
    alone = generate(make_core(model), fork.request.rollout, Sampling(max_tokens=9))
    assert_same_draws(fork.done, alone)


# What is refused, and what fails


def test_what_cannot_be_generated_is_refused_by_name(model) -> None:
    core = make_core(model)
    sampling = Sampling(max_tokens=4)
    with pytest.raises(UnusablePrompt, match=r"'wide' holds token 96; the vocabulary has 96"):
        ask(core, Rollout.from_prompt([5, 96, 7], id="wide"), sampling)
    with pytest.raises(UnusablePrompt, match=r"'nothing' is empty"):
        ask(core, Rollout.from_prompt([], id="nothing"), sampling)
    with pytest.raises(PromptTooLong, match=r"'long' has 64 tokens; the context is 64"):
        ask(core, prompt(64, id="long"), sampling)
    with pytest.raises(UnusablePrompt, match=r"'text' has stop strings"):
        ask(core, prompt(4, id="text"), Sampling(stop=("end",)))
    assert not core.has_work
    assert generate(core, prompt(63, id="fits"), sampling).num_sampled == 1


def spoil(model, number: float) -> torch.Tensor:
    """Put a number into the weights; the tensor that held another."""
    weight = model.model.layers[1].mlp.down_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(number)
    return before


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_numbers_fail_requests_and_not_the_engine(exact: bool, temperature: float) -> None:
    """Nothing of them is left in the cache: with good weights, in the same blocks, the same tokens as a fresh engine."""
    model = prepare(make("llama"), name="llama", exact=exact)
    sampling = Sampling(max_tokens=20, temperature=temperature)
    expected = generate(make_core(model, exact=exact), prompt(21, id="r", seed=5), sampling)
    core = make_core(model, slots=3, num_blocks=12 + 1, max_prompt_tokens=16, exact=exact)
    running = ask(core, prompt(21, id="running"), sampling)
    for _ in range(4):
        core.step()
    good = spoil(model, float("nan"))
    core.changed_weights(policy="policy", lineage="", version=1)
    asked = [running, *(ask(core, prompt(10 + index, id=str(index), seed=index), sampling) for index in range(6))]
    run(core)
    for each in asked:
        assert isinstance(each.error, NotFinite), each
        assert each.request.rollout.id in str(each.error)
    assert_nothing_is_held(core)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.copy_(good)
    core.changed_weights(policy="policy", lineage="", version=2)
    again = [ask(core, prompt(21, id=f"again {index}", seed=5), sampling) for index in range(6)]
    run(core)
    for each in again:
        assert_same_draws(each.done, expected)
    assert_nothing_is_held(core)


def test_an_error_nobody_waits_for_stops_the_engine(model) -> None:
    """Without `on_failed` a request's failure is the engine's."""
    own = prepare(make("llama"), name="llama")
    core = make_core(own)
    spoil(own, float("inf"))
    asked = ask(core, prompt(5, id="r"), Sampling(max_tokens=4))
    asked.request.on_failed = None
    with pytest.raises(NotFinite, match="'r'"):
        run(core)


def test_a_stop_token_the_head_does_not_have_ends_nothing(model) -> None:
    """Tokenizers have ids that no logit stands for; one that is too early cannot be forbidden, and need not be."""
    core = make_core(model)
    rollout = generate(core, prompt(9, id="r"), Sampling(max_tokens=6, min_tokens=3, stop_ids=(2, 5000)))
    assert_same_draws(rollout, generate(core, prompt(9, id="s"), Sampling(max_tokens=6, min_tokens=3, stop_ids=(2,))))


def test_an_engine_with_kernels_says_which_package_it_lacks(model, monkeypatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find_spec(name, *rest))
    with pytest.raises(ModelError, match="triton, which is not installed"):
        make_core(model, kernels=True)
