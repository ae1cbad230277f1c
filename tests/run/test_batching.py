"""Batches made in columns are those a loop over rollouts would make; groups known to be fresh are fresh."""

from __future__ import annotations

import dataclasses
import gc
import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from strategies import batches, quick, rollouts

from headrace.algorithms import advantages, gae, token_rewards
from headrace.algorithms.losses import needs
from headrace.bench.stubs import answer
from headrace.buffer import Group
from headrace.config import make_recipe
from headrace.records import Batch, Episode, FinishReason, Rollout, Scored
from headrace.run.batches import (
    StepParts,
    TermWeights,
    adapt_weights,
    columns_first,
    make_batches,
    part_sizes,
    term_metrics,
    with_column,
)
from headrace.run.session import fewer_gc_pauses
from headrace.settings import ConfigError
from headrace.staleness import Rejection
from headrace.staleness.reject import RULES
from headrace.sync import Lineage


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    made = []
    for number in range(draw(st.integers(1, 3))):
        name = f"g{number}"
        episodes = []
        for index in range(draw(st.integers(2, 3))):
            members = tuple(draw(rollouts(group=name)) for _ in range(draw(st.integers(0, 2))))
            outcome = Scored(draw(st.floats(-3, 3)))
            episodes.append(Episode(id=f"{name}/{index}", group=name, task={}, rollouts=members, outcome=outcome))
        made.append(Group(number=number, episodes=tuple(episodes)))
    return made


def ids(group: Group) -> list[str]:
    return [episode.id for episode in group.episodes]


def members(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for episode in group.episodes for rollout in episode.rollouts]


@pytest.mark.parametrize("mean", ["token", "sequence", "sum", "constant"])
def test_a_batch_is_the_one_a_loop_makes(mean: str) -> None:
    @given(groups())
    @settings(parent=quick, max_examples=40)
    def check(made: list[Group]) -> None:
        recipe = make_recipe({"train": {"loss_mean": mean}})
        (batch,) = make_batches(made, recipe, version=3)
        values, members = [], []
        for group in made:
            rewards = [episode.reward for episode in group.episodes]
            of_group = advantages(rewards, rewards, baseline="group", scale="group")
            for episode, value in zip(group.episodes, of_group, strict=True):
                members += episode.rollouts
                values += [value] * len(episode.rollouts)
        counts = [int(rollout.loss_mask.sum()) for rollout in members]
        scales = {
            "token": [1 / max(sum(counts), 1)] * len(counts),
            "sequence": [1 / (len(members) * max(count, 1)) for count in counts],
            "sum": [1 / max(len(members), 1)] * len(counts),
            "constant": [1 / (recipe.train.batch * recipe.sampling.max_tokens)] * len(counts),
        }[mean]
        assert batch == Batch(
            rollouts=tuple(members),
            advantages=[np.where(r.loss_mask, value, 0).astype(np.float32) for r, value in zip(members, values, strict=True)],
            weights=[np.where(r.loss_mask, scale, 0).astype(np.float32) for r, scale in zip(members, scales, strict=True)],
            loss="grpo",
            version=3,
        )

    check()


def columns(batch: Batch) -> dict:
    names = ("loss", "constants", "corrections", "kl", "kl_weight", "version")
    fields = {name: getattr(batch, name) for name in names}
    arrays = {name: np.concatenate([np.zeros(0, np.float32), *getattr(batch, name)]) for name in ("advantages", "weights")}
    return fields | arrays


@given(batches())
@quick
def test_a_batch_from_columns_is_the_one_the_constructor_makes(batch: Batch) -> None:
    made = Batch.from_columns(batch.rollouts, **columns(batch))
    assert made == batch
    assert dataclasses.replace(made) == batch
    assert not any(array.flags.writeable for array in (*made.advantages, *made.weights))


@given(batches().filter(lambda batch: batch.num_tokens > 0), st.data())
@quick
def test_columns_that_a_batch_would_refuse_are_refused_by_name(batch: Batch, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["advantages", "weights"]))
    given_columns = columns(batch)
    at = data.draw(st.integers(0, batch.num_tokens - 1))
    owners = [rollout.id for rollout in batch.rollouts for _ in range(len(rollout))]
    broken = given_columns[name].copy()
    broken[at] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    with pytest.raises(ValueError, match=name) as refused:
        Batch.from_columns(batch.rollouts, **{**given_columns, name: broken})
    assert repr(owners[at]) in str(refused.value)
    for wrong in (given_columns[name][1:], given_columns[name][:, None], np.append(given_columns[name], 1)):
        with pytest.raises(ValueError, match=name):
            Batch.from_columns(batch.rollouts, **{**given_columns, name: wrong})
    with pytest.raises(ValueError, match="version -1"):
        Batch.from_columns(batch.rollouts, **{**given_columns, "version": -1})


