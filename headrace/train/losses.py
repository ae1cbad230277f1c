"""Losses: pure functions from per-token tensors to one loss per token. Yours is one more, named `module:name`.

A loss takes `TokenTensors` and its constants as keywords, and returns the loss of each token and what should be logged
(tensors of the same shape, averaged over tokens). Weighting, corrections and summing are the trainer's work:

    def my_loss(tokens, *, clip=0.2):
        ratio = tokens.ratio()
        return -torch.minimum(ratio * tokens.advantages, ratio.clamp(1 - clip, 1 + clip) * tokens.advantages), {}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from headrace.imports import import_name
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    LossResult: TypeAlias = tuple[Tensor, dict[str, Tensor]]
    Loss: TypeAlias = Callable[..., LossResult]


@dataclass(frozen=True)
class TokenTensors:
    """N trained tokens of whole rollouts."""

    logprobs: Tensor
    """[N] under the weights being trained; the one tensor with a gradient."""
    recorded: Tensor
    """[N] under the distribution the engine drew them from."""
    old: Tensor
    """[N] what ratios are taken against: `recorded`, or with a correction the policy at the start of the step."""
    advantages: Tensor
    """[N] as they came with the batch."""
    sequence: Tensor
    """[N] which rollout of this pass a token belongs to, from 0."""
    columns: dict[str, Tensor]
    """[N] whatever columns every rollout of the batch has."""

    def ratio(self) -> Tensor:
        """π / π_old per token, cut off where it would overflow."""
        return (self.logprobs - self.old).clamp(-20.0, 20.0).exp()


def grpo(tokens: TokenTensors, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossResult:
    """GRPO, PPO clip: −min(r A, clip(r, 1 − clip_low, 1 + clip_high) A)."""
    ratio, advantages = tokens.ratio(), tokens.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = (clipped * advantages < ratio * advantages).detach()
    return loss, {"clipped": is_clipped.float()}


def reinforce(tokens: TokenTensors) -> LossResult:
    """−A log π."""
    return -tokens.advantages * tokens.logprobs, {}


def supervised(tokens: TokenTensors) -> LossResult:
    """−log π of a demonstration; advantages are not looked at."""
    return -tokens.logprobs, {}


LOSSES: dict[str, Loss] = {"grpo": grpo, "reinforce": reinforce, "supervised": supervised}


def call_loss(name: str, tokens: TokenTensors, constants: dict[str, float]) -> LossResult:
    """Call a loss by name and check the form of what it gives: a mean would silently be weighed a second time."""
    result = resolve_loss(name)(tokens, **constants)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"loss {name!r} must return (losses, metrics), not a {type(result).__name__}")
    losses, seen = result
    if losses.shape != tokens.logprobs.shape:
        raise ValueError(
            f"loss {name!r} returned losses of shape {tuple(losses.shape)}; one per token is wanted, "
            f"{tuple(tokens.logprobs.shape)}: summing and averaging are the trainer's work"
        )
    return losses, seen


def resolve_loss(name: str) -> Loss:
    """A loss of ours by name, or a user's by `module:name`."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" in name:
        loss: Loss = import_name(name, setting="train.loss")
        return loss
    raise ConfigError(f"train.loss = {name!r}: must be one of {', '.join(LOSSES)}, or your own as module:name")
