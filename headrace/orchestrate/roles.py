"""Where a role runs: here, in this process. The loops await every call, so that another process needs no other loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from headrace.observe import Timeline
    from headrace.train import Trainer
    from headrace.types import Array, Batch


class TrainerHere:
    """A trainer in this process, its time on its timeline."""

    def __init__(self, trainer: Trainer, timeline: Timeline) -> None:
        self._trainer = trainer
        self._timeline = timeline
        self.num_steps = 0
        """Optimizer steps taken: whoever sees it unchanged knows the weights are."""

    async def forward(self, batch: Batch) -> list[Array]:
        with self._timeline.during("compute"):
            return self._trainer.forward(batch)

    async def step(self, batch: Batch, *, learning_rate: float) -> dict[str, float]:
        """Gradient and optimizer step of one batch."""
        with self._timeline.during("compute"):
            seen = self._trainer.forward_backward(batch)
            self.num_steps += 1
            return seen | self._trainer.optim_step(learning_rate)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._trainer.tensors()

    async def save(self, folder: Path) -> None:
        with self._timeline.during("save"):
            self._trainer.save(folder)

    async def load(self, folder: Path) -> None:
        self._trainer.load(folder)