# Over a version's whole batch, and per token


def answered(count: int, *, rewards: list[float]) -> list[Group]:
    """One group for each reward: two siblings, one of which got it, of `count` and of one token more."""
    made = []
    for number, reward in enumerate(rewards):
        episodes = []
        for index in range(2):
            drawn = answer(number).replace(id=f"g{number}/{index}", group=f"g{number}")
            cut = drawn.forked(10 + count + index, id=f"g{number}/{index}x").replace(id=f"g{number}/{index}")
            outcome = Scored(reward if index else 0.0)
            episodes.append(Episode(id=cut.id, group=cut.group, task={}, rollouts=(cut,), outcome=outcome))
        made.append(Group(number=number, episodes=tuple(episodes)))
    return made


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_is_taken_over_the_batch_is_taken_over_the_whole_version(parts: int) -> None:
    made = answered(3, rewards=[1.0, 0.5, 0.0, -2.0, 4.0])
    recipe = make_recipe({"train": {"advantage": "global", "mini_batches": parts, "batch": 16, "group_size": 2}})
    rewards = [episode.reward for group in made for episode in group.episodes]
    wanted = {
        id: (r - np.mean(rewards)) / np.std(rewards) for id, r in zip([i for g in made for i in ids(g)], rewards, strict=True)
    }
    batches_made = make_batches(made, recipe, version=3)
    assert len(batches_made) == parts
    for batch in batches_made:
        for rollout, values in zip(batch.rollouts, batch.advantages, strict=True):
            np.testing.assert_allclose(values, np.where(rollout.loss_mask, wanted[rollout.id], 0), atol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("in_reward", [False, True])
def test_gae_is_made_of_the_trainers_values_and_scaled_over_the_version(parts: int, in_reward: bool) -> None:
    made = answered(3, rewards=[1.0, 0.5, 2.0])
    train = {"advantage": "gae", "loss": "ppo", "mini_batches": parts, "batch": 6, "group_size": 2, "kl": 0.1}
    recipe = make_recipe({"train": {**train, "discount": 0.9, "gae_lambda": 0.8, "kl_in_reward": in_reward}})
    assert columns_first(made, recipe) == ["values", *(["reference"] if in_reward else [])]
    random = np.random.default_rng(0)
    drawn = {id: random.normal(size=(2, 20)).astype(np.float32) for group in made for id in ids(group)}
    for place, name in enumerate(columns_first(made, recipe)):
        made = with_column(made, name, [np.where(r.loss_mask, drawn[r.id][place][: len(r)], 0) for r in members(made)])
    assert columns_first(made, recipe) == []
    expected, returns = {}, {}
    for group in made:
        for episode in group.episodes:
            (rollout,) = episode.rollouts
            rewards = token_rewards(rollout, episode.reward)[10:]
            values, reference = drawn[rollout.id][:, 10 : len(rollout)]
            if in_reward:
                rewards = rewards - 0.1 * (rollout.logprobs[10:] - reference)
            expected[rollout.id], returns[rollout.id] = gae(rewards, values, discount=0.9, trace=0.8)
    every = np.concatenate(list(expected.values()))
    for batch in make_batches(made, recipe, version=3):
        assert (batch.kl, batch.kl_weight) == (("none", 0.0) if in_reward else ("k3", 0.1))
        for rollout, values in zip(batch.rollouts, batch.advantages, strict=True):
            assert not values[:10].any()
            np.testing.assert_allclose(values[10:], (expected[rollout.id] - every.mean()) / every.std(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(rollout.columns["returns"][10:], returns[rollout.id], rtol=1e-5)
            assert rollout.columns["rewards"].sum() == rollout.columns["rewards"][-1]


@pytest.mark.parametrize("advantage", ["turn", "turn_gae"])
def test_advantages_of_turns_reach_their_tokens_and_a_single_turn_is_a_rollout(advantage: str) -> None:
    """With one turn, `turn` is `group`, and all tokens share what `turn_gae` gives the first."""
    made, plain = answered(2, rewards=[1.0, 0.5, 2.0]), {"batch": 6, "group_size": 2, "scale_rewards": "none"}
    train = {**plain, "advantage": advantage, **({"loss": "ppo"} if advantage == "turn_gae" else {})}
    recipe = make_recipe({"train": train})
    if advantage == "turn_gae":
        assert columns_first(made, recipe) == ["values"]
        made = with_column(made, "values", [np.where(r.loss_mask, 0.25, 0) for r in members(made)])
    (batch,) = make_batches(made, recipe, version=3)
    (grouped,) = make_batches(made, make_recipe({"train": {**plain, "advantage": "group"}}), version=3)
    reward = {rollout.id: episode.reward for group in made for episode in group.episodes for rollout in episode.rollouts}
    for rollout, values, of_group in zip(batch.rollouts, batch.advantages, grouped.advantages, strict=True):
        if advantage == "turn":
            np.testing.assert_allclose(values, of_group, atol=1e-6)
        else:
            np.testing.assert_allclose(values, np.where(rollout.loss_mask, reward[rollout.id] - 0.25, 0), atol=1e-6)
            np.testing.assert_allclose(rollout.columns["returns"][rollout.loss_mask], reward[rollout.id], atol=1e-6)


def test_distillation_as_a_reward_is_how_much_likelier_the_teacher_finds_it() -> None:
    made = answered(3, rewards=[1.0])
    recipe = make_recipe({"train": {"advantage": "distill", "teacher": "t", "batch": 2, "group_size": 2}})
    assert columns_first(made, recipe) == ["teacher"]
    (batch,) = make_batches(with_column(made, "teacher", [np.full(len(r), -0.2) for r in members(made)]), recipe, version=3)
    for rollout, values in zip(batch.rollouts, batch.advantages, strict=True):
        np.testing.assert_allclose(values, np.where(rollout.loss_mask, -0.2 + 0.5, 0), atol=1e-6)


def group_of(*rewards: float) -> Group:
    """Equal completions, of which the first was truncated."""
    episodes = []
    for index, reward in enumerate(rewards):
        rollout, reason = answer(0), FinishReason.STOP if index else FinishReason.LENGTH
        calls = (dataclasses.replace(rollout.calls[0], finish_reason=reason),)
        rollout = rollout.replace(id=f"g0/{index}", group="g0", calls=calls, finish_reason=reason)
        episodes.append(Episode(id=rollout.id, group="g0", task={}, rollouts=(rollout,), outcome=Scored(reward)))
    return Group(number=0, episodes=tuple(episodes))


@pytest.mark.parametrize("mean", ["token", "sequence", "sum"])
def test_a_truncated_completion_gives_no_loss_and_still_counts_for_its_siblings(mean: str) -> None:
    """As with TRL's mask_truncated_completions: its reward stays in the group's mean and std, its tokens leave the loss and the
    count of tokens, and the mean over rollouts still counts it."""
    made = [group_of(3.0, 0.0, 0.0)]
    cut = members(made)[0]
    batches_made = []
    for is_masked in (False, True):
        train = {"mask_truncated": is_masked, "loss_mean": mean, "batch": 3, "group_size": 3}
        batches_made += make_batches(made, make_recipe({"train": train}), version=3)
    free, masked = batches_made
    assert masked.rollouts[0].id == cut.id and not masked.rollouts[0].loss_mask.any()
    assert not masked.weights[0].any() and not masked.advantages[0].any()
    for before, after in zip(free.advantages[1:], masked.advantages[1:], strict=True):
        np.testing.assert_array_equal(before, after)
        assert after.any()
    expected = {"token": 1 / 20, "sequence": 1 / 30, "sum": 1 / 3}[mean]
    assert {float(weight) for weight in np.unique(masked.weights[1])} == {0.0, np.float32(expected)}
    assert members(made)[0] is cut, "what is kept and shown is whole"


@pytest.mark.parametrize("kind", ["group", "leave_one_out", "global", "gae"])
def test_a_truncated_completion_counts_with_its_kl(kind: str) -> None:
    """The reference is one nat below what sampled each token, so all completions have the same KL in their rewards."""
    made = with_column([group_of(3.0, 0.0, 1.0)], "reference", [np.full(len(answer(0)), -1.5, dtype=np.float32)] * 3)
    made = with_column(made, "values", [np.zeros(len(answer(0)), dtype=np.float32)] * 3)
    made = with_column(made, "entropy", [np.full(len(answer(0)), entropy) for entropy in (9.0, 1.0, 1.0)])
    train = {"advantage": kind, "scale_rewards": "none", "kl": 0.1, "kl_in_reward": True, "batch": 3, "group_size": 3}
    train |= {"entropy_quantile": 0.2, "loss": "ppo" if kind == "gae" else "grpo"}
    free, masked = (
        make_batches(made, make_recipe({"train": {**train, "mask_truncated": is_masked}}), version=3)[0]
        for is_masked in (False, True)
    )
    assert not masked.advantages[0].any() and not masked.weights[0].any()
    for before, after in zip(free.advantages[1:], masked.advantages[1:], strict=True):
        np.testing.assert_array_equal(before, after)
    if kind == "group":
        assert [float(values.min()) for values in masked.advantages] == pytest.approx([0, -4 / 3, -1 / 3])
    assert (free.entropy_floor, masked.entropy_floor) == (9.0, 1.0), "of trained tokens alone"


def test_rewards_normalised_one_by_one_are_weighted_by_their_functions() -> None:
    rewards = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 9.0}, {"right": 0.0, "short": 0.0}]
    episodes = []
    for index, parts in enumerate(rewards):
        rollout = answer(0).replace(id=f"r{index}", group="g0", rewards=parts)
        outcome = Scored(parts["right"] + 0.5 * parts["short"])
        episodes.append(Episode(id=rollout.id, group="g0", task={}, rollouts=(rollout,), outcome=outcome))
    train = {"normalize_each_reward": True, "advantage": "global", "batch": 3, "group_size": 3}
    recipe = make_recipe({"train": train})
    weights = {"right": 1.0, "short": 0.5}
    (batch,) = make_batches([Group(number=0, episodes=tuple(episodes))], recipe, version=3, reward_weights=weights)
    summed = np.array([2 - 0.5, -1 + 1, -1 - 0.5]) / np.sqrt(2)
    expected = (summed - summed.mean()) / summed.std()
    np.testing.assert_allclose([values.max() + values.min() for values in batch.advantages], expected, rtol=1e-5)
    bare = dataclasses.replace(episodes[0], rollouts=(answer(0).replace(group="g0"),))
    with pytest.raises(ConfigError, match=r"train.normalize_each_reward = true: episode 'r0' has no rewards by name"):
        make_batches([Group(number=0, episodes=(bare, *episodes[1:]))], recipe, version=3)


@pytest.mark.parametrize(("kind", "is_per_token"), [("group", False), ("leave_one_out", False), ("global", True)])
def test_a_kl_in_the_reward_comes_before_the_baseline(kind: str, is_per_token: bool) -> None:
    """Of the whole episode for each of its tokens, or of each token and those after it (REINFORCE++)."""
    made = answered(3, rewards=[1.0, 0.5, 2.0])
    recipe = make_recipe({"train": {"advantage": kind, "batch": 6, "group_size": 2, "kl": 0.1, "kl_in_reward": True}})
    assert columns_first(made, recipe) == ["reference"]
    random = np.random.default_rng(0)
    made = with_column(made, "reference", [np.where(r.loss_mask, random.normal(size=len(r)), 0) for r in members(made)])
    (batch,) = make_batches(made, recipe, version=3, weights=TermWeights(kl=0.3, entropy=0.0))
    assert (batch.kl, batch.kl_weight) == ("none", 0.0), "not in the loss too"
    to_come, rewards = {}, {}
    for episode in (episode for group in made for episode in group.episodes):
        (rollout,) = episode.rollouts
        costs = 0.3 * (rollout.logprobs - rollout.columns["reference"])[10:].astype(float)
        to_come[rollout.id] = episode.reward - np.cumsum(costs[::-1])[::-1]
        rewards[rollout.id] = episode.reward - costs.sum()
    every = np.concatenate(list(to_come.values()))
    for rollout, values in zip(batch.rollouts, batch.advantages, strict=True):
        group = next(group for group in made if rollout.id in ids(group))
        of_siblings = [rewards[id] for id in ids(group)]
        scale = recipe.train.scale
        of_group = advantages(of_siblings, every, baseline=kind, scale=scale)
        wanted = (to_come[rollout.id] - every.mean()) / every.std() if is_per_token else of_group[ids(group).index(rollout.id)]
        np.testing.assert_allclose(values[10:], np.broadcast_to(wanted, len(rollout) - 10), rtol=1e-4, atol=1e-5)
        assert not values[:10].any()


def test_weights_follow_what_was_sampled() -> None:
    """−log μ of every token is 0.5 in these rollouts, and the reference's logprobs are 0.2 below."""
    made = answered(3, rewards=[1.0, 0.5])
    made = with_column(made, "reference", [np.where(r.loss_mask, -0.7, 0) for r in members(made)])
    now = TermWeights(kl=0.1, entropy=0.02)

    def adapted(**train) -> tuple[TermWeights, TermWeights]:
        recipe = make_recipe({"train": {"batch": 4, "group_size": 2, "kl": 0.1, "entropy": 0.02, "kl_horizon": 8, **train}})
        return adapt_weights(made, recipe, now)

    assert adapted() == (now, now)
    for target, factor in ((0.02, 1.2), (0.19, 1 + 1 / 19), (0.4, 0.8)):
        used, following = adapted(kl_target=target)
        assert used == now and following.kl == pytest.approx(0.1 * (1 + (factor - 1) * 4 / 8))
    assert adapted(entropy_target=0.6) == (now, now._replace(entropy=pytest.approx(0.025)))
    assert adapted(entropy_target=0.4) == (now._replace(entropy=0.0), now._replace(entropy=pytest.approx(0.015)))
    assert adapted(entropy_target=0.4, entropy_step=0.5)[1].entropy == 0.0
    for in_reward in (True, False):  # in the loss, it is the trainer that reports the KL
        recipe = make_recipe({"train": {"kl": 0.1, "kl_in_reward": in_reward}})
        expected = {"train/kl_weight": 0.1} | ({"train/reference_kl": pytest.approx(0.2)} if in_reward else {})
        assert term_metrics(made, now, recipe, version=3) == expected


def test_the_tokens_of_highest_entropy_over_the_version_have_a_loss() -> None:
    made = answered(3, rewards=[1.0, 0.5, 2.0])
    train = {"batch": 6, "group_size": 2, "mini_batches": 2, "entropy_quantile": 0.25, "entropy": 0.01}
    recipe = make_recipe({"train": train})
    assert columns_first(made, recipe) == ["entropy"]
    random = np.random.default_rng(0)
    made = with_column(made, "entropy", [np.where(r.loss_mask, random.uniform(size=len(r)), 0) for r in members(made)])
    floors = {batch.entropy_floor for batch in make_batches(made, recipe, version=3)}
    every = np.sort(np.concatenate([r.columns["entropy"][r.loss_mask] for r in members(made)]))
    assert len(floors) == 1 and np.count_nonzero(every >= floors.pop()) == pytest.approx(len(every) / 4, abs=1)


def test_every_epoch_trains_each_group_once_in_other_mini_batches() -> None:
    made = answered(3, rewards=[1.0, 0.5, 0.0, -2.0, 4.0, 3.0])
    train = {"batch": 12, "group_size": 2, "mini_batches": 3, "epochs": 3, "kl": 0.1, "reference_every": 2}
    steps = make_batches(made, make_recipe({"train": {**train, "reference_mix": 0.6}}), version=3)
    assert len(steps) == 9 and [batch.reference_mix for batch in steps] == [0.0] * 8 + [0.6]
    first = make_batches(made, make_recipe({"train": {**train, "epochs": 1, "reference_every": 0}}), version=3)
    assert steps[:3] == first
    by_id = {r.id: values for batch in first for r, values in zip(batch.rollouts, batch.advantages, strict=True)}
    parts = [[frozenset(r.group for r in batch.rollouts) for batch in steps[at : at + 3]] for at in (0, 3, 6)]
    assert parts[0] != parts[1] != parts[2] != parts[0]
    for epoch in parts:
        assert frozenset.union(*epoch) == {group.episodes[0].group for group in made} and sum(map(len, epoch)) == 6
    for batch in steps:
        assert sum(float(weights.sum()) for weights in batch.weights) == pytest.approx(1.0)
        for rollout, values in zip(batch.rollouts, batch.advantages, strict=True):
            np.testing.assert_array_equal(values, by_id[rollout.id])
    assert steps == make_batches(made, make_recipe({"train": {**train, "reference_mix": 0.6}}), version=3)
    other = make_batches(made, make_recipe({"seed": 1, "train": train}), version=4)
    assert other[-1].reference_mix == 0.0 and [b.rollouts for b in other[3:]] != [b.rollouts for b in steps[3:]]


MEANS = ("token", "sequence", "sum", "constant")


@pytest.mark.parametrize("mean", MEANS)
def test_a_mini_batch_taken_alone_is_the_one_that_the_whole_batch_would_have_made(mean: str) -> None:
    made = answered(3, rewards=[1.0, 0.5, 0.0, -2.0, 4.0])
    train = {"batch": 10, "group_size": 2, "mini_batches": 3, "loss_mean": mean, "kl": 0.1, "reference_every": 2}
    waits, recipe = (
        make_recipe({"train": {**train, "stream_parts": parts}, "staleness": {"max_lag": 1, "correct": "tis"}})
        for parts in (1, 3)
    )
    whole, sizes = make_batches(made, waits, version=3), part_sizes(len(made), recipe)
    assert sizes == [2, 2, 1] and part_sizes(len(made), waits) == [5]
    for part, (size, expected) in enumerate(zip(sizes, whole, strict=True)):
        groups = made[part::3]
        assert len(groups) == size and columns_first(groups, recipe) == [], "each step is its own start"
        (batch,) = make_batches(groups, recipe, version=3, ends_version=part == 2)
        assert batch == expected


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("sizes", [(2, 2, 1), (4, 1), (1, 4), (1, 2, 2), (5,)])
def test_the_parts_of_a_step_weigh_as_the_whole_does_once_the_last_is_scaled(mean: str, sizes: tuple[int, ...]) -> None:
    """Groups of different lengths, and the first without a trained token."""
    made = [*answered(3, rewards=[1.0, 0.5]), *answered(8, rewards=[0.0, -2.0]), *answered(5, rewards=[4.0])]
    nothing = [rollout.replace(loss_mask=np.zeros(len(rollout), dtype=bool)) for rollout in members(made[:1])]
    episodes = tuple(each.replace(rollouts=(r,)) for each, r in zip(made[0].episodes, nothing, strict=True))
    made[0] = dataclasses.replace(made[0], episodes=episodes)
    train = {"batch": 10, "group_size": 2, "loss_mean": mean, "reference_every": 2, "kl": 0.1}
    recipe = make_recipe({"train": {**train, "stream_parts": len(sizes)}, "staleness.max_lag": 1})
    (whole,) = make_batches(made, make_recipe({"train": train, "staleness.max_lag": 0}), version=3)
    step, starts = StepParts(len(made)), [0, *itertools.accumulate(sizes)]
    parts = [
        make_batches(made[start:stop], recipe, version=3, step=step, ends_step=stop == 5, ends_version=stop == 5)
        for start, stop in itertools.pairwise(starts)
    ]
    batches = [batch for (batch,) in parts]
    assert [batch.part for batch in batches] == [*range(len(sizes))]
    assert [batch.is_last for batch in batches] == [False] * (len(sizes) - 1) + [True]
    assert [batch.reference_mix for batch in batches] == [0.0] * (len(sizes) - 1) + [1.0]
    assert (whole.part, whole.is_last, whole.gradient_scale) == (0, True, 1.0)
    scale = batches[-1].gradient_scale
    assert 0.2 < scale < 5 and (scale == 1.0 or mean == "token") and all(batch.gradient_scale == 1 for batch in batches[:-1])
    assert [r for batch in batches for r in batch.rollouts] == [*whole.rollouts]
    for ours, theirs in zip([each for batch in batches for each in batch.advantages], whole.advantages, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip([each for batch in batches for each in batch.weights], whole.weights, strict=True):
        np.testing.assert_allclose(scale * ours, theirs, rtol=1e-6)


@needs("entropy")
def of_entropy(tokens):
    """A user's loss."""
    return tokens.columns["entropy"] * tokens.logprobs, {}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"train.loss": "grpo"}, []),
        ({"train.loss": "decoupled_ppo"}, ["proximal"]),
        ({"staleness.correct": "tis"}, ["proximal"]),
        ({"staleness.correct": ["opsm", "prefix"]}, []),
        ({"staleness.correct": ["opsm", "trust_region"]}, ["proximal"]),
        ({"train.loss": "m2po"}, ["proximal"]),
        ({"train.kl": 0.1}, []),
        ({"train.loss": f"{__name__}:of_entropy"}, ["entropy"]),
    ],
)
def test_the_policy_is_fixed_before_several_steps_where_it_is_looked_at(settings: dict, wanted: list[str]) -> None:
    common = {"train.batch": 4, "train.group_size": 2}
    made = answered(3, rewards=[1.0, 0.5])
    for parts, columns_wanted in ((1, []), (2, wanted)):
        recipe = make_recipe({**common, **settings, "train.mini_batches": parts})
        assert columns_first(made, recipe) == columns_wanted
    recipe = make_recipe({**common, **settings, "train.epochs": 2})
    assert columns_first(made, recipe) == (["reference"] if "train.kl" in settings else wanted), "each once for all epochs"


