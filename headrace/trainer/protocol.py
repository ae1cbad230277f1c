"""The protocols of training: `Trainer` computes; the loops await a `PolicyTrainer`, wherever the trainer runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.algorithms import PROXIMAL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

    from torch import Tensor

    from headrace.durable import Fingerprints
    from headrace.model import ShardedWeights
    from headrace.records import Array, Batch, WeightUpdate

Metrics = dict[str, float]


class Trainer(Protocol):
    """Two methods train (`forward_backward`, `optim_step`); the others score, publish and checkpoint."""

    num_passes: int  # forward passes so far: shows that work progresses

    def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]:
        """[T] float32 per rollout: a column's value on each trained token, 0 elsewhere. `proximal`: logprobs under the current
        weights; `entropy`: of their distribution; `reference`, `teacher`: logprobs under those models; `values`: the value
        head's estimate before the token. Called before the first optimizer step of a version, for columns that must not see its
        updates."""

    def forward_backward(self, batch: Batch) -> Metrics:
        """Accumulate the batch's gradient; return metrics of its passes, and of those of the step's parts before it."""

    def optim_step(self, learning_rate: float) -> Metrics:
        """Take one optimizer step with the accumulated gradient, times the last batch's `gradient_scale`; then zero it."""

    def mix_reference(self, share: float) -> None:
        """Set the reference's weights to share · current + (1 − share) · reference. Called after an optimizer step whose batch
        asks for it."""

    def tensors(self) -> Iterable[tuple[str, Tensor]] | ShardedWeights:
        """Return the weights to publish after a version has been trained; of several ranks, each returns its part."""

    def save(self, folder: Path, *, on_read: Callable[[], None] = lambda: None) -> Fingerprints:
        """Write the weights as a Hugging Face folder, with the optimizer state in it, and return the size and checksum of each
        file. Copies them to the host first, then calls `on_read`: from then on the weights may change."""

    def load(self, folder: Path) -> None:
        """Read weights and optimizer state from such a folder."""


class Superseded(RuntimeError):
    """A version cannot be published again, because the weights have changed since."""


class Published(NamedTuple):
    """Weights that engines can load, with the trainer's own logprobs of the canary under them."""

    update: WeightUpdate
    canary: Array


class PolicyTrainer(Protocol):
    """One policy's trainer as the loops see it: `LocalTrainer` in this process, or `RemoteTrainer` for another process.
    `forward` and `load` are those of `Trainer`."""

    is_inline: bool  # it computes in the event loop, and blocks it meanwhile
    num_steps: int  # optimizer steps started; the weights change only when this does

    @property
    def is_lost(self) -> bool:
        """A process of it is gone, and weights with it, or waits for one that failed."""

    @property
    def num_passes(self) -> int:
        """Forward passes so far: shows progress within a step."""

    async def forward(self, batch: Batch, *, column: str = PROXIMAL) -> list[Array]: ...

    def step(self, batch: Batch, *, learning_rate: float) -> Awaitable[Metrics]:
        """Train one batch: its gradient, and the optimizer step if it is its step's last part. They run in the order of the
        calls."""

    def publish(self, version: int, *, canary: Batch, whole: bool = False) -> Awaitable[Published]:
        """Make the weights ready for the engines as `version`; later steps wait until they are copied. `whole`: a retry after a
        failure, without a delta; raises `Superseded` if the weights have changed since."""

    async def release(self, update: WeightUpdate) -> None:
        """Called when every engine holds the update."""

    async def abort(self, update: WeightUpdate) -> None:
        """Called when the update was given up."""

    async def abandon(self) -> None:
        """Called when the run ends: engines load no more updates, so no step may wait for one."""

    def save(self, folder: Path) -> Awaitable[Fingerprints]:
        """Save the weights as they are after the steps sent so far; later steps wait until they are copied, not until they are
        written."""

    async def load(self, folder: Path) -> None: ...
