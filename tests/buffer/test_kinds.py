"""What each kind, order and unit of the buffer promises: in a model of a run with real gate and buffer, and in real runs."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from helpers import TASKS, small_run
from hypothesis import given, strategies as st
from strategies import quick, seeds

from headrace.buffer import Group, buffer_policy, make_buffer
from headrace.config import make_recipe
from headrace.records import Episode
from headrace.settings import ConfigError
from headrace.staleness import make_gate

if TYPE_CHECKING:
    from pathlib import Path


def one(number: int) -> Group:
    return Group(number, (Episode(id=f"g{number}/0", group=f"g{number}", task={}),))


@dataclass
class Model:
    """A run without tokens: groups are submitted as the real gate and buffer let them, complete in any order, and are trained
    as the buffer gives them out. Nothing is rejected for its age."""

    settings: dict[str, Any]
    random: random.Random
    drops: float = 0.0
    starves: bool = False
    """The oldest in flight completes only when nothing else can happen."""
    version: int = 0
    held: int = 0
    submitted: int = 0
    dropped: int = 0
    overwritten: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    """Number -> the version held when it was submitted."""
    oldest: dict[int, int] = field(default_factory=dict)
    lags: dict[int, int] = field(default_factory=dict)
    """Of what was trained."""
    most: int = 0
    """That waited and were in flight at once."""

    def __post_init__(self) -> None:
        self.recipe = make_recipe({"staleness.max_lag": 1, **self.settings})
        self.gate = make_gate(self.recipe)
        self.buffer = make_buffer(
            self.recipe,
            waits_for=lambda: min(self.in_flight, default=None),
            num_in_flight=lambda: len(self.in_flight),
            slots=self.slots,
        )

    def slots(self) -> int | None:
        depth = self.gate.depth
        return None if depth is None else (depth + 1) * self.recipe.train.groups_per_batch

    def has_room(self) -> bool:
        is_open = self.gate.is_open(version=self.held, submitted=self.submitted, dropped=self.dropped)
        return is_open and not self.buffer.is_full

    def moves(self) -> list[str]:
        younger = [number for number in self.in_flight if number != min(self.in_flight)]
        found = ["submit"] * (4 * self.has_room()) + ["finish"] * bool(younger if self.starves else self.in_flight)
        found += ["train"] * self.buffer.ready.is_set() + ["publish"] * (self.held < self.version)
        return found or ["finish oldest"] * bool(self.in_flight)

    def run(self, steps: int) -> Model:
        while self.version < steps:
            moves = self.moves()
            assert moves, "nothing can happen any more: gate and buffer locked up"
            self.make(self.random.choice(moves))
            self.most = max(self.most, len(self.buffer) + len(self.in_flight))
        return self

    def make(self, move: str) -> None:
        if move == "submit":
            self.in_flight[self.submitted] = self.held
            self.submitted += 1
        elif move == "publish":
            self.held = self.version
        elif move == "train":
            self.lags |= {group.number: self.version - self.oldest[group.number] for group in self.buffer.take()}
            self.version += 1
        else:
            candidates = sorted(self.in_flight)
            is_oldest = move == "finish oldest" or (self.starves and len(candidates) == 1)
            self.finish(candidates[0] if is_oldest else self.random.choice(candidates[self.starves :]))

    def finish(self, number: int) -> None:
        self.oldest[number] = self.in_flight.pop(number)
        if self.random.random() < self.drops:
            self.buffer.drop(number)
            self.dropped += 1
            return
        self.buffer.put(one(number))
        for group in self.buffer.overwritten():
            self.buffer.drop(group.number)
            self.dropped, self.overwritten = self.dropped + 1, self.overwritten + 1


def bound_of(model: Model) -> tuple[int, int]:
    """(W, the bound that docs/staleness.md proves for it)."""
    width, batch = model.recipe.buffer.window_of(model.slots() or 0), model.recipe.train.groups_per_batch
    return width, int(model.gate.depth or 0) - (-(width - 1) // batch)


# The window


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.floats(0, 1),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
    seeds,
)
@quick
def test_no_schedule_of_completions_exceeds_the_bound_of_the_window(
    lag: int, batch: int, window: float, drops: float, starves: bool, seed: int
) -> None:
    settings = {"staleness.max_lag": lag, "train": {"batch": 2 * batch, "group_size": 2}, "steps": 30}
    model = Model(
        {**settings, "buffer": {"order": "window", "window": window}}, random.Random(seed), drops=drops, starves=starves
    ).run(30)
    width, bound = bound_of(model)
    assert max(model.lags.values()) <= bound, f"W = {width}"


def test_the_bound_of_the_window_is_reached_and_submission_order_keeps_within_the_gate() -> None:
    settings = {"staleness.max_lag": 2, "train": {"batch": 8, "group_size": 2}, "steps": 60}
    worst = {}
    for window in (0.0, 0.5, 1.0):
        how = {**settings, "buffer": {"order": "window", "window": window}}
        models = [Model(how, random.Random(seed), starves=True).run(60) for seed in range(20)]
        worst[window] = max(max(model.lags.values()) for model in models)
        assert worst[window] == bound_of(models[0])[1]
    assert list(worst.values()) == [2, 4, 5]


def test_a_group_in_the_window_need_not_wait_for_the_oldest_and_one_beyond_it_must() -> None:
    model = Model({"buffer": {"order": "window", "window": 0.5}, "train": {"batch": 8, "group_size": 2}}, random.Random(0))
    for _ in range(8):
        model.make("submit")
    for number in (7, 4, 3, 2):  # the window of 4 begins at 0, which is in flight
        model.finish(number)
    assert not model.buffer.ready.is_set() and [group.number for group in model.buffer.available()] == [2, 3]
    model.finish(0)
    assert [group.number for group in model.buffer.take()] == [0, 2, 3, 4]
    assert [group.number for group in model.buffer.groups()] == [7]


# Kinds


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 0.3]), seeds)
@quick
def test_a_reserved_buffer_has_a_place_for_everything_in_flight(depth: int, batch: int, drops: float, seed: int) -> None:
    settings = {"staleness.max_lag": 3, "train": {"batch": 2 * batch, "group_size": 2}, "steps": 12}
    model = Model({**settings, "buffer": {"kind": "reserved", "depth": depth}}, random.Random(seed), drops=drops).run(12)
    assert model.most <= depth * batch


@given(st.integers(1, 2), st.integers(1, 3), seeds)
@quick
def test_a_ring_drops_its_oldest_and_never_stops_submission(depth: int, batch: int, seed: int) -> None:
    settings = {"staleness": {"max_lag": 2}, "train": {"batch": 2 * batch, "group_size": 2}, "steps": 12}
    model = Model({**settings, "buffer": {"kind": "ring", "depth": depth}}, random.Random(seed))
    for _ in range(40 * batch):  # nothing is trained
        assert not model.buffer.is_full
        model.make(model.random.choice([move for move in model.moves() if move not in ("train", "publish")]))
        assert len(model.buffer) <= depth * batch
    assert model.overwritten > 0 and model.submitted > 10
    assert model.submitted == len(model.in_flight) + len(model.buffer) + model.dropped
    model.run(12)


def test_a_ring_keeps_the_newest_and_bytes_push_out_too() -> None:
    model = Model({"buffer": {"kind": "ring", "depth": 1}, "train": {"batch": 8, "group_size": 2}}, random.Random(0))
    for number in range(6):
        model.make("submit")
        model.finish(number)
    assert [group.number for group in model.buffer.groups()] == [2, 3, 4, 5] and model.overwritten == 2
    assert model.recipe.derivation() and buffer_policy(model.recipe).overwrites


def test_a_resizable_buffer_follows_the_gate() -> None:
    model = Model(
        {"buffer.kind": "resizable", "train": {"batch": 8, "group_size": 2}, "staleness.max_lag": 3}, random.Random(0)
    )
    slots = {"now": 16}
    buffer = make_buffer(model.recipe, waits_for=lambda: None, num_in_flight=int, slots=lambda: slots["now"])
    for number in range(12):
        assert not buffer.is_full
        buffer.put(one(number))
    assert buffer.is_full
    slots["now"] = 20
    assert not buffer.is_full
    slots["now"] = 4  # one batch may always wait
    assert buffer.is_full
    for _ in range(3):
        assert buffer.is_full
        buffer.take()
    assert not buffer.is_full


def test_a_window_follows_the_gate() -> None:
    settings = {"buffer": {"order": "window", "window": 1.0}, "train": {"batch": 8, "group_size": 2}, "staleness.max_lag": 3}
    recipe, slots = make_recipe(settings), {"now": 16}
    buffer = make_buffer(recipe, waits_for=lambda: 0, num_in_flight=int, slots=lambda: slots["now"])
    for number in range(6, 10):
        buffer.put(one(number))
    assert buffer.ready.is_set(), "all are less than 16 after the oldest in flight"
    slots["now"] = 8
    buffer.update()
    assert not buffer.ready.is_set() and [group.number for group in buffer.available()] == [6, 7]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buffer.kind": "ring"}, "buffer.depth = 0: a ring buffer holds at least 1 batch"),
        ({"buffer": {"kind": "reserved", "depth": 3}}, "raise it to 2 or lower the depth"),
        (
            {"buffer": {"kind": "resizable"}, "staleness.gate": "none"},
            "buffer.kind = 'resizable': it counts the groups that the",
        ),
        (
            {"buffer": {"order": "window"}, "staleness.gate": "none"},
            "buffer.order = 'window': it counts the groups that the gate",
        ),
        (
            {"buffer": {"kind": "ring", "depth": 1, "order": "submission"}},
            "buffer.order = 'submission': a ring drops the oldest, for which that order waits; set it to 'completion'",
        ),
        ({"buffer.window": 0.5}, "buffer.window = 0.5: only buffer.order = 'window' has one, not 'completion'"),
        ({"buffer": {"order": "window", "window": 1.5}}, "buffer.window = 1.5: must be a share from 0 to 1"),
        ({"buffer.order": "window", "exact": True}, "buffer.order = 'window': which groups are trained depends on timing"),
        ({"buffer": {"kind": "ring", "depth": 1}, "exact": True}, "buffer.kind = 'ring': which groups are trained depends on"),
        ({"buffer.unit": "sample"}, "buffer.unit = 'sample': train.advantage = 'group' compares siblings"),
        (
            {"buffer.unit": "episode", "train": {"advantage": "global", "normalize_each_reward": True}},
            "buffer.unit = 'episode': train.normalize_each_reward = true compares siblings",
        ),
        (
            {"buffer.unit": "episode", "train.advantage": "global", "filter.max_tied": 0.5},
            "filter.max_tied = 0.5: an episode alone is never tied",
        ),
    ],
    ids=str,
)
def test_what_a_buffer_cannot_do_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_recipe({"staleness.max_lag": 1, **settings})
    assert message in str(refused.value)


# Real runs


class Seen:
    """The groups of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[Group]] = []

    def on_rollouts(self, state: Any, groups: Any) -> None:
        self.batches.append(list(groups))


