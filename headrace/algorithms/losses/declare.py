"""What a loss says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    LossResult: TypeAlias = tuple[Tensor, dict[str, Tensor]]
    TwoTerms: TypeAlias = tuple[Tensor, dict[str, Tensor], Tensor]
    Loss: TypeAlias = Callable[..., LossResult | TwoTerms]

AnyLoss = TypeVar("AnyLoss", bound="Callable[..., Any]")


def needs(*columns: str) -> Callable[[AnyLoss], AnyLoss]:
    """Say which columns a loss looks at. The trainer computes `proximal`, `reference`, `teacher` and `values` where a rollout
    lacks them; a loss that needs `values` gets a value head. Others must come with the rollouts."""

    def mark(loss: AnyLoss) -> AnyLoss:
        loss.needs = columns  # type: ignore[attr-defined]  # a function carries any attribute
        return loss

    return mark
