"""The fused head against whole logits: torch's own, and Triton's kernels (interpreted where there is no GPU)."""

from __future__ import annotations

import pytest
import torch

from headrace.model import fused_head
from headrace.model.fused_head import AllowedTokens, AllTokens, FewTokens, Logprobs, Scaling, Slopes, Targets

ROWS, VOCABULARY, WIDTH = 37, 83, 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALINGS = {
    "plain": Scaling(),
    "softcap": Scaling(softcap=3.0),
    "all": Scaling(divisor=2.0, factor=1.7, softcap=2.5),
}


def numbers(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept_tokens(targets: torch.Tensor, *, most: int = 9, with_free: bool = False) -> AllowedTokens:
    """Some tokens of each row, its target among them; `with_free`: every fifth row is not cut, and every third lists what it
    may not be."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for row, target in enumerate(targets.tolist()):
        others = torch.randperm(VOCABULARY, generator=generator)[: row % most].tolist()
        listed = sorted({target, *others}) if row % 3 or not with_free else [~token for token in others if token != target]
        rows.append([] if with_free and row % 5 == 0 else listed)
    counts = torch.tensor([0, *(len(row) for row in rows)])
    return AllowedTokens(offsets=counts.cumsum(0), ids=torch.tensor([token for row in rows for token in row]))


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: Targets
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.t() + bias
    scaling = targets.scaling
    if scaling.divisor is not None:
        logits = logits / scaling.divisor
    if scaling.factor is not None:
        logits = logits * scaling.factor
    if scaling.softcap is not None:
        logits = scaling.softcap * torch.tanh(logits / scaling.softcap)
    logits = logits / targets.temperatures.unsqueeze(1)
    if targets.allowed is not None:
        for row in range(len(logits)):
            kept = targets.allowed.ids[targets.allowed.offsets[row] : targets.allowed.offsets[row + 1]]
            if len(kept):
                is_allowed = bool(kept[0] >= 0)
                out = torch.full((VOCABULARY,), is_allowed)
                out[kept if is_allowed else ~kept] = not is_allowed
                logits = logits.index_put((torch.tensor(row), out), torch.tensor(float("-inf"), dtype=logits.dtype))
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -(logprobs.exp() * logprobs.clamp_min(-1e30)).sum(dim=1)
    return logprobs.gather(1, targets.ids.unsqueeze(1)).squeeze(1), entropy


def compare(kind: type, targets: Targets, *, tolerance: float = 1e-5, entropy_weight: float = 0.0) -> None:
    inputs = [numbers(ROWS, WIDTH, seed=0), numbers(VOCABULARY, WIDTH, seed=1, scale=0.7), numbers(VOCABULARY, seed=2)]
    weighing = numbers(ROWS, seed=3)
    found = []
    for dtype in (torch.float64, torch.float32):
        given = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        logprobs, entropy = naive(*given, targets) if dtype == torch.float64 else Logprobs.apply(*given, targets, kind)
        loss = (logprobs * weighing.to(dtype)).sum()
        if entropy_weight:
            loss = loss - entropy_weight * (entropy * weighing.to(dtype).flip(0)).sum()
        loss.backward()
        found.append([logprobs.detach(), entropy.detach(), *(tensor.grad for tensor in given)])
    for expected, ours in zip(*found, strict=True):
        assert expected is not None and ours is not None
        torch.testing.assert_close(ours.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last of them not whole."""
    monkeypatch.setattr(fused_head, "_CHUNK_ELEMENTS", {"cpu": 16 * VOCABULARY, "cuda": 16 * VOCABULARY})
    monkeypatch.setattr(fused_head, "_GATHERED_ELEMENTS", {"cpu": 30 * WIDTH, "cuda": 30 * WIDTH})


def make_targets(scaling: Scaling, *, mask: str = "none") -> Targets:
    targets = torch.arange(ROWS) * 7 % VOCABULARY
    temperatures = 0.5 + (torch.arange(ROWS) % 4) / 3
    allowed = None if mask == "none" else kept_tokens(targets, with_free=mask == "some")
    return Targets(targets, temperatures, allowed, scaling)


def on_device(targets: Targets) -> Targets:
    ids, temperatures, allowed = targets.ids.to(DEVICE), targets.temperatures.to(DEVICE), targets.allowed
    if allowed is not None:
        allowed = AllowedTokens(allowed.offsets.to(DEVICE), allowed.ids.to(DEVICE))
    return Targets(ids, temperatures, allowed, targets.scaling)


@pytest.mark.parametrize("mask", ["none", "all", "some"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_logprobs_entropy_and_gradients_are_those_of_whole_logits(scaling: str, mask: str) -> None:
    targets = make_targets(SCALINGS[scaling], mask=mask)
    assert len(AllTokens.spans(torch.zeros(VOCABULARY, WIDTH), targets)) == 3
    compare(AllTokens, targets)
    compare(AllTokens, targets, entropy_weight=1.5)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_with_a_mask_the_kept_columns_are_enough(scaling: str) -> None:
    compare(FewTokens, make_targets(SCALINGS[scaling], mask="all"))
    compare(FewTokens, make_targets(SCALINGS[scaling], mask="all"), entropy_weight=1.5)


def test_an_entropy_alone_has_its_gradient() -> None:
    """As a loss of a user's may use it: no derivative by logprobs reaches the head."""
    targets, (hidden, weight) = make_targets(Scaling()), [numbers(ROWS, WIDTH, seed=0), numbers(VOCABULARY, WIDTH, seed=1)]
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    Logprobs.apply(ours, weight, None, targets, AllTokens)[1].sum().backward()
    naive(theirs, weight, torch.zeros(VOCABULARY), targets)[1].sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("mask", "entropy_weight"), [("none", 0.0), ("some", 1.5)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_kernels_agree_with_torch(scaling: str, mask: str, entropy_weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("headrace.model.kernels.head")
    monkeypatch.setattr(kernels, "_BLOCK", 32)
    targets = make_targets(SCALINGS[scaling], mask=mask)
    logits, gradients = numbers(ROWS, VOCABULARY, seed=6, scale=3.0), numbers(ROWS, seed=7)
    dense, there = targets.mask(VOCABULARY), on_device(targets)
    logprobs, entropy, totals = kernels.forward_rows(logits.to(DEVICE), there)
    by_entropies = -entropy_weight * gradients.flip(0).to(DEVICE)
    asked = Slopes.of(gradients.to(DEVICE), by_entropies if entropy_weight else None, entropy)
    slopes = kernels.backward_rows(logits.to(DEVICE), there, totals, asked, dtype=torch.float32)

    given = logits.clone().requires_grad_()
    scaled = targets.scaling.apply(given) / targets.temperatures.unsqueeze(1)
    scaled = scaled if dense is None else scaled.masked_fill(~dense, float("-inf"))
    expected = torch.log_softmax(scaled, dim=1).gather(1, targets.ids.unsqueeze(1)).squeeze(1)
    chances = torch.softmax(scaled, dim=1)
    uncertain = -torch.special.xlogy(chances, chances.clamp_min(1e-30)).sum(dim=1)
    (expected * gradients - entropy_weight * uncertain * gradients.flip(0)).sum().backward()
    torch.testing.assert_close(logprobs.cpu(), expected.detach(), atol=1e-5, rtol=1e-5)
    shares = torch.softmax(scaled.detach(), dim=1)
    torch.testing.assert_close(entropy.cpu(), -torch.xlogy(shares, shares).sum(dim=1), atol=1e-5, rtol=1e-5)
    tolerance = 5e-5 if entropy_weight else 1e-5  # −p (log p + H) cancels
    torch.testing.assert_close(slopes.cpu(), given.grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_judged_pass_has_the_gradient_of_two(scaling: str, is_gathered: bool) -> None:
    """A loss that squares the mean of a whole sequence: its derivative is only right if no sequence is parted. Entropies have
    a part in it too."""
    targets, counts = make_targets(SCALINGS[scaling]), [5, 11, 3, 9, 1, 8]
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))

    def loss(logprobs: torch.Tensor, entropies: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(len(counts), dtype=logprobs.dtype).index_add(0, rows, logprobs)
        return (sums / torch.tensor(counts)).square().sum() - 0.3 * entropies.square().sum()

    def judge(start: int, stop: int, *read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in read]
            return torch.autograd.grad(loss(*leaves, owner[start:stop]), leaves)

    inputs = [numbers(ROWS, WIDTH, seed=0), numbers(VOCABULARY, WIDTH, seed=1), numbers(VOCABULARY, seed=2)]
    two, one = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    loss(*Logprobs.apply(*two, targets, AllTokens), owner).backward()
    gathered = torch.ones(VOCABULARY, WIDTH) if is_gathered else None
    spans = [slice(0, 16), slice(16, 29), slice(29, 37)]
    fused_head.LogprobsWithLoss.apply(*one, targets, spans, judge, gathered).backward()
    if is_gathered:
        assert one[1].grad is None
        one[1].grad = gathered - 1
    for ours, expected in zip(one, two, strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, atol=1e-5, rtol=1e-5)


def test_chunks_hold_whole_sequences() -> None:
    assert list(fused_head.grouped([5, 11, 3, 9, 1, 8], 16)) == [slice(0, 2), slice(2, 5), slice(5, 6)]
    assert list(fused_head.grouped([3, 17, 1], 16)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(fused_head.grouped([16, 16], 16)) == [slice(0, 1), slice(1, 2)]
    assert list(fused_head.grouped([], 16)) == list(fused_head.grouped([0, 0], 16)) == []


def test_a_target_that_could_not_be_drawn_has_no_probability() -> None:
    targets = make_targets(Scaling(), mask="all")
    off = Targets((targets.ids + 40) % VOCABULARY, targets.temperatures, targets.allowed, targets.scaling)
    hidden, weight = numbers(ROWS, WIDTH, seed=0), numbers(VOCABULARY, WIDTH, seed=1)
    for kind in (AllTokens, FewTokens):
        logprobs, _ = Logprobs.apply(hidden, weight, None, off, kind)
        assert torch.isinf(logprobs).any()


def test_few_is_judged_over_all_rows() -> None:
    targets = torch.arange(ROWS)
    assert kept_tokens(targets, most=2).is_few(VOCABULARY)
    assert not kept_tokens(targets, most=2, with_free=True).is_few(VOCABULARY)
    assert not kept_tokens(targets, most=40).is_few(VOCABULARY)


def test_a_soft_cap_keeps_the_digits_of_small_logits() -> None:
    """A logit far below the cap is nearly itself: it must not lose digits to the cap."""
    kernels = pytest.importorskip("headrace.model.kernels.head")
    logits = torch.linspace(-6.0, 6.0, VOCABULARY).mul(0.01).repeat(2, 1)
    logits[1] *= 300
    targets, ones = torch.tensor([3, 40]), torch.ones(2)
    ours, _, _ = kernels.forward_rows(logits.to(DEVICE), on_device(Targets(targets, ones, None, Scaling(softcap=30.0))))
    exact = 30.0 * torch.tanh(logits.double() / 30.0)
    expected = torch.log_softmax(exact, dim=1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(ours.cpu().double(), expected, atol=1e-6, rtol=0)
