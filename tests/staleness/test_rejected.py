"""What rejection costs: which groups, what is submitted instead, and which lengths are trained."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import small_run
from pipeline import Pipeline

from headrace.observe.inspect import read_rollouts
from headrace.observe.sinks import read_metrics
from headrace.run.retries import MAX_SUBMISSIONS, Retries
from headrace.staleness import LagController
from headrace.staleness.lengths import LengthBias, Lengths
from headrace.tasks import Task

if TYPE_CHECKING:
    from headrace.launch import RunResult

LONG_TAIL = {
    **{"model": {"context": 128}, "sampling": {"max_tokens": 96}, "engine": {"slots": 24}, "held_out": None},
    **{"train": {"batch": 8, "group_size": 2}, "observe": {"keep_rollouts_every": 1}, "steps": 10},
}
"""An untrained model ends a rollout by chance: most are short, a few are long."""


def books_close(summary: dict) -> bool:
    counts = dict(summary["accounting"])
    counts.pop("evaluation")
    return counts.pop("submitted") == sum(counts.values())


# What is submitted instead


def test_a_rejected_task_is_submitted_again_but_not_forever() -> None:
    retries, task = Retries(), Task({"prompt": "1"}, "source", 3)
    assert retries.next_task(0) is None
    retries.add(0, task)
    for number in range(1, MAX_SUBMISSIONS):
        assert retries.next_task(number) == task and retries.next_task(99) is None
        restored = Retries()
        restored.restore(retries.state())
        retries = restored
        retries.add(number, task)
        retries.forget(number)
    assert retries.next_task(9) is None, "three groups of one task were too old"
    assert retries.state() == {"waiting": [], "submissions": []}


@pytest.mark.parametrize("cancel", ["over_age", pytest.param("never", marks=pytest.mark.long)])
def test_a_rejected_group_is_retried_under_a_new_number(tmp_path, cancel: str) -> None:
    settings = {"staleness": {"max_lag": 1, "rejected": "retry"}, "partial": {"cancel": cancel}}
    result = small_run(tmp_path / "run", **LONG_TAIL, **settings)
    counts, last = result.summary["accounting"], read_metrics(result.folder / "metrics.jsonl")[-1]
    assert counts["rejected"] > 0 and counts["trained"] == 10 * 8 and books_close(result.summary)
    assert result.summary["lag"]["max"] <= 1 and 0 < last["staleness/resubmitted"] <= counts["rejected"] / 2


@pytest.mark.parametrize("rule", ["in_flight", *(pytest.param(rule, marks=pytest.mark.long) for rule in ("first", "never"))])
def test_every_rule_runs(tmp_path, rule: str) -> None:
    result = small_run(tmp_path / "run", **LONG_TAIL, staleness={"max_lag": 1, "reject": rule})
    counts, lag = result.summary["accounting"], result.summary["lag"]["max"]
    assert counts["trained"] == 10 * 8 and books_close(result.summary)
    expected = {"first": (True, True), "in_flight": (True, False), "never": (False, False)}
    assert (counts["rejected"] > 0, lag <= 1) == expected[rule]
    for step in range(1, 11) if rule == "in_flight" else ():
        for rollout in read_rollouts(result.folder, step)[1]:
            versions = rollout.versions[rollout.is_sampled]
            assert versions.max() - versions.min() <= 1, "as old as may be when trained, but generated within two versions"
    first, *_, last = read_metrics(result.folder / "metrics.jsonl")
    check_lengths(first, last, result)
    assert last["staleness/depth"] == 1 and result.summary["staleness"] == {"max_lag": 1, "depth": 1, "why": ""}


# Which lengths are trained


def check_lengths(first: dict, last: dict, result: RunResult) -> None:
    """At the end nothing is unfinished: what the engine sampled is what has ended, whether trained or rejected."""
    tokens, counts = result.summary["tokens"], result.summary["accounting"]
    trained = [rollout.num_sampled for step in range(1, 11) for rollout in read_rollouts(result.folder, step)[1]]
    assert (
        last["lengths/trained_mean"] == pytest.approx(np.mean(trained)) == pytest.approx(tokens["trained"] / counts["trained"])
    )
    assert last["lengths/ended_mean"] == pytest.approx(tokens["sampled"] / counts["submitted"])
    assert last["lengths/mean_ratio"] == pytest.approx(np.mean(trained) * counts["submitted"] / tokens["sampled"])
    assert last["lengths/trained_p90"] == pytest.approx(np.quantile(trained, 0.9), rel=0.03)
    assert first["lengths/mean_ratio"] < 0.8, "the first version is of the shortest that have ended"
    assert (last["lengths/mean_ratio"] < 0.98) == (counts["rejected"] > 0), "and rejection drops long ones"


def test_lengths_are_known_to_two_percent() -> None:
    lengths, drawn = Lengths(), [int(10 * random.Random(seed).lognormvariate(3, 1)) for seed in range(2000)]
    lengths.add([*drawn, 0])
    assert lengths.mean == pytest.approx(np.mean([*drawn, 0]))
    assert lengths.quantile(0.9) == pytest.approx(np.quantile(drawn, 0.9), rel=0.03)
    assert Lengths().mean == Lengths().quantile(0.9) == 0


def test_the_bias_is_of_what_was_trained_to_what_ended() -> None:
    bias = LengthBias()
    assert bias.metrics()["lengths/mean_ratio"] == 1
    bias.ended(0, [10, 10])
    bias.ended(1, [100, 300])
    bias.ended(2, [30])
    bias.trained(0)
    bias.dropped(1)
    found = bias.metrics()
    assert (found["lengths/trained_mean"], found["lengths/ended_mean"]) == (10, 90)
    assert found["lengths/mean_ratio"] == pytest.approx(1 / 9) and found["lengths/p90_ratio"] < 0.1
    bias.trained(2)
    assert bias.metrics()["lengths/trained_mean"] == pytest.approx(50 / 3)


def test_completion_order_is_biased_to_the_short_and_pacing_does_not_starve_the_long() -> None:
    """A long tail of which a tenth takes more than two versions. Rejection at the gate's own depth drops the long; with the
    gate where the trainer is just busy and rejection at the limit, as "auto" has it, nearly all of them are trained."""
    tail = {"generate": 1.0, "sigma": 1.0, "seed": 1}
    strict = Pipeline(**tail, reject=1)
    strict.run(versions=150, depth=1.0)
    auto = Pipeline(**tail, reject=8)
    auto.run(LagController(groups_per_batch=16, limit=8, start=1.0), versions=150)
    biased, paced = strict.bias.metrics(), auto.bias.metrics()
    assert biased["lengths/mean_ratio"] < 0.7 and biased["lengths/p90_ratio"] < 0.65
    assert paced["lengths/mean_ratio"] > 0.93 and paced["lengths/p90_ratio"] > 0.95
    assert strict.dropped > 0.1 * strict.submitted and auto.dropped < 0.01 * auto.submitted
    old = range(auto.submitted - 20 * 16)
    assert len(auto.trained.intersection(old)) >= len(old) - auto.dropped, "each is trained within 20 versions, or counted"


def test_the_first_versions_are_the_shortest() -> None:
    """Nothing is rejected, but the long ones come later: the bias of completion order alone, which pacing leaves finite."""
    pipeline = Pipeline(generate=2.0, sigma=1.0)
    submitted = random.Random(0)
    expected = np.mean([submitted.lognormvariate(-0.5, 1.0) for _ in range(10_000)])
    pipeline.run(versions=3, depth=4.0)
    early = pipeline.bias.metrics()["lengths/trained_mean"] / 1000
    pipeline.run(versions=150, depth=4.0)
    late = pipeline.bias.metrics()["lengths/trained_mean"] / 1000
    assert early < 0.75 * expected and late > 0.93 * expected