def closes(summary: dict[str, Any]) -> bool:
    counts = dict(summary["accounting"])
    counts.pop("evaluation")
    return counts.pop("submitted") == sum(counts.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"buffer": {"kind": "ring", "depth": 1}, "staleness": {"max_lag": 2}},
        {"buffer": {"kind": "reserved", "depth": 2}},
        {"buffer": {"kind": "resizable", "order": "window", "window": 0.5}, "staleness": {"max_lag": 2}},
        {"buffer": {"unit": "sample"}, "train": {"advantage": "global"}},
        {
            "buffer": {"unit": "episode", "kind": "reserved", "depth": 1, "order": "submission"},
            "train": {"advantage": "reward"},
        },
    ],
    ids=str,
)
def test_a_run_with_it_trains_and_its_books_close(tmp_path, settings) -> None:
    seen = Seen()
    result = small_run(tmp_path / "run", steps=5, held_out=None, callbacks=[seen], **settings)
    assert result.summary["accounting"]["trained"] == 5 * 16 and closes(result.summary)
    assert [sum(group.num_episodes for group in batch) for batch in seen.batches] == [16] * 5
    ids = [episode.id for batch in seen.batches for group in batch for episode in group.episodes]
    assert len(set(ids)) == len(ids)


def flaky(prompt: str, completion: str, answer: str, **_: object) -> float | None:
    return None if (len(completion) + int(answer)) % 5 == 0 else 1.0 / (1 + len(completion))


