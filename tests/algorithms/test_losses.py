"""Every loss, value and gradient, against a loop over tokens in plain Python that is told the derivative by hand."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from per_token import COUNTS, VERSION, Slope, Token, clip, clipped_grpo, make_tokens, plain

from headrace.algorithms.losses import KL_ESTIMATORS, LOSSES, call_loss, needed_columns, needs, resolve_loss
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.algorithms import TokenTensors


def reinforce(token: Token) -> Slope:
    return -token.advantage * token.logprob, -token.advantage


def supervised(token: Token) -> Slope:
    return -token.logprob, -1.0


def gspo(token: Token, clip_low: float, clip_high: float) -> Slope:
    return clip(math.exp(sum(token.log_ratios) / len(token.log_ratios)), token.advantage, clip_low, clip_high)


def luspo(token: Token, clip_low: float, clip_high: float) -> Slope:
    return gspo(token, clip_low, clip_high)  # the length it is multiplied by is the mean's, tested with the weights


def gmpo(token: Token, clip_low: float, clip_high: float) -> Slope:
    def bounded(log_ratio: float, advantage: float) -> float:
        return min(log_ratio, clip_high) if advantage > 0 else max(log_ratio, -clip_low)

    ratio = math.exp(sum(map(bounded, token.log_ratios, token.rollout_advantages)) / len(token.log_ratios))
    mine = token.logprob - token.old
    return -token.advantage * ratio, -token.advantage * ratio if bounded(mine, token.advantage) == mine else 0.0


def sapo(token: Token, tau_positive: float, tau_negative: float) -> Slope:
    tau = tau_positive if token.advantage > 0 else tau_negative
    gate = 1 / (1 + math.exp(-tau * (token.ratio - 1)))
    return -4 / tau * gate * token.advantage, -4 * gate * (1 - gate) * token.ratio * token.advantage


def vespo(token: Token, k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float) -> Slope:
    k, decay = (k_negative, lambda_negative) if token.advantage < 0 else (k_positive, lambda_positive)
    product = math.exp(sum(token.log_ratios))
    return weighted(product**k * math.exp(decay * (1 - product)), token)


def kimi(token: Token, tau: float) -> Slope:
    mine, whole = token.logprob - token.old, sum(token.log_ratios)
    return -token.advantage * mine + tau / 2 * whole * mine, -token.advantage + tau * whole


def weighted(weight: float, token: Token) -> Slope:
    return -weight * token.advantage * token.logprob, -weight * token.advantage


def cispo(token: Token, clip_low: float, clip_high: float) -> Slope:
    return weighted(min(max(token.ratio, 1 - clip_low), 1 + clip_high), token)


def topr(token: Token) -> Slope:
    return weighted(1.0 if token.advantage >= 0 else min(math.exp(sum(token.log_ratios)), 1.0), token)


def aipo(token: Token, cap: float) -> Slope:
    return weighted(min(token.ratio, cap), token)


def decoupled(token: Token, proximal: float, clip_low: float, clip_high: float, cap: float) -> Slope:
    weight = math.exp(proximal - token.recorded)
    if weight > cap:
        return 0.0, 0.0
    value, slope = clip(math.exp(token.logprob - proximal), token.advantage, clip_low, clip_high)
    return weight * value, weight * slope


def decoupled_ppo(token: Token, clip_low: float, clip_high: float, cap: float) -> Slope:
    return decoupled(token, token.proximal, clip_low, clip_high, cap)


def a3po(token: Token, clip_low: float, clip_high: float, cap: float) -> Slope:
    made, behaved, base = VERSION + 1, VERSION - token.lag, VERSION
    share = (base - behaved) / (made - behaved)
    proximal = token.recorded + share * (token.logprob - token.recorded)
    return decoupled(token, proximal, clip_low, clip_high, cap)


def dppo(token: Token, mask: float, cap: float, tau: float) -> Slope:
    moved = math.exp(token.logprob) - math.exp(token.old)
    apart = token.logprob - token.old
    value, slope = tau * apart**2, 2 * tau * apart
    if (token.advantage > 0 and moved > mask) or (token.advantage <= 0 and moved < -mask):
        return value, slope
    is_capped = token.ratio > cap
    return value - min(token.ratio, cap) * token.advantage, slope - (0 if is_capped else token.ratio * token.advantage)


def m2po(token: Token) -> Slope:
    return -token.ratio * token.advantage, -token.ratio * token.advantage


def distill(token: Token, cap: float) -> Slope:
    weight, apart = min(token.ratio, cap), token.logprob - token.teacher
    return weight * apart**2 / 2, weight * apart


def call(name: str, tokens: TokenTensors, constants: dict[str, float]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss with all its terms, and what is logged."""
    losses, seen, uncorrected = call_loss(name, tokens, constants)
    return losses if uncorrected is None else losses + uncorrected, seen


