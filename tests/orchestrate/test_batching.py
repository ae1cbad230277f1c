"""Batches made in columns are those a loop over rollouts would make; groups known to be fresh are fresh."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import batches, quick, rollouts

from headrace.buffer import Group
from headrace.config import make_recipe
from headrace.orchestrate.batching import make_batches
from headrace.orchestrate.collector import few_collections
from headrace.score import advantages
from headrace.staleness import too_old
from headrace.sync import Lineage
from headrace.types import Batch, Episode, Scored


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


@pytest.mark.parametrize("mean", ["token", "sequence"])
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
        scales = [1 / max(sum(counts), 1) if mean == "token" else 1 / (len(members) * max(count, 1)) for count in counts]
        assert batch == Batch(
            rollouts=tuple(members),
            advantages=[np.where(r.loss_mask, value, 0).astype(np.float32) for r, value in zip(members, values, strict=True)],
            weights=[np.where(r.loss_mask, scale, 0).astype(np.float32) for r, scale in zip(members, scales, strict=True)],
            loss="grpo",
            version=3,
        )

    check()


def columns(batch: Batch) -> dict:
    fields = {name: getattr(batch, name) for name in ("loss", "constants", "correction", "correction_constants", "version")}
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


@given(groups(), st.integers(0, 20), st.none() | st.integers(0, 6), st.sampled_from(["", "a1b2", "other"]))
@settings(parent=quick, max_examples=100)
def test_what_a_group_says_is_fresh_is_not_too_old(made: list[Group], version: int, max_lag: int | None, life: str) -> None:
    lineage = Lineage(life)
    for group in made:
        oldest = None if max_lag is None else version - max_lag
        if group.is_within(life, oldest=oldest):
            assert too_old(group.episodes, version=version, max_lag=max_lag, lineage=lineage) is None
        if all(rollout.lineage == life for episode in group.episodes for rollout in episode.rollouts):
            is_old = too_old(group.episodes, version=version, max_lag=max_lag, lineage=lineage) is not None
            assert group.is_within(life, oldest=oldest) is not is_old


def test_the_collector_is_left_as_it_was_found() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError, match="stop"), few_collections():
        assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count() > 0
        raise RuntimeError("stop")
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
