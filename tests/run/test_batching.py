"""Batches made in columns are those a loop over rollouts would make; groups known to be fresh are fresh."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from strategies import batches, quick, rollouts

from headrace.algorithms import advantages, gae, token_rewards
from headrace.bench.stubs import answer
from headrace.buffer import Group
from headrace.config import make_recipe
from headrace.records import Batch, Episode, Scored
from headrace.run.batches import columns_first, make_batches, with_column, with_token_advantages
from headrace.run.session import fewer_gc_pauses
from headrace.staleness import too_old
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


@pytest.mark.parametrize("mean", ["token", "sequence", "constant"])
def test_a_batch_is_the_one_a_loop_makes(mean: str) -> None:
    @given(groups())
    @settings(parent=quick, max_examples=40)
    def check(made: list[Group]) -> None:
        recipe = make_recipe({"train": {"loss_mean": mean}})
        (batch,) = make_batches(made, recipe, version=3)
        values, members = [], []
        for group in made:
            of_group = advantages([episode.reward for episode in group.episodes], kind="group")
            for episode, value in zip(group.episodes, of_group, strict=True):
                members += episode.rollouts
                values += [value] * len(episode.rollouts)
        counts = [int(rollout.loss_mask.sum()) for rollout in members]
        scales = {
            "token": [1 / max(sum(counts), 1)] * len(counts),
            "sequence": [1 / (len(members) * max(count, 1)) for count in counts],
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
    names = ("loss", "constants", "correction", "correction_constants", "kl", "kl_weight", "version")
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
    batches_made = make_batches(made, recipe, version=3)
    assert columns_first(batches_made, recipe) == ["values", *(["reference"] if in_reward else [])]
    random = np.random.default_rng(0)
    drawn = {id: random.normal(size=(2, 20)).astype(np.float32) for group in made for id in ids(group)}
    for place, name in enumerate(columns_first(batches_made, recipe)):
        values = [[np.where(r.loss_mask, drawn[r.id][place][: len(r)], 0) for r in batch.rollouts] for batch in batches_made]
        batches_made = [with_column(batch, name, of) for batch, of in zip(batches_made, values, strict=True)]
    assert columns_first(batches_made, recipe) == []
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
    for batch in with_token_advantages(batches_made, recipe):
        assert (batch.kl, batch.kl_weight) == (("none", 0.0) if in_reward else ("k3", 0.1))
        for rollout, values in zip(batch.rollouts, batch.advantages, strict=True):
            assert not values[:10].any()
            np.testing.assert_allclose(values[10:], (expected[rollout.id] - every.mean()) / every.std(), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(rollout.columns["returns"][10:], returns[rollout.id], rtol=1e-5)
            assert rollout.columns["rewards"].sum() == rollout.columns["rewards"][-1]


def test_distillation_as_a_reward_is_how_much_likelier_the_teacher_finds_it() -> None:
    made = answered(3, rewards=[1.0])
    recipe = make_recipe({"train": {"advantage": "distill", "teacher": "t", "batch": 2, "group_size": 2}})
    (batch,) = make_batches(made, recipe, version=3)
    assert columns_first([batch], recipe) == ["teacher"]
    (batch,) = with_token_advantages([with_column(batch, "teacher", [np.full(len(r), -0.2) for r in batch.rollouts])], recipe)
    for rollout, values in zip(batch.rollouts, batch.advantages, strict=True):
        np.testing.assert_allclose(values, np.where(rollout.loss_mask, -0.2 + 0.5, 0), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"train.loss": "grpo"}, []),
        ({"train.loss": "decoupled_ppo"}, ["proximal"]),
        ({"staleness.correct": "tis"}, ["proximal"]),
        ({"train.loss": "m2po"}, ["proximal"]),
        ({"train.kl": 0.1}, []),
    ],
)
def test_the_policy_is_fixed_before_several_steps_where_it_is_looked_at(settings: dict, wanted: list[str]) -> None:
    common = {"train.batch": 4, "train.group_size": 2}
    made = answered(3, rewards=[1.0, 0.5])
    for parts, columns_wanted in ((1, []), (2, wanted)):
        recipe = make_recipe({**common, **settings, "train.mini_batches": parts})
        assert columns_first(make_batches(made, recipe, version=3), recipe) == columns_wanted


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
    for given_settings, name, constants in [
        ({}, "none", {}),
        ({"staleness.correct": "geometric_mis", "staleness.cap": 1.1}, "geometric_mis", {"cap": 1.1, "floor": 0.5}),
        ({"staleness.correct": "opsm"}, "opsm", {"limit": 1e-4}),
        ({"train.loss": "m2po"}, "m2po", {"limit": 0.04}),
        ({"train.loss": "m2po", "staleness.correct": "m2po", "staleness.limit": 0.1}, "m2po", {"limit": 0.1}),
    ]:
        (batch,) = make_batches(made, make_recipe(given_settings), version=3)
        assert (batch.correction, batch.correction_constants) == (name, constants)


@given(groups(), st.integers(0, 20), st.none() | st.integers(0, 6), st.sampled_from(["", "a1b2", "other"]))
@settings(parent=quick, max_examples=100)
def test_a_group_is_too_old_if_one_of_its_tokens_is(made: list[Group], version: int, max_lag: int | None, life: str) -> None:
    lineage = Lineage(life)
    for group in made:
        sampled = [
            (rollout.lineage, token)
            for episode in group.episodes
            for rollout in episode.rollouts
            for token in rollout.versions[rollout.is_sampled].tolist()
        ]
        is_dead = any(not lineage.contains(*each) for each in sampled)
        is_late = max_lag is not None and any(version - token > max_lag for _, token in sampled)
        reason = too_old(group, version=version, max_lag=max_lag, lineage=lineage)
        assert (reason is not None) == (is_dead or is_late) and (reason != "lineage" or is_dead)


def test_the_collector_is_left_as_it_was_found() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match="stop"), fewer_gc_pauses():
        assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count() > 0
        raise RuntimeError("stop")
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