def name_of(naive) -> str:
    return naive.__name__.removeprefix("clipped_")


CASES = [
    (clipped_grpo, {"clip_low": 0.2, "clip_high": 0.28}),
    (reinforce, {}),
    (supervised, {}),
    (gspo, {"clip_low": 0.05, "clip_high": 0.1}),
    (luspo, {"clip_low": 0.05, "clip_high": 0.1}),
    (gmpo, {"clip_low": 0.3, "clip_high": 0.2}),
    (sapo, {"tau_positive": 1.0, "tau_negative": 1.05}),
    (vespo, {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}),
    (kimi, {"tau": 0.3}),
    (cispo, {"clip_low": 0.3, "clip_high": 0.4}),
    (topr, {}),
    (aipo, {"cap": 1.3}),
    (decoupled_ppo, {"clip_low": 0.2, "clip_high": 0.25, "cap": 1.5}),
    (a3po, {"clip_low": 0.1, "clip_high": 0.15, "cap": 1.2}),
    (dppo, {"mask": 0.1, "cap": 1.4, "tau": 0.01}),
    (m2po, {}),
    (distill, {"cap": 1.3}),
]


@pytest.mark.parametrize("is_base_proximal", [False, True])
@pytest.mark.parametrize(("naive", "constants"), CASES, ids=lambda case: "" if isinstance(case, dict) else name_of(case))
def test_a_loss_is_the_loop(naive, constants: dict[str, float], is_base_proximal: bool) -> None:
    tokens = make_tokens(is_base_proximal=is_base_proximal)
    losses, _ = call(name_of(naive), tokens, constants)
    losses.sum().backward()
    expected = [naive(token, **constants) for token in plain(tokens)]
    torch.testing.assert_close(losses.detach(), torch.tensor([value for value, _ in expected], dtype=torch.float64))
    slopes = torch.tensor([slope for _, slope in expected], dtype=torch.float64)
    torch.testing.assert_close(tokens.logprobs.grad, slopes)
    assert torch.isfinite(slopes).all() and slopes.abs().sum() > 0


def test_every_loss_is_tested() -> None:
    assert {name_of(naive) for naive, _ in CASES} | {"ppo"} == set(LOSSES)


