"""When the units of a sharded model are gathered, freed and reduced.

Units run in the order outer (embedding, last norm), decoder layers, head. While one computes, the next is gathered; a layer is
freed after it, and gathered again for its backward pass, from the last layer down. When the backward pass reaches a layer, the
one above it has all its gradients: they are added up over ranks while this one computes. Outer stays for the whole pass.

Every rank must start the same collectives in the same order. So all have equally many passes, and a rank without rollouts for
one computes an empty pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from headrace.model import ShardedArena, leave_meta, probe, put_before
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from headrace.trainer.ranks import Ranks

_OUTER = 0


class Sharding:
    """Of one model over the ranks of a replica; a context for one pass."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        """The model may be on the host; its parts, and buffers, move to the ranks' devices. If its weights are still in their
        files, the arena is left to be filled."""
        self._ranks = ranks
        leave_meta(model)
        base: Any = model.base_model
        layers = list(getattr(base, "layers", ()))
        if not layers:
            kind = model.config.model_type
            raise ConfigError(f"train.parallel.shard = {ranks.shard}: a model of type {kind!r} has no list of decoder layers")
        units = [_tensors(layer) for layer in layers]
        within = set().union(*units)
        head = {each for each in _tensors(model.get_output_embeddings()) if each not in _tensors(base)}
        outer = _tensors(model) - within - head
        self._head = len(layers) + 1
        self.arena = ShardedArena.split(
            model, [outer, *units, head], rank=ranks.shard_rank, count=ranks.shard, device=ranks.device
        )
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != ranks.device:  # not saved, so not in a unit
                    module._buffers[name] = buffer.to(ranks.device)
        for place, layer in enumerate(layers, start=1):
            put_before(layer, _ShardedLayer)
            layer.__dict__["headrace_unit"] = self, place  # not in a method: compiled code would guard it
        self._started: dict[int, list[Any]] = {}  # units being gathered
        self._whole: set[int] = set()
        self._visited: list[int] = []  # layers of this pass that have a backward pass
        self._open: int | None = None  # the unit whose backward pass is running
        self._reducing: list[tuple[Any, Any, Tensor]] = []

    def probe(self, model: PreTrainedModel, *, exact: bool) -> None:
        """Check a model whose weights have been read in parts; all ranks at once."""
        hook = model.get_output_embeddings().register_forward_pre_hook(lambda *_: self.use_head())
        with self:
            probe(model, name=str(model.name_or_path), exact=exact)
        hook.remove()

    def __enter__(self) -> None:
        self._start(_OUTER)
        self._use(_OUTER, then=1)

    def __exit__(self, *_: object) -> None:
        for place in [*self._whole, *self._started]:
            self._free(place)
        self._visited.clear()
        self._open = None

    def use_head(self) -> None:
        """Called when the layers are done: from here to the backward pass of the last layer, the head is whole."""
        self._use(self._head)
        self._open = self._head
        if torch.is_grad_enabled():
            for place in (_OUTER, self._head):
                self.arena.open_gradient(place)

    def end_backward(self) -> None:
        """Called after the backward pass."""
        self._finish(then=_OUTER)
        self._finish(then=None)
        self._settle()

    def begin_forward(self, place: int) -> None:
        self._use(place, then=place + 1)

    def end_forward(self, place: int, output: Any) -> Any:  # noqa: ANN401  (a tensor, or a tuple that begins with it)
        hidden = output[0] if isinstance(output, tuple) else output
        has_backward = torch.is_grad_enabled() and hidden.requires_grad
        if has_backward:
            self._visited.append(place)
            hidden = _Leave.apply(hidden, self, place)  # type: ignore[no-untyped-call]
        if not has_backward or place != self._head - 1:  # the last layer is the first in the backward pass
            self._free(place)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def begin_backward(self, place: int) -> None:
        assert self._visited[-1] == place, "layers run backward in the opposite order"
        self._visited.pop()
        self._finish(then=place)
        self._use(place, then=self._visited[-1] if self._visited else None)
        self.arena.open_gradient(place)

    def _start(self, place: int) -> None:
        if place not in self._started and place not in self._whole:
            self._started[place] = self.arena.gather(place, self._ranks.shards._allgather_base)

    def _use(self, place: int, *, then: int | None = None) -> None:
        """Wait until a unit is whole, and start to gather the next."""
        self._start(place)
        for work in self._started.pop(place, ()):
            self._ranks.wait(work, "gathering weights")
        self._whole.add(place)
        if then is not None:
            self._start(then)

    def _free(self, place: int) -> None:
        for work in self._started.pop(place, ()):  # only after an error
            self._ranks.wait(work, "gathering weights")
        self.arena.free(place)
        self._whole.discard(place)

    def _finish(self, *, then: int | None) -> None:
        """Start to add up the gradients of the unit whose backward pass has ended, after taking in those of the one before."""
        done, self._open = self._open, then
        if done is None:
            return
        self._settle()
        self._reducing = self.arena.reduce(done, self._ranks.shards._reduce_scatter_base)
        if done != _OUTER:
            self._free(done)

    def _settle(self) -> None:
        for work, group, received in self._reducing:
            self._ranks.wait(work, "adding up gradients")
            self.arena.settle(group, received)
        self._reducing = []


def place(model: PreTrainedModel, ranks: Ranks | None) -> Sharding | None:
    """Move a model to the device of one of several ranks: whole, or the rank's part of it."""
    if ranks is not None and ranks.shard > 1:
        return Sharding(model, ranks)
    if ranks is not None:
        cast("nn.Module", model).to(ranks.device)  # transformers wraps `to` and loses its types
    return None


class _ShardedLayer:
    """A decoder layer whose weights are gathered around its call; outside of what is compiled or recomputed."""

    headrace_unit: tuple[Sharding, int]

    def __call__(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        sharding, place = self.headrace_unit
        sharding.begin_forward(place)
        return sharding.end_forward(place, super().__call__(*given, **named))  # type: ignore[misc]


class _Leave(torch.autograd.Function):
    """Nothing, at the output of a layer: its backward pass begins that of the layer."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, sharding: Sharding, place: int) -> Tensor:  # noqa: ANN401
        ctx.unit = sharding, place
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        sharding, place = ctx.unit
        sharding.begin_backward(place)
        return gradient, None, None


def _tensors(module: nn.Module) -> set[int]:
    """Ids of the parameters and saved buffers of a module."""
    return {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
