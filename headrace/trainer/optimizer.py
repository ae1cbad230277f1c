"""The optimizer over whole arenas: one update per run of tensors that are treated alike (`update_rules`), float32 masters for
narrower weights. Each arena has its own learning rate, and its gradient is clipped on its own.

Gradients are accumulated in float32 whatever the weights' dtype, so a step does not depend on the number of passes. Nothing
here waits for the GPU: the update itself reads the clipping norm, and whether the gradient is finite, on the device.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from headrace.settings import ConfigError
from headrace.trainer.update_rules import RULES, AdamW, Muon

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor, nn

    from headrace.model import Arena
    from headrace.trainer.loss_scale import LossScale
    from headrace.trainer.parameter_groups import ParameterSettings
    from headrace.trainer.ranks import Ranks
    from headrace.trainer.settings import TrainSettings
    from headrace.trainer.update_rules import Segment

_MATRIX = 2
_LOSS_SCALE = "loss_scale"


class FlatOptimizer:
    def __init__(
        self,
        trained: Sequence[tuple[Arena, Mapping[str, nn.Parameter]]],
        settings: TrainSettings,
        *,
        offload: bool = False,
        groups: Mapping[str, ParameterSettings] | None = None,
        outer: Collection[str] = (),
        loss_scale: LossScale | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`groups`: settings of single parameters. `outer`: embeddings and heads, which Muon leaves to AdamW. `loss_scale`:
        what gradients have been multiplied by. `ranks`: the trainer's, if there are several: a sharded arena is a part of
        what is updated, any other is updated alike on all."""
        self._ranks = ranks
        self._sharded = [list(arena.gradients.values()) for arena, _ in trained]  # gradients of this rank's parts
        self._settings, self._is_offloaded = settings, offload
        self._groups, self._outer = groups or {}, outer
        self.loss_scale = loss_scale
        self.homes: dict[str, Segment] = {}  # by parameter name
        self._collected: dict[int, Tensor] = {}  # where autograd adds up each gradient, by id of the parameter
        self._arenas = [self._segments(arena, parameters) for arena, parameters in trained]
        if not all(self._arenas):
            raise ConfigError("every parameter of the model is frozen: there is nothing to train")
        self.num_steps = torch.zeros((), device=self._arenas[0][0].gradient.device)

    def _segments(self, arena: Arena, parameters: Mapping[str, nn.Parameter]) -> list[Segment]:
        """Runs of trained tensors of one dtype with only padding between them, all updated alike."""
        order = sorted(arena.slots, key=lambda name: (str(arena.slots[name].dtype), arena.slots[name].start))
        found = []

        def kind(name: str) -> tuple[torch.dtype, tuple[type[Segment], float, float]] | None:
            is_trained = name in parameters
            return (arena.slots[name].dtype, self._treatment(name, parameters[name].shape)) if is_trained else None

        for alike, names in itertools.groupby(order, key=kind):
            if alike is None:
                continue
            _, (rule, rate, decay) = alike
            slots = {name: arena.slots[name] for name in names}
            segment = rule(arena, slots, self._settings, decay=decay, rate=rate, offload=self._is_offloaded)
            found.append(segment)
            for name in slots:
                self.homes[name] = segment
                whole, parameter = arena.whole_gradient(name), parameters[name]
                self._collected[id(parameter)] = self.gradient(name) if whole is None else whole
                _collect(parameter, self._collected[id(parameter)], is_kept=whole is None)
        return found

    def _treatment(self, name: str, shape: Sequence[int]) -> tuple[type[Segment], float, float]:
        """(rule, factor of the learning rate, weight decay) of a parameter."""
        group, is_matrix = self._groups.get(name), _is_decayed(name, shape)
        decay = self._settings.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        rule = RULES[self._settings.optimizer]
        if rule is Muon and (not is_matrix or name in self._outer):
            rule = AdamW
        return rule, 1.0 if group is None else group.learning_rate, decay if is_matrix else 0.0

    @torch.no_grad()
    def step(self, *learning_rates: float, times: float = 1.0) -> Tensor:
        """Step with `times` the accumulated gradient, then zero it. Takes a learning rate and returns a gradient norm per
        arena. If any norm is not finite, weights and moments do not change and the step is not counted."""
        norm, scale = torch.linalg.vector_norm, (1.0 if self.loss_scale is None else self.loss_scale.value) / times
        self._add_up()
        norms = torch.stack([norm(torch.stack([norm(s.gradient) for s in segments])) for segments in self._arenas]) / scale
        norms = self._join(norms)
        is_odd = (~torch.isfinite(norms).all()).float()
        limit = self._settings.max_grad_norm
        shrinks = scale * (((norms + 1e-6) / limit).clamp_min(1.0) if limit else torch.ones_like(norms))
        step = self.num_steps + 1
        for segments, learning_rate, shrink in zip(self._arenas, learning_rates, shrinks, strict=True):
            for segment in segments:
                segment.update(learning_rate, step=step, shrink=shrink, is_odd=is_odd)
        self.zero_gradient()
        self.num_steps += 1 - is_odd
        return norms

    def zero_gradient(self) -> None:
        for segment in itertools.chain.from_iterable(self._arenas):
            segment.gradient.zero_()

    def _add_up(self) -> None:
        """Sum gradients over ranks: of a sharded arena its ranks have done so pass by pass, and only replicas are left."""
        if self._ranks is None:
            return
        for segments, parts in zip(self._arenas, self._sharded, strict=True):
            for part in parts:
                self._ranks.sum(part, over="replicas")
            for segment in () if parts else segments:
                self._ranks.sum(segment.gradient)

    def _join(self, norms: Tensor) -> Tensor:
        """The norms of whole arenas, from those of this rank's parts."""
        if self._ranks is None or not any(self._sharded):
            return norms
        is_sharded = torch.tensor([bool(parts) for parts in self._sharded], device=norms.device)
        squares = self._ranks.sum(torch.where(is_sharded, norms, 0.0).square(), over="shards")
        return torch.where(is_sharded, squares.sqrt(), norms)

    def settle(self) -> None:
        """Wait until offloaded state is written back to host memory."""
        if self._is_offloaded and self.num_steps.is_cuda:
            torch.cuda.synchronize()

    @property
    def names(self) -> set[str]:
        return set(self.homes)

    def gradient(self, name: str) -> Tensor:
        """A parameter's float32 gradient, as accumulated so far."""
        home = self.homes[name]
        return home.view(home.gradient, name)

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Where a pass adds up a parameter's gradient; None if it is not trained."""
        return self._collected.get(id(parameter))

    def master(self, name: str) -> Tensor:
        """A parameter in float32."""
        home = self.homes[name]
        return home.view(home.masters, name)

    def state(self) -> dict[str, Tensor]:
        """Return steps and state by parameter, for a checkpoint; before the first step only the scale of the loss, if any."""
        self.settle()
        found = {} if self.loss_scale is None else {_LOSS_SCALE: self.loss_scale.state()}
        if not float(self.num_steps):
            return found
        for name, home in self.homes.items():
            found |= {f"{name}.{key}": tensor.to("cpu", copy=True) for key, tensor in home.state_of(name).items()}
            found[f"{name}.step"] = self.num_steps.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; parameters missing there start from zero."""
        steps = [state[f"{name}.step"] for name in self.homes if f"{name}.step" in state]
        self.num_steps.copy_(steps[0] if steps else torch.zeros(()))
        for name, home in self.homes.items():
            for key, tensor in home.state_of(name).items():
                tensor.copy_(state.get(f"{name}.{key}", torch.zeros((), dtype=tensor.dtype)))
        if self.loss_scale is not None and _LOSS_SCALE in state:
            self.loss_scale.load(state[_LOSS_SCALE])

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Set masters and weights from float32 tensors; ignores untrained ones."""
        for name in self.names & tensors.keys():
            home = self.homes[name]
            for flat in (home.masters, home.weights):
                view = home.view(flat, name)
                view.copy_(tensors[name].view_as(view))


def _collect(parameter: nn.Parameter, gradient: Tensor, *, is_kept: bool) -> None:
    """Make autograd accumulate the parameter's gradient in `gradient`, which has memory at all times if it `is_kept`."""
    if parameter.dtype == torch.float32 and is_kept:
        parameter.grad = gradient
        return

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:  # None for a head that has accumulated its gradient itself
            gradient.add_(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)


def _is_decayed(name: str, shape: Sequence[int]) -> bool:
    """Only matrices are; experts' biases (`gate_up_proj_bias`) and heads' norms (`q_norm.weight`) are not, though 2-D."""
    *modules, last = name.split(".")
    is_norm = bool(modules) and "norm" in modules[-1].lower()
    return len(shape) >= _MATRIX and not last.endswith("bias") and not is_norm