def test_gspo_counts_every_rollout_the_same_unasked() -> None:
    rollouts = [answer(0), answer(1).forked(13, id="short")]
    episodes = tuple(
        Episode(id=f"g/{index}", group="", task={}, rollouts=(rollout,), outcome=Scored(float(index)))
        for index, rollout in enumerate(rollouts)
    )
    (batch,) = make_batches([Group(number=0, episodes=episodes)], make_recipe({"train.loss": "gspo"}), version=3)
    assert [float(weights.sum()) for weights in batch.weights] == pytest.approx([0.5, 0.5])
    assert len({int(np.count_nonzero(weights)) for weights in batch.weights}) == 2, "of different lengths"


def test_a_batch_says_what_the_recipe_corrects_with() -> None:
    made = answered(3, rewards=[1.0])
    own, usual = {"train.loss": "m2po"}, {"cap": 2.0, "floor": 0.5}
    for given_settings, corrections in [
        ({}, {}),
        ({"staleness.correct": "geometric_mis", "staleness.cap": 1.1}, {"geometric_mis": {"cap": 1.1, "floor": 0.5}}),
        ({"staleness.correct": "opsm"}, {"opsm": {"limit": 1e-4}}),
        ({"staleness.correct": ["tis", "opsm"]}, {"tis": usual, "opsm": {"limit": 1e-4}}),
        (
            {"staleness.correct": ["prefix", "trust_region"], "staleness.limit": 0.1},
            {"prefix": {}, "trust_region": {"limit": 0.1}},
        ),
        (own, {"m2po": {"limit": 0.04}}),
        ({**own, "staleness.correct": "m2po", "staleness.limit": 0.1}, {"m2po": {"limit": 0.1}}),
        (
            {**own, "staleness.correct": ["opsm", "tis"], "staleness.limit": 0.1},
            {"m2po": {"limit": 0.04}, "opsm": {"limit": 0.1}, "tis": usual},
        ),
    ]:
        (batch,) = make_batches(made, make_recipe(given_settings), version=3)
        assert batch.corrections == corrections