def test_ppo_is_the_loop_for_policy_and_value() -> None:
    tokens = make_tokens()
    constants = {"clip_low": 0.2, "clip_high": 0.3, "value_clip": 0.25, "value_weight": 0.7}
    losses, seen = call("ppo", tokens, constants)
    losses.sum().backward()
    expected, slopes, value_slopes = [], [], []
    columns = zip(*(t.tolist() for t in (tokens.values, tokens.columns["values"], tokens.columns["returns"])), strict=True)
    for token, (value, old, wanted) in zip(plain(tokens), columns, strict=True):
        loss, slope = clip(token.ratio, token.advantage, 0.2, 0.3)
        near = min(max(value, old - 0.25), old + 0.25)
        worst = max((value - wanted) ** 2, (near - wanted) ** 2)
        is_free = (value - wanted) ** 2 >= (near - wanted) ** 2
        expected.append(loss + 0.7 * worst / 2)
        slopes.append(slope)
        value_slopes.append(0.7 * (value - wanted) if is_free else 0.0)
    assert 0 < sum(slope == 0 for slope in value_slopes) < len(value_slopes), "both sides of the clip"
    torch.testing.assert_close(losses.detach(), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(tokens.logprobs.grad, torch.tensor(slopes, dtype=torch.float64))
    torch.testing.assert_close(tokens.values.grad, torch.tensor(value_slopes, dtype=torch.float64))
    assert seen["value_clipped"].sum() == sum(slope == 0 for slope in value_slopes)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_dual_clip_bounds_what_a_bad_token_that_became_likely_costs(name: str) -> None:
    """Ye et al. 2020, eq. 3: max(min(r A, clip(r) A), c A) where A < 0; elsewhere nothing changes."""
    bounded, free = make_tokens(), make_tokens()
    losses, seen, _ = call_loss(name, bounded, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5})
    plain_losses, *_ = call_loss(name, free, {"clip_low": 0.2, "clip_high": 0.2})
    losses.sum().backward()
    num_bounded = 0
    for index, token in enumerate(plain(bounded)):
        loss, slope = clip(token.ratio, token.advantage, 0.2, 0.2)
        is_bounded = token.advantage < 0 and token.ratio > 1.5
        num_bounded += is_bounded
        if is_bounded:
            loss, slope = -1.5 * token.advantage, 0.0
        else:
            assert losses[index] == plain_losses[index]
        assert (losses[index].item(), bounded.logprobs.grad[index].item()) == pytest.approx((loss, slope))
        assert bool(seen["clipped"][index]) == (slope == 0 and token.advantage != 0)
    assert num_bounded > 1


def test_kimi_is_the_squared_error_of_the_paper() -> None:
    """Kimi k1.5, eq. 3 with the mean reward for τ log Z: ½ (A − τ S)² ÷ τ over each rollout, but for a constant."""
    tokens, tau = make_tokens(), 0.3
    of_rollout = torch.tensor([0.5, 0.0, -1.0, 2.0, -0.3, 1.0], dtype=torch.float64)
    tokens = replace(tokens, advantages=of_rollout[tokens.sequence])
    losses, _ = call("kimi", tokens, {"tau": tau})
    losses.sum().backward()
    leaf = tokens.logprobs.detach().clone().requires_grad_()
    whole = torch.zeros(len(COUNTS), dtype=torch.float64).index_add(0, tokens.sequence, leaf - tokens.old)
    total = ((of_rollout - tau * whole).square() / (2 * tau)).sum()
    total.backward()
    torch.testing.assert_close(tokens.logprobs.grad, leaf.grad)
    torch.testing.assert_close(losses.sum().detach(), total.detach() - (of_rollout.square() / (2 * tau)).sum())


@pytest.mark.parametrize(
    ("name", "constants", "is_beyond"),
    [
        ("grpo", {}, lambda t: (t.advantage > 0 and t.ratio > 1.28) or (t.advantage < 0 and t.ratio < 0.8)),
        ("cispo", {"clip_low": 0.2, "clip_high": 0.2}, lambda t: not 0.8 <= t.ratio <= 1.2),
        ("topr", {}, lambda t: t.advantage < 0 and sum(t.log_ratios) > 0),
        ("aipo", {"cap": 1.5}, lambda t: t.ratio > 1.5),
        ("gmpo", {}, lambda t: t.ratio > math.exp(0.4) if t.advantage > 0 else t.ratio < math.exp(-0.4)),
    ],
)
def test_the_clipped_share_counts_tokens_past_the_clip(name: str, constants: dict[str, float], is_beyond) -> None:
    tokens = make_tokens()
    _, seen = call(name, tokens, constants)
    assert seen["clipped"].tolist() == [float(is_beyond(token)) for token in plain(tokens)]
    assert 0 < seen["clipped"].sum() < len(seen["clipped"])


