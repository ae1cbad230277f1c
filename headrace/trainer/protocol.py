"""The seam every trainer is reached through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace.algorithms import PROXIMAL

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from headrace.records import Array, Batch

Metrics = dict[str, float]


class Trainer(Protocol):
    """Two verbs train (`forward_backward`, `optim_step`); the others look, publish and keep."""

    num_passes: int
    """Forward passes made: a clock that only moves when work does."""

    def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        """[T] float32 per rollout: a column's value on each trained token, 0 elsewhere. `proximal`: logprobs under the current
        weights; `reference`, `teacher`: under those models; `values`: what the value head expects of the state before the
        token. Called before the first optimizer step of a version, for what must be known before the weights move."""

    def forward_backward(self, batch: Batch) -> Metrics:
        """Add the batch's gradient to what is held, and say what was seen on the way."""

    def optim_step(self, learning_rate: float) -> Metrics:
        """One optimizer step with the gradient held, which is then dropped."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """What is published after a version has been trained."""

    def save(self, folder: Path) -> None:
        """Write weights as a Hugging Face folder, with the optimizer beside them."""

    def load(self, folder: Path) -> None:
        """Take weights and optimizer from such a folder."""