@given(groups(), st.integers(0, 20), st.integers(0, 6), st.sampled_from(["", "a1b2", "other"]), st.sampled_from(list(RULES)))
@settings(parent=quick, max_examples=100)
def test_which_tokens_make_a_group_too_old(made: list[Group], version: int, max_lag: int, life: str, rule: str) -> None:
    lineage = Lineage(life)
    for group in made:
        rollouts = [rollout for episode in group.episodes for rollout in episode.rollouts]
        sampled = [(rollout.lineage, token) for rollout in rollouts for token in rollout.versions[rollout.is_sampled].tolist()]
        trained = [token for rollout in rollouts for token in rollout.versions[rollout.loss_mask].tolist()]
        every = [token for _, token in sampled]
        is_dead = any(not lineage.contains(*each) for each in sampled)
        newest = max(every, default=0)
        lag = {
            "oldest": version - min(trained, default=newest),
            "first": version - min(every, default=version),
            "in_flight": newest - min(every, default=newest),
            "never": 0,
        }[rule]
        reason = Rejection(RULES[rule], max_lag).reason(group, version=version, lineage=lineage)
        assert (reason is not None) == (is_dead or (bool(every) and lag > max_lag))
        assert (reason == "lineage") == is_dead


def test_the_collector_is_left_as_it_was_found() -> None:
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    assert frozen > 0  # by conftest
    with fewer_gc_pauses():
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before and gc.get_freeze_count() == frozen
    gc.unfreeze()
    try:
        with pytest.raises(RuntimeError, match="stop"), fewer_gc_pauses():
            assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count() > 0
            raise RuntimeError("stop")
        assert gc.get_threshold() == before and gc.get_freeze_count() == 0
    finally:
        gc.freeze()
