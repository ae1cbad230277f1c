"""The three means against staleness: the gate's bound by simulation, rejection at its edges, corrections by the formula."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from strategies import quick

from headrace.algorithms.corrections import BATCH_WIDE, CORRECTIONS, MASKS, CorrectedTokens, importance_weights
from headrace.buffer import Group, GroupBuffer
from headrace.records import Call, Episode, FinishReason, Rollout, Sampling, Source
from headrace.staleness import Rejection
from headrace.staleness.gate import DepthGate, NoGate
from headrace.staleness.reject import RULES
from headrace.sync import Lineage

# The gate


@dataclass
class Simulation:
    """Engines, buffer and trainer reduced to counting: what is submitted when, finishes when, is trained at which version.

    Engines hold the newest version at every moment; a group's tokens are sampled between its submission and its end, so
    the version at submission is the oldest any of them can have.
    """

    gate: DepthGate | NoGate
    batch: int
    steps: int
    in_order: bool
    drop_share: float
    random: random.Random
    version: int = 0
    submitted: int = 0
    dropped: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)
    lags: list[int] = field(default_factory=list)

    def run(self) -> None:
        oldest = (lambda: min(self.in_flight, default=None)) if self.in_order else None
        buffer = GroupBuffer(batch=self.batch, capacity=None, max_bytes=1 << 30, waits_for=oldest)
        while self.version < self.steps:
            may_submit = self.gate.is_open(version=self.version, submitted=self.submitted, dropped=self.dropped)
            moves = ["submit"] * (4 * may_submit) + ["finish"] * bool(self.in_flight) + ["train"] * buffer.ready.is_set()
            assert moves, "nothing can happen any more: the gate locked up"
            move = self.random.choice(moves)
            if move == "submit":
                self.in_flight[self.submitted] = self.version
                self.submitted += 1
            elif move == "finish":
                number = self.random.choice(list(self.in_flight))
                self.oldest[number] = self.in_flight.pop(number)
                if self.random.random() < self.drop_share:
                    buffer.drop(number)
                    self.dropped += 1
                else:
                    buffer.put(Group(number, ()))
            else:
                self.lags += [self.version - self.oldest[group.number] for group in buffer.take()]
                self.version += 1


def simulate(
    *, depth: float | None, batch: int, steps: int, seed: int, in_order: bool = True, drops: float = 0.0
) -> Simulation:
    sizes = {"groups_per_batch": batch, "steps": steps}
    gate = NoGate(episodes=10**9, **sizes) if depth is None else DepthGate(depth=depth, **sizes)
    simulation = Simulation(gate, batch, steps, in_order, drops, random.Random(seed))
    simulation.run()
    return simulation


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 12), st.sampled_from([0.0, 0.3]), st.integers(0, 2**32))
@quick
def test_trained_in_order_of_submission_no_lag_exceeds_the_depth(
    depth: int, batch: int, steps: int, drops: float, seed: int
) -> None:
    done = simulate(depth=depth, batch=batch, steps=steps, seed=seed, drops=drops)
    assert len(done.lags) == steps * batch
    assert max(done.lags) <= depth
    assert done.submitted - done.dropped == steps * batch, "no group is sampled that no step is left for"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_whole_depth_is_used(depth: int) -> None:
    """A gate that lets fewer run ahead would pass the bound and starve the engines."""
    assert max(max(simulate(depth=depth, batch=2, steps=12, seed=seed).lags) for seed in range(10)) == depth


def test_the_simulation_would_see_a_gate_that_is_too_wide() -> None:
    """The bound is the gate's doing, and the order's: without either the same courses of events break it."""
    seeds = range(10)
    assert max(max(simulate(depth=None, batch=2, steps=12, seed=seed).lags) for seed in seeds) > 3
    assert max(max(simulate(depth=1, batch=2, steps=12, seed=seed, in_order=False).lags) for seed in seeds) > 1


def test_the_gate_by_hand() -> None:
    gate = DepthGate(depth=1, groups_per_batch=4, steps=3)
    assert gate.is_open(version=0, submitted=7, dropped=0)
    assert not gate.is_open(version=0, submitted=8, dropped=0)
    assert gate.is_open(version=0, submitted=8, dropped=1)
    assert gate.is_open(version=1, submitted=11, dropped=0)
    assert not gate.is_open(version=2, submitted=12, dropped=0)  # there is no step 4 to train it
    assert gate.is_open(version=2, submitted=12, dropped=1)


def test_depth_0_generates_and_trains_in_turn() -> None:
    gate = DepthGate(depth=0, groups_per_batch=4, steps=10)
    assert [gate.is_open(version=3, submitted=count, dropped=0) for count in (15, 16)] == [True, False]
    assert set(simulate(depth=0, batch=3, steps=6, seed=0).lags) == {0}


def test_no_depth_is_bounded_by_the_end_of_the_run_alone() -> None:
    gate = NoGate(groups_per_batch=4, episodes=10**9, steps=10)
    assert gate.is_open(version=0, submitted=39, dropped=0)
    assert not gate.is_open(version=0, submitted=40, dropped=0)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_extra_groups_are_a_number_and_never_add_up(depth: int, seed: int) -> None:
    """However many batches go by and whichever groups are slow, (1 + d)·B + E are submitted and untrained at most."""
    gate, chance = DepthGate(depth=depth, groups_per_batch=4, steps=40, extra=3), random.Random(seed)
    submitted = dropped = version = done = most = 0
    while version < 40:
        while gate.is_open(version=version, submitted=submitted, dropped=dropped):
            submitted += 1
        untrained = submitted - dropped - 4 * version
        most = max(most, untrained)
        assert untrained <= (1 + depth) * 4 + 3
        if chance.random() < 0.3 and untrained > done:
            dropped += 1
        else:
            done = min(untrained, done + chance.randrange(4))
        if done >= 4:
            version, done = version + 1, done - 4
    assert most == (1 + depth) * 4 + 3


# Rejection


def make_episode(*versions: list[int], lineage: str = "a") -> Episode:
    """One rollout per list of versions, of which each token is one; an empty list is a prompt alone."""
    return Episode(id="e", group="g", task={}, rollouts=tuple(make_rollout(list_, lineage) for list_ in versions))


def make_rollout(versions: list[int], lineage: str) -> Rollout:
    count = len(versions)
    call = Call(
        start=1, stop=1 + count, engine="x", sampling=Sampling(), finish_reason=FinishReason.STOP, started=0.0, finished=1.0
    )
    return Rollout(
        id="r",
        episode="e",
        group="g",
        index=0,
        lineage=lineage,
        token_ids=np.zeros(1 + count, dtype=np.int32),
        source=np.array([Source.PROMPT] + [Source.SAMPLED] * count),
        loss_mask=np.array([False] + [True] * count),
        logprobs=np.zeros(1 + count, dtype=np.float32),
        versions=np.array([-1, *versions]),
        calls=(call,) if count else (),
        finish_reason=FinishReason.STOP if count else None,
    )


LIFE = Lineage(id="a")


def refusal(group: Group, *, version: int, max_lag: int | None, lineage: Lineage = LIFE, rule: str = "oldest") -> str | None:
    rejection = Rejection(RULES["never"]) if max_lag is None else Rejection(RULES[rule], max_lag)
    return rejection.reason(group, version=version, lineage=lineage)


@pytest.mark.parametrize(
    ("versions", "max_lag", "reason"),
    [
        ([[10]], 0, None),
        ([[9]], 0, "lag"),
        ([[9]], 1, None),
        ([[7, 8, 9, 10]], 3, None),
        ([[7, 8, 9, 10]], 2, "lag"),
        ([[10, 10], [10, 6]], 3, "lag"),
        ([[10, 10], []], 0, None),
        ([[]], 0, None),
        ([], 0, None),
        ([[0]], None, None),
    ],
)
def test_one_token_too_old_refuses_the_group(versions: list, max_lag: int | None, reason: str | None) -> None:
    episode = make_episode(*versions)
    assert refusal(Group(0, (episode,)), version=10, max_lag=max_lag, lineage=LIFE) == reason
    fresh = make_episode([10])
    assert refusal(Group(0, (fresh, episode, fresh)), version=10, max_lag=max_lag, lineage=LIFE) == reason


def test_dead_weights_are_refused_whatever_their_age() -> None:
    restarted = Lineage(id="b", ancestors={"a": 8})
    old, dead, new, alien = (
        make_episode([7, 8]),
        make_episode([8, 9]),
        make_episode([9], lineage="b"),
        make_episode([9], lineage="c"),
    )
    for max_lag in (None, 5):
        assert refusal(Group(0, (old,)), version=9, max_lag=max_lag, lineage=restarted) is None
        assert refusal(Group(0, (dead,)), version=9, max_lag=max_lag, lineage=restarted) == "lineage"
        assert refusal(Group(0, (new,)), version=9, max_lag=max_lag, lineage=restarted) is None
        assert refusal(Group(0, (alien,)), version=9, max_lag=max_lag, lineage=restarted) == "lineage"
    assert refusal(Group(0, (old,)), version=12, max_lag=4, lineage=restarted) == "lag"


def test_what_is_history_after_several_restarts() -> None:
    first = Lineage.new()
    second = first.after_restart(40)
    third = second.after_restart(30)  # before the second life's own beginning
    fourth = third.after_restart(35)
    assert len({life.id for life in (first, second, third, fourth)}) == 4
    assert first.contains(first.id, 10**6)
    assert second.contains(first.id, 40) and not second.contains(first.id, 41)
    assert third.contains(first.id, 30) and not third.contains(first.id, 31)
    assert third.contains(second.id, 30) and not third.contains(second.id, 31)
    assert fourth.contains(first.id, 30) and not fourth.contains(first.id, 31)
    assert fourth.contains(third.id, 35) and not fourth.contains(third.id, 36)
    assert not first.contains(second.id, 0)


# Corrections

log_ratios = st.lists(st.floats(-3, 3).map(lambda number: round(number, 3)), min_size=1, max_size=8)
CAPS, FLOORS, LIMITS = st.sampled_from([1.0, 2.0, 5.03]), st.sampled_from([0.0, 0.5, 0.97]), st.sampled_from([0.0, 0.04, 1.7])


def weigh(name: str, log_ratio: torch.Tensor, *, rows: list[int] | None = None, **given_constants) -> torch.Tensor:
    """Of tokens in rollouts `rows`, all of one rollout if that is not given, advantages −1 unless they are."""
    advantages = given_constants.pop("advantages", torch.full_like(log_ratio, -1.0))
    sequence = torch.zeros(len(log_ratio), dtype=torch.long) if rows is None else torch.tensor(rows, dtype=torch.long)
    num = max(rows or [0]) + 2  # one more rollout, of which nothing is trained
    versions = given_constants.pop("versions", torch.zeros(len(log_ratio), dtype=torch.int32))
    tokens = {
        "log_ratio": log_ratio,
        "sequence": sequence,
        "num_sequences": num,
        "advantages": advantages,
        "versions": versions,
    }
    return importance_weights(name, CorrectedTokens(**tokens, **given_constants))


def naive(
    name: str,
    values: list[float],
    rows: list[int],
    advantages: list[float],
    versions: list[int],
    cap: float,
    floor: float,
    limit: float,
) -> list[float | None]:
    """Token by token; None where the value is a hair's breadth from an edge and either side is right."""
    if name == "m2po":
        return naive_second_moment(values, limit)
    if name == "trust_region":
        return [None if abs(value * value - limit) < 1e-9 and limit else float(value * value <= limit) for value in values]
    if name == "prefix":
        of_rollout = [[other for other, place in zip(versions, rows, strict=True) if place == row] for row in rows]
        return [float(version == max(mine)) for version, mine in zip(versions, of_rollout, strict=True)]
    name = "mis" if name == "icepop" else name
    results: list[float | None] = []
    for value, row in zip(values, rows, strict=True):
        mine = [other for other, place in zip(values, rows, strict=True) if place == row]
        if name == "opsm":
            of_rollout = [a for a, place in zip(advantages, rows, strict=True) if place == row]
            gone = -sum(mine) / len(mine)
            is_near = abs(gone - limit) < 1e-9 or abs(sum(of_rollout)) < 1e-9
            results.append(None if is_near else float(not (gone > limit and sum(of_rollout) < 0)))
            continue
        log_weight = {"sequence": sum(mine), "geometric": sum(mine) / len(mine)}.get(name.partition("_")[0], value)
        weight = math.exp(min(max(log_weight, -20), 20))
        if name.endswith("tis"):
            results.append(min(weight, cap))
        elif min(abs(weight - edge) for edge in (cap, floor)) < 1e-9:
            results.append(None)
        else:
            results.append(weight if floor <= weight <= cap else 0.0)
    return results


