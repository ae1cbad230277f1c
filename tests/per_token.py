"""Tokens of made-up rollouts as tensors, and the same ones as plain numbers for loops over them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.algorithms.tokens import TokenTensors

COUNTS = (5, 0, 1, 9, 7, 12)
"""Trained tokens of each rollout; one has none."""
VERSION = 6


def make_tokens(*, seed: int = 0, spread: float = 0.5, is_base_proximal: bool = False) -> TokenTensors:
    """Ratios on both sides of every clip in use, advantages of both signs and some of 0."""
    random = torch.Generator().manual_seed(seed)
    total = sum(COUNTS)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(total, generator=random, dtype=torch.float64)

    recorded = -normal().abs() - 0.05
    proximal, logprobs = recorded + normal(spread), recorded + normal(spread)
    advantages = torch.where(torch.arange(total) % 7 == 3, 0.0, normal())
    return TokenTensors(
        logprobs=logprobs.clamp_max(-0.01).requires_grad_(),
        recorded=recorded,
        proximal=proximal,
        old=proximal if is_base_proximal else recorded,
        advantages=advantages,
        sequence=torch.tensor([row for row, count in enumerate(COUNTS) for _ in range(count)]),
        num_sequences=len(COUNTS),
        versions=torch.randint(VERSION - 3, VERSION + 1, (total,), generator=random),
        version=VERSION,
        columns={"teacher": recorded + normal(), "values": normal(), "returns": normal()},
        entropy=normal().abs(),
        values=(normal(0.3)).requires_grad_(),
    )


@dataclass
class Token:
    """One token as plain numbers; `log_ratios` and `rollout_advantages` are those of its whole rollout."""

    logprob: float
    recorded: float
    proximal: float
    old: float
    advantage: float
    lag: int
    teacher: float
    log_ratios: list[float]
    rollout_advantages: list[float]

    @property
    def ratio(self) -> float:
        return math.exp(self.logprob - self.old)


def plain(tokens: TokenTensors) -> list[Token]:
    ratios = (tokens.logprobs - tokens.old).tolist()
    of_sequence: dict[int, list[tuple[float, float]]] = {}
    for row, *pair in zip(tokens.sequence.tolist(), ratios, tokens.advantages.tolist(), strict=True):
        of_sequence.setdefault(row, []).append((pair[0], pair[1]))
    return [
        Token(*values, *map(list, zip(*of_sequence[row], strict=True)))
        for *values, row in zip(
            tokens.logprobs.tolist(),
            tokens.recorded.tolist(),
            tokens.proximal.tolist(),
            tokens.old.tolist(),
            tokens.advantages.tolist(),
            (VERSION - tokens.versions).tolist(),
            tokens.columns["teacher"].tolist(),
            tokens.sequence.tolist(),
            strict=True,
        )
    ]


Slope = tuple[float, float]
"""(loss of a token, its derivative by the token's own logprob)."""


def clip(ratio: float, advantage: float, low: float, high: float) -> Slope:
    bounded = min(max(ratio, 1 - low), 1 + high)
    if bounded * advantage < ratio * advantage:
        return -bounded * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def clipped_grpo(token: Token, clip_low: float, clip_high: float) -> Slope:
    return clip(token.ratio, token.advantage, clip_low, clip_high)
