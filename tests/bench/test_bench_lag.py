"""`headrace bench lag`: every token has exactly the lag that is named, and the interval and ratios are what they are called."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
import torch

from headrace.bench import lag
from headrace.model import ModelSettings, build_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build_folder(path, ModelSettings(**lag.SETTINGS["model"]), seed=0)
    return str(path)


def test_the_engine_has_the_weights_of_so_many_versions_ago(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, list[tuple[int, torch.Tensor]]] = {}
    real = lag.Sampler.sample
    for each in (0, 2):
        seen = asked.setdefault(each, [])

        def sample(self, weights, *, version, number, seen=seen):
            seen.append((version, weights.clone()))
            return real(self, weights, version=version, number=number)

        monkeypatch.setattr(lag.Sampler, "sample", sample)
        learned = lag._learn(folder, lag.Pace(4, 1e-3), "default", each, 0)
        assert len(learned.curve) == 4 and (learned.kl > 1e-6) == bool(each)
    assert [version for version, _ in asked[0]] == [0, 1, 2, 3]
    assert [version for version, _ in asked[2]] == [0, 0, 0, 1, 2, 3], "the last two are only sampled from"
    weights = dict(asked[2])
    assert all(torch.equal(one, other) for (_, one), other in zip(asked[2][:3], [weights[0]] * 3, strict=True))
    assert not any(torch.equal(weights[version], weights[version + 1]) for version in range(3))
    assert torch.equal(weights[1], asked[0][1][1]), "the first batch is the same at every lag"


def test_at_lag_0_all_but_those_named_are_one_run(folder: str) -> None:
    curves = {way: lag._learn(folder, lag.Pace(3, 1e-3), way, 0, 0).curve for way in lag.WAYS}
    for way, curve in curves.items():
        assert (curve == curves["default"]) == (way not in lag.DIFFERS_AT_0)


def ended(curve: list[float]) -> Future[lag.Learned]:
    future: Future[lag.Learned] = Future()
    future.set_result(lag.Learned(curve, 0.0))
    return future


def test_an_interval_is_of_the_mean() -> None:
    assert lag.interval(np.full(10, 0.98)) == pytest.approx((0.98, 0.98))
    values = np.linspace(0.9, 1.1, 12)
    low, high = lag.interval(values)
    half = 1.96 * values.std() / np.sqrt(12)
    assert (low, high) == (pytest.approx(1 - half, abs=0.005), pytest.approx(1 + half, abs=0.005))


def test_seeds_are_compared_in_pairs() -> None:
    """Seed 1 learns twice as well at any lag: that is no difference between lags."""

    def learn(way: str, each: int, seed: int) -> Future[lag.Learned]:
        return ended([(1 + seed) * (0.45 if each else 0.5)] * 20)

    *_, rows = lag._pair(learn, 8, 10)
    found = {row.name.rpartition(" ÷ ")[2]: row for row in rows}
    assert found["lag 0: mean of 10 seeds"].value == pytest.approx(0.9)
    assert found["lag 0: 95 % interval from"].value == pytest.approx(0.9) == found["lag 0: 95 % interval to"].value
    assert found["lag 0: 95 % interval from"].goal == "≥ 0.97"


def test_a_lag_is_compared_with_as_late_a_start() -> None:
    rising = [float(at) for at in range(1, 21)]
    late = [1.0] * 8 + rising[:-8]
    *_, rows = lag._pair(lambda way, each, seed: ended(late if each else rising), 8, 3)
    (row,) = [row for row in rows if "begun 8 versions later" in row.name]
    assert row.value == 1