def naive_second_moment(values: list[float], limit: float) -> list[float | None]:
    """Take out the farthest, with all that are as far, until the mean of squares of the others is within the limit."""
    kept = sorted({value * value for value in values}, reverse=True)
    while kept:
        rest = [value * value for value in values if value * value <= kept[0]]
        mean = sum(rest) / len(rest)
        if abs(mean - limit) < 1e-12 and limit:
            return [None] * len(values)
        if mean <= limit:
            break
        kept.pop(0)
    return [float(bool(kept) and value * value <= kept[0]) for value in values]


@pytest.mark.parametrize("name", list(CORRECTIONS))
@given(values=log_ratios, cap=CAPS, floor=FLOORS, limit=LIMITS, data=st.data())
@quick
def test_weights_are_the_formula(
    name: str, values: list[float], cap: float, floor: float, limit: float, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(0, 2), min_size=len(values), max_size=len(values)))
    advantages = data.draw(st.lists(st.sampled_from([-1.0, -0.25, 0.5, 2.0]), min_size=len(values), max_size=len(values)))
    versions = data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values)))
    made = weigh(
        name,
        torch.tensor(values, dtype=torch.float64),
        rows=rows,
        versions=torch.tensor(versions, dtype=torch.int32),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        cap=cap,
        floor=floor,
        limit=limit,
    )
    expected = naive(name, values, rows, advantages, versions, cap, floor, limit)
    wanted = [float(got) if value is None else value for got, value in zip(made, expected, strict=True)]
    torch.testing.assert_close(made, torch.tensor(wanted, dtype=torch.float64))


