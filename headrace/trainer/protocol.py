"""The seams of training: `Trainer` computes, `PolicyTrainer` is what the loops await, wherever the trainer runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.algorithms import PROXIMAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable
    from pathlib import Path

    from torch import Tensor

    from headrace.records import Array, Batch, WeightUpdate

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


class Superseded(RuntimeError):
    """A version was to be published again, but the weights have changed since."""


class Published(NamedTuple):
    """Weights that are ready to be loaded by the engines."""

    update: WeightUpdate
    canary: Array
    """The trainer's own logprobs of the canary under these weights."""


class PolicyTrainer(Protocol):
    """One policy's trainer as the loops see it: `LocalTrainer` in this process, `RemoteTrainer` in another."""

    is_inline: bool
    """It computes in the event loop: while it does, nothing else runs."""
    num_steps: int
    """Optimizer steps started; while this does not change, neither do the weights."""

    @property
    def is_lost(self) -> bool:
        """Its process is gone, and the weights with it."""

    @property
    def num_passes(self) -> int:
        """Forward passes made: progress within a step."""

    async def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        """A column under the current weights, as `Trainer.forward` gives it."""

    def step(self, batch: Batch, *, learning_rate: float) -> Awaitable[Metrics]:
        """Gradient and optimizer step of one batch, and its metrics. Steps run in the order of the calls."""

    def publish(self, version: int, *, canary: Batch, whole: bool = False) -> Awaitable[Published]:
        """Make the weights ready for the engines as `version`; no later step changes them before they are copied. `whole`: a
        second attempt, after a failure, that sends everything; raises `Superseded` if the weights have changed since."""

    async def release(self, update: WeightUpdate) -> None:
        """Every engine holds the update."""

    async def abort(self, update: WeightUpdate) -> None:
        """The update was given up."""

    async def abandon(self) -> None:
        """The run is ending and no engine loads updates any more, so that no step waits for one."""

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer to a folder."""

    async def load(self, folder: Path) -> None:
        """Read them back."""