@pytest.mark.parametrize("max_lag", [0, 2])
def test_episodes_enter_one_by_one_and_lost_ones_are_replaced(tmp_path, max_lag) -> None:
    """At lag 0 a batch that stayed one episode short would wait forever."""
    seen = Seen()
    result = small_run(
        tmp_path / "run",
        steps=6,
        reward=flaky,
        held_out=None,
        callbacks=[seen],
        buffer={"unit": "episode"},
        train={"advantage": "global"},
        staleness={"max_lag": max_lag},
    )
    counts = result.summary["accounting"]
    assert counts["trained"] == 6 * 16 and counts["filtered"] > 5 and closes(result.summary)
    assert all(group.num_episodes == 1 for batch in seen.batches for group in batch)
    by_group = [{episode.group for group in batch for episode in group.episodes} for batch in seen.batches]
    are_apart = any(earlier & later for earlier, later in itertools.pairwise(by_group))
    assert are_apart or max_lag == 0, "siblings are trained apart, but where those left over are too old"


class Killed(BaseException):
    """As if by SIGKILL: nothing is saved after it."""


def kill(folder: Path, monkeypatch, *, at: int, seen: Seen, **settings: Any) -> None:
    from headrace.run.session import Session

    original = Session._write_version

    def dying(self: Session, *arguments: Any) -> None:
        if self.policy.version == at:
            raise Killed
        original(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Session, "_write_version", dying)
        small_run(folder, callbacks=[seen], **settings)


def test_siblings_that_are_trained_apart_outlive_a_restart(tmp_path, monkeypatch) -> None:
    """Part of a group is trained or waits when the checkpoint is written, and the rest is in flight."""
    settings = {"steps": 8, "held_out": None, "checkpoint": {"every": 2}, "tasks": TASKS}
    settings |= {"buffer": {"unit": "episode"}, "train": {"advantage": "global"}, "staleness": {"max_lag": 2}}
    settings |= {"model": {"context": 64}, "sampling": {"max_tokens": 40}}
    before, after = Seen(), Seen()
    kill(tmp_path / "run", monkeypatch, at=5, seen=before, **settings)
    result = small_run(tmp_path / "run", callbacks=[after], **settings)
    assert result.summary["accounting"]["trained"] == 8 * 16 and closes(result.summary)
    batches = before.batches[:4] + after.batches
    ids = [episode.id for batch in batches for group in batch for episode in group.episodes]
    assert len(ids) == 8 * 16 == len(set(ids))