def test_by_hand() -> None:
    values = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0]).log()
    torch.testing.assert_close(weigh("tis", values), torch.tensor([0.25, 0.5, 1, 2, 2]))
    torch.testing.assert_close(weigh("mis", values, cap=2.001, floor=0.499), torch.tensor([0, 0.5, 1, 2, 0]))
    one = torch.zeros(1)
    assert weigh("mis", one, cap=1.0, floor=1.0).tolist() == [1.0]  # the edges are inside
    pair = torch.tensor([2.0, 0.25, 4.0]).log()
    torch.testing.assert_close(weigh("sequence_tis", pair, rows=[0, 0, 1], cap=3.0), torch.tensor([0.5, 0.5, 3.0]))
    torch.testing.assert_close(weigh("geometric_mis", pair, rows=[0, 0, 1], cap=3.0), torch.tensor([0.5**0.5, 0.5**0.5, 0]))


def test_opsm_leaves_out_what_did_badly_and_has_become_unlikely() -> None:
    values, rows = torch.tensor([-0.3, 0.1, -0.3, 0.1, 0.2, 0.2]), [0, 0, 1, 1, 2, 2]
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    assert weigh("opsm", values, rows=rows, advantages=advantages, limit=0.05).tolist() == [0, 0, 1, 1, 1, 1]
    assert weigh("opsm", values, rows=rows, advantages=advantages, limit=0.15).tolist() == [1] * 6