def test_tokens_that_decoupled_ppo_drops_are_counted_as_masked() -> None:
    tokens = make_tokens()
    _, seen = call("decoupled_ppo", tokens, {"cap": 1.5})
    assert seen["masked"].tolist() == [float(math.exp(t.proximal - t.recorded) > 1.5) for t in plain(tokens)]
    assert not (seen["masked"] * seen["proximal_weight"]).any() and seen["masked"].any()


def test_on_policy_every_policy_loss_has_the_policy_gradient() -> None:
    """Where nothing has moved, clips and weights do nothing: −A ∇log π, but for those that have no advantage."""
    start = make_tokens()
    at = start.recorded.clone()
    for name in set(LOSSES) - {"supervised", "distill"}:
        leaf = at.clone().requires_grad_()
        losses, _ = call(name, replace(start, logprobs=leaf, proximal=at, old=at), {})
        losses.sum().backward()
        torch.testing.assert_close(leaf.grad, -start.advantages, msg=name)


def test_gspo_has_the_gradient_of_the_sequence_ratio() -> None:
    """With one advantage and weight a rollout, sg(s) π/sg(π) sums to what differentiating s itself gives."""
    tokens = make_tokens(spread=0.1)
    of_rollout = torch.arange(tokens.num_sequences, dtype=torch.float64).sub(2)[tokens.sequence]
    tokens = replace(tokens, advantages=of_rollout)
    call("gspo", tokens, {"clip_low": 10.0, "clip_high": 10.0})[0].sum().backward()
    leaf = tokens.logprobs.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row, count in enumerate(COUNTS):
        mine = tokens.sequence == row
        if count:
            total = total - count * (leaf[mine] - tokens.old[mine]).mean().exp() * of_rollout[mine][0]
    total.backward()
    torch.testing.assert_close(tokens.logprobs.grad, leaf.grad)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_is_finite_however_far_apart_the_policies_are(name: str) -> None:
    start = make_tokens()
    far = torch.where(torch.arange(len(start.recorded)) % 2 == 0, -200.0, -0.01).double()
    leaf = far.flip(0).clone().requires_grad_()
    losses, _ = call(name, replace(start, logprobs=leaf, recorded=far, proximal=far, old=far), {})
    losses.sum().backward()
    assert torch.isfinite(losses).all() and torch.isfinite(leaf.grad).all()


# KL


