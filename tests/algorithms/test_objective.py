"""Loss, KL, correction and weights put together, and what is said of a step, against loops over tokens."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from per_token import COUNTS, VERSION, clipped_grpo, make_tokens, plain

from headrace.algorithms import CORRECTIONS
from headrace.algorithms.token_objective import Objective, batch_corrections, objective, ratio_base
from headrace.bench.loads import finished
from headrace.records import Batch, FinishReason, Rollout
from headrace.trainer.diagnostics import Diagnostics, is_sampled_by

if TYPE_CHECKING:
    from headrace.algorithms.tokens import TokenTensors

CAPPED = {"cap": 1.5, "floor": 0.6}


def make_batch(**changes) -> Batch:
    return Batch(**{"rollouts": (), "advantages": (), "weights": (), "loss": "grpo", "version": VERSION, **changes})


@pytest.mark.parametrize("correction", ["none", "tis", "sequence_mis", "opsm"])
@pytest.mark.parametrize("kl", ["none", "k2"])
def test_an_objective_is_the_loop(correction: str, kl: str) -> None:
    corrections = {} if correction == "none" else {correction: {"limit": 0.02} if correction == "opsm" else CAPPED}
    batch = make_batch(corrections=corrections, kl=kl, kl_weight=0.0 if kl == "none" else 0.3)
    tokens = make_tokens(spread=0.2, is_base_proximal=correction in ("tis", "sequence_mis"))
    tokens.columns["reference"] = tokens.columns["teacher"]
    weights = torch.linspace(0.1, 1.0, len(tokens.recorded), dtype=torch.float64)
    asked = objective(tokens, weights, batch)
    asked.loss.backward()
    loss, slopes = 0.0, []
    items, rows = plain(tokens), tokens.sequence.tolist()
    for index, (token, row) in enumerate(zip(items, rows, strict=True)):
        mine = [other for other, place in zip(items, rows, strict=True) if place == row]
        log_product = sum((other.logprob if correction == "opsm" else other.proximal) - other.recorded for other in mine)
        weight = {
            "none": 1.0,
            "tis": min(math.exp(token.proximal - token.recorded), 1.5),
            "sequence_mis": math.exp(log_product) if 0.6 <= math.exp(log_product) <= 1.5 else 0.0,
            "opsm": float(not (-log_product / len(mine) > 0.02 and sum(other.advantage for other in mine) < 0)),
        }[correction]
        value, slope = clipped_grpo(token, 0.2, 0.28)
        apart = token.logprob - token.teacher
        beta = 0.0 if kl == "none" else 0.3
        loss += float(weights[index]) * (weight * value + beta * apart**2 / 2)
        slopes.append(float(weights[index]) * (weight * slope + beta * apart))
        assert float(asked.correction[index]) == pytest.approx(weight)
    assert float(asked.loss.detach()) == pytest.approx(loss)
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor(slopes, dtype=torch.float64))
    assert ("reference_kl" in asked.seen) == (kl != "none")


@pytest.mark.parametrize("weighting", ["", "tis", "geometric_mis"])
@pytest.mark.parametrize("base", ["grpo", "decoupled_ppo"])
def test_corrections_multiply(weighting: str, base: str) -> None:
    """Each as its own formula says, token by token: `opsm` by the policy of the step, the others by that of the version."""
    tokens = make_tokens(spread=0.2, is_base_proximal=bool(weighting))
    m2po = torch.arange(len(tokens.recorded)).remainder(4).ne(1).double()
    limits = {"opsm": {"limit": 0.02}, "trust_region": {"limit": 0.05}, "prefix": {}, "m2po": {"limit": 0.04}}
    corrections = {**({weighting: CAPPED} if weighting else {}), **limits}
    asked = objective(
        tokens, torch.ones_like(tokens.recorded), make_batch(corrections=corrections, loss=base), batch_wide={"m2po": m2po}
    )
    items, rows, versions = plain(tokens), tokens.sequence.tolist(), tokens.versions.tolist()
    found = []
    for index, (token, row) in enumerate(zip(items, rows, strict=True)):
        mine = [place for place, other in enumerate(rows) if other == row]
        gone = sum(items[place].recorded - items[place].logprob for place in mine) / len(mine)
        mean = math.exp(sum(items[place].proximal - items[place].recorded for place in mine) / len(mine))
        weight = {
            "": 1.0,
            "tis": min(math.exp(token.proximal - token.recorded), 1.5),
            "geometric_mis": mean if 0.6 <= mean <= 1.5 else 0.0,
        }[weighting]
        keeps = {
            "opsm": not (gone > 0.02 and sum(items[place].advantage for place in mine) < 0),
            "trust_region": (token.proximal - token.recorded) ** 2 <= 0.05,
            "prefix": versions[index] == max(versions[place] for place in mine),
            "m2po": index % 4 != 1,
        }
        for name, is_kept in keeps.items():
            assert float(asked.seen[f"correction_{name}"][index]) == is_kept
        found.append(keeps)
        assert float(asked.correction[index]) == pytest.approx(weight * all(keeps.values()))
    for name in limits:
        assert {True, False} <= {keeps[name] for keeps in found}, f"{name} keeps some tokens, and not all"
    alone = objective(make_tokens(spread=0.2, is_base_proximal=bool(weighting)), asked.correction, make_batch(loss=base))
    assert float(asked.loss.detach()) == pytest.approx(float(alone.loss.detach()))


@pytest.mark.parametrize("correction", ["tis", "sequence_mis", "opsm"])
def test_a_critic_learns_from_every_token_whatever_the_correction(correction: str) -> None:
    """With `opsm` it would otherwise never see what did badly."""
    constants = {"limit": 0.02} if correction == "opsm" else CAPPED
    found = []
    for corrected in ({}, {"corrections": {correction: constants}}):
        tokens = make_tokens(spread=0.2)
        assert tokens.values is not None
        asked = objective(tokens, torch.ones_like(tokens.recorded), make_batch(loss="ppo", **corrected))
        asked.loss.backward()
        found.append((tokens.values.grad, tokens.logprobs.grad))
    assert (asked.correction != 1).any()
    torch.testing.assert_close(found[1][0], found[0][0])
    assert not torch.equal(found[1][1], found[0][1])


def test_a_kl_without_its_reference_is_refused() -> None:
    tokens = make_tokens()
    with pytest.raises(ValueError, match=r"train\.kl.*'reference'"):
        objective(tokens, torch.ones_like(tokens.recorded), make_batch(kl="k3", kl_weight=0.1))


def test_ratios_are_taken_against_what_the_correction_leaves() -> None:
    recorded, proximal = torch.zeros(2), torch.ones(2)
    masks = {"opsm", "m2po", "prefix", "trust_region"}
    for names in ([], masks, *([name] for name in masks)):
        assert ratio_base(names, recorded=recorded, proximal=proximal) is recorded
    for name in set(CORRECTIONS) - masks:
        for names in ([name], ["opsm", name], [name, "prefix"]):
            assert ratio_base(names, recorded=recorded, proximal=proximal) is proximal


# The whole batch at once


def rollout(name: str, logprobs: list[float], *, versions: list[int] | None = None) -> Rollout:
    """Two tokens of prompt, then these."""
    prompt = Rollout.from_prompt([0, 1], id=name)
    if not logprobs:
        return prompt
    token_ids = np.arange(2, 2 + len(logprobs))
    return finished(prompt, token_ids, logprobs=np.array(logprobs), version=versions or VERSION, reason=FinishReason.STOP)


def as_batch(tokens: TokenTensors, **changes) -> tuple[Batch, list[np.ndarray]]:
    """The same tokens as rollouts of a batch, and their proximal logprobs as a trainer gives them."""
    rollouts, advantages, proximal, start = [], [], [], 0
    for row, count in enumerate(COUNTS):
        part = slice(start, start + count)
        rollouts.append(rollout(f"r{row}", tokens.recorded[part].tolist()))
        advantages.append(np.concatenate([np.zeros(2), tokens.advantages[part].numpy()]).astype(np.float32))
        proximal.append(np.concatenate([np.zeros(2), tokens.proximal[part].numpy()]).astype(np.float32))
        start += count
    return make_batch(rollouts=rollouts, advantages=advantages, weights=advantages, **changes), proximal


def test_m2po_judges_every_token_of_the_batch_together() -> None:
    """In halves it would keep others: the only right way to ask is for all at once."""
    tokens = make_tokens(spread=0.3)
    batch, proximal = as_batch(tokens, corrections={"tis": CAPPED, "m2po": {"limit": 0.04}})
    (made,) = batch_corrections(batch, proximal).values()
    assert all(not weights[~r.loss_mask].any() for weights, r in zip(made, batch.rollouts, strict=True))
    order = [4, 2, 0, 5, 3, 1]
    shuffled = dataclasses.replace(
        batch,
        **{name: tuple(getattr(batch, name)[i] for i in order) for name in ("rollouts", "advantages", "weights")},
    )
    again = batch_corrections(shuffled, [proximal[i] for i in order])["m2po"]
    for place, index in enumerate(order):
        np.testing.assert_array_equal(again[place], made[index])
    squares = (tokens.proximal - tokens.recorded).square().numpy()
    kept = np.concatenate([weights[r.loss_mask] for weights, r in zip(made, batch.rollouts, strict=True)]) > 0
    assert 0 < kept.sum() < len(kept) and squares[kept].mean() <= 0.04 < squares.mean()
    assert squares[kept].max() < squares[~kept].min()
    with pytest.raises(AssertionError, match="over the whole batch"):
        objective(tokens, torch.ones_like(tokens.recorded), batch)


# Diagnostics


def in_passes(tokens: TokenTensors, asked: Objective, is_current: torch.Tensor, cuts: list[list[int]]) -> dict[str, float]:
    sums = Diagnostics()
    for rows in cuts:
        chosen = torch.isin(tokens.sequence, torch.tensor(rows))
        picked = {
            name: getattr(tokens, name)[chosen]
            for name in ("logprobs", "recorded", "proximal", "old", "advantages", "sequence", "versions", "entropy")
        }
        part = Objective(
            asked.loss * chosen.sum() / len(chosen),
            asked.correction[chosen],
            {name: values[chosen] for name, values in asked.seen.items()},
        )
        sums.add(part, replace(tokens, **picked, columns={}), is_current=is_current[chosen])
    return sums.metrics()


def test_diagnostics_are_the_loop_and_do_not_depend_on_packing() -> None:
    tokens = make_tokens()
    is_current = torch.isin(tokens.sequence, torch.tensor([0, 4]))
    correction = torch.where(torch.arange(len(is_current)) % 5 == 0, 0.0, 0.7)
    is_masked = (torch.arange(len(is_current)) % 3 == 0).float()
    asked = Objective(torch.tensor(2.5), correction, {"clipped": is_masked, "masked": is_masked})
    ratios = [math.exp(token.logprob - token.recorded) for token in plain(tokens)]
    count, total, squares = len(ratios), sum(ratios), sum(ratio * ratio for ratio in ratios)
    apart = [abs(token.logprob - token.recorded) for token in plain(tokens)]
    current = [value for value, yes in zip(apart, is_current.tolist(), strict=True) if yes]
    expected = {
        "loss": 2.5,
        "tokens": count,
        "ess": total**2 / (count * squares),
        "chi2": squares / count - 1,
        "ratio": total / count,
        "kl": sum(ratio - 1 - math.log(ratio) for ratio in ratios) / count,
        "mismatch": sum(current) / len(current),
        "mismatch_max": max(current),
        "entropy": sum(tokens.entropy.tolist()) / count,
        "correction": sum(correction.tolist()) / count,
        "correction_ess": sum(correction.tolist()) ** 2 / (count * sum(value * value for value in correction.tolist())),
        "clipped": sum(index % 3 == 0 for index in range(count)) / count,
        "masked": sum(index % 5 == 0 or index % 3 == 0 for index in range(count)) / count,
        "version_spread": max(tokens.versions.tolist()) - min(tokens.versions.tolist()),
    }
    for cuts in ([[0, 1, 2, 3, 4, 5]], [[5, 2], [1], [0, 3, 4]]):
        assert in_passes(tokens, asked, is_current, cuts) == pytest.approx(expected)
        stale = in_passes(tokens, asked, torch.zeros_like(is_current), cuts)
        assert stale.keys() == expected.keys() - {"mismatch", "mismatch_max"}, "what was not measured is no agreement"


def test_diagnostics_wait_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding a pass reads nothing back: whatever turns a tensor into a number is not called before `metrics`."""
    read: list[str] = []
    for name in ("__float__", "__int__", "__bool__", "item", "tolist", "cpu", "numpy"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _name=name, _real=real, **k: (read.append(_name), _real(self, *a, **k))[1]
        )
    tokens = make_tokens()
    is_current = torch.ones_like(tokens.recorded, dtype=torch.bool)
    sums = Diagnostics()
    for _ in range(3):
        asked = objective(tokens, torch.ones_like(tokens.recorded), make_batch(loss="gspo"))
        sums.add(asked, tokens, is_current=is_current)
    assert not read
    sums.metrics()
    assert read == ["tolist"]


def test_a_step_without_a_trained_token_has_diagnostics() -> None:
    names = ("loss", "tokens", "ess", "chi2", "version_spread")
    assert Diagnostics().metrics() == dict.fromkeys(names, 0.0)  # those that a version's line is made of


def test_a_rollout_is_of_a_version_only_as_a_whole() -> None:
    assert is_sampled_by(rollout("a", [-1.0, -1.0], versions=[3, 3]), 3).tolist() == [True] * 4
    assert not is_sampled_by(rollout("b", [-1.0, -1.0], versions=[2, 3]), 3).any()
    assert not is_sampled_by(rollout("c", [-1.0, -1.0], versions=[3, 3]), 4).any()