def test_m2po_leaves_out_the_farthest_tokens_of_the_whole_batch() -> None:
    values = torch.tensor([0.1, -0.3, 0.0, 0.6, -0.1])  # squares 0.01, 0.09, 0, 0.36, 0.01
    assert weigh("m2po", values, limit=0.1).tolist() == [1, 1, 1, 1, 1]
    assert weigh("m2po", values, limit=0.04).tolist() == [1, 1, 1, 0, 1]
    assert weigh("m2po", values, limit=0.01).tolist() == [1, 0, 1, 0, 1]
    assert weigh("m2po", torch.tensor([0.5, -0.5]), limit=0.2).tolist() == [0, 0], "equally far: together"
    assert weigh("m2po", torch.zeros(0)).tolist() == []


def test_prefix_leaves_out_what_older_weights_began() -> None:
    """Rows 0 and 1 take turns in the pass; row 2 was sampled by one version, which others have left behind."""
    rows, versions = [0, 1, 0, 1, 0, 2, 2], torch.tensor([3, 5, 3, 5, 4, 1, 1])
    assert weigh("prefix", torch.zeros(7), rows=rows, versions=versions).tolist() == [0, 1, 0, 1, 1, 1, 1]


def test_the_trust_region_is_on_the_squared_log_ratio() -> None:
    values = torch.tensor([0.0, 0.19, -0.19, 0.21, -0.21])
    assert weigh("trust_region", values, limit=0.04).tolist() == [1, 1, 1, 0, 0]


@given(log_ratios, LIMITS, st.randoms(use_true_random=False))
@quick
def test_m2po_does_not_depend_on_order(values: list[float], limit: float, random: random.Random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    made = weigh("m2po", torch.tensor(values), limit=limit)
    assert weigh("m2po", torch.tensor(values)[order], limit=limit).tolist() == made[order].tolist()
    kept = torch.tensor(values)[made > 0].double().square()
    assert not len(kept) or kept.mean() <= limit + 1e-12


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_weights_are_finite_however_far_apart_the_policies_are(name: str) -> None:
    values = torch.tensor([-1e4, -100, 100, 1e4])
    made = weigh(name, values, rows=[0, 1, 2, 3], cap=2.0, floor=0.5)
    assert torch.isfinite(made).all() and (made >= 0).all()
    if name in ("mis", "icepop", "m2po", "trust_region"):
        assert made.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", list(CORRECTIONS))
def test_no_gradient_goes_through_the_weights(name: str) -> None:
    log_ratio = torch.zeros(3, requires_grad=True)
    assert not weigh(name, log_ratio).requires_grad


def test_masks_only_leave_out() -> None:
    values = torch.linspace(-2, 2, 41)
    for name in CORRECTIONS:
        is_mask = set(weigh(name, values, rows=list(range(41)), cap=5.0).tolist()) <= {0.0, 1.0}
        assert is_mask == (name in MASKS)
    assert MASKS >= BATCH_WIDE


def test_an_unknown_correction_is_not_passed_over() -> None:
    with pytest.raises(KeyError):
        weigh("tsi", torch.zeros(1))


def test_the_pages_have_every_correction() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for name in CORRECTIONS:
        assert f"`{name}`" in (docs / "losses.md").read_text() and f"`{name}`" in (docs / "staleness.md").read_text()