def test_kl_estimators_are_the_loop() -> None:
    tokens = make_tokens()
    reference = tokens.columns["teacher"]
    naive = {
        "k1": lambda d: (d, d),
        "k2": lambda d: (d * d / 2, d),
        "k3": lambda d: (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
    }
    assert naive.keys() == KL_ESTIMATORS.keys()
    for name, estimate in KL_ESTIMATORS.items():
        leaf = tokens.logprobs.detach().clone().requires_grad_()
        apart = estimate(leaf, reference)
        apart.sum().backward()
        expected = [naive[name](d) for d in (leaf.detach() - reference).tolist()]
        torch.testing.assert_close(apart.detach(), torch.tensor([value for value, _ in expected], dtype=torch.float64))
        torch.testing.assert_close(leaf.grad, torch.tensor([slope for _, slope in expected], dtype=torch.float64))


@pytest.mark.parametrize("name", ["k1", "k2"])
def test_kl_estimators_have_the_gradient_of_the_kl(name: str) -> None:
    """Over all outcomes of a small distribution, weighed by π itself, the gradient is that of Σ π log(π/π_ref)."""
    logits, other = torch.tensor([0.3, -1.0, 0.8, 0.1]).double(), torch.tensor([-0.5, 0.2, 0.4, 0.0]).double().log_softmax(0)
    exact = logits.clone().requires_grad_()
    policy = exact.log_softmax(0)
    (policy.exp() * (policy - other)).sum().backward()
    estimated = logits.clone().requires_grad_()
    policy = estimated.log_softmax(0)
    (policy.exp().detach() * KL_ESTIMATORS[name](policy, other)).sum().backward()
    torch.testing.assert_close(estimated.grad, exact.grad)


# Names and columns


def test_what_a_loss_needs_is_read_in_one_place(tmp_path) -> None:
    assert needed_columns("grpo") == () and needed_columns("distill") == ("teacher",)
    assert needed_columns("ppo") == ("values", "returns") and needed_columns("decoupled_ppo") == ("proximal",)
    assert needed_columns("grpo", "tis", "k3") == ("proximal", "reference")
    assert needed_columns("decoupled_ppo", "m2po", "k1") == ("proximal", "reference")
    file = tmp_path / "mine.py"
    file.write_text(
        "def plain(tokens):\n    return -tokens.logprobs, {}\n"
        "def marked(tokens):\n    return tokens.columns['difficulty'] * tokens.logprobs, {}\n"
        "marked.needs = ('difficulty',)\n"
        "def wrong(tokens):\n    return -tokens.logprobs, {}\n"
        "wrong.needs = 'difficulty'\n"
    )
    assert needed_columns(f"{file}:plain") == () and needed_columns(f"{file}:marked", kl="k2") == ("difficulty", "reference")
    with pytest.raises(ConfigError, match="tuple of column names, not 'difficulty'"):
        needed_columns(f"{file}:wrong")
    with pytest.raises(ValueError, match=r"marked' needs the column 'difficulty'.*environment"):
        call_loss(f"{file}:marked", make_tokens(), {})
    tokens = make_tokens()
    tokens.columns["difficulty"] = torch.full_like(tokens.recorded, 2.0)
    losses, _ = call(f"{file}:marked", tokens, {})
    torch.testing.assert_close(losses, 2 * tokens.logprobs)


def test_a_missing_column_is_named_with_what_brings_it() -> None:
    tokens = replace(make_tokens(), columns={})
    for name, pattern in [("distill", r"'teacher'.*train\.teacher"), ("ppo", "'values'.*value head")]:
        with pytest.raises(ValueError, match=pattern):
            call_loss(name, tokens, {})
    values = {"values": tokens.recorded}
    with pytest.raises(ValueError, match=r"'returns'.*train\.advantage = 'gae'"):
        call_loss("ppo", replace(tokens, columns=values), {})
    with pytest.raises(ValueError, match="no value head"):
        call_loss("ppo", replace(make_tokens(), values=None), {})


def test_what_a_loss_gives_must_be_one_value_a_token(tmp_path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(
        "def mean(tokens):\n    return -tokens.logprobs.mean(), {}\ndef bare(tokens):\n    return -tokens.logprobs\n"
        "def third(tokens):\n    return -tokens.logprobs, {}, tokens.logprobs.mean()\n"
    )
    for name in ("mean", "third"):
        with pytest.raises(ValueError, match="one per token is wanted"):
            call_loss(f"{file}:{name}", make_tokens(), {})
    with pytest.raises(ValueError, match=r"must return \(losses, metrics\)"):
        call_loss(f"{file}:bare", make_tokens(), {})
    with pytest.raises(ConfigError, match=r"must be one of grpo, ppo, .*supervised, or your own"):
        resolve_loss("gropo")


def test_the_mark_is_left_on_the_function_itself() -> None:
    def mine(tokens: TokenTensors) -> None: ...

    assert needs("a", "b")(mine) is mine and mine.needs == ("a", "b")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_says_its_formula_and_the_page_of_losses_has_it(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    assert f"`{name}`" in page and inspect.getdoc(LOSSES[name])
    for constant, parameter in inspect.signature(LOSSES[name]).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert f"{constant} {parameter.default:g}" in page, (name, constant)
