"""AdamW over whole arenas: one kernel per run of tensors with the same decay, float32 masters for bfloat16 weights.
Each arena has its own learning rate, and its gradient is clipped on its own.

Gradients are accumulated in float32 whatever the weights' dtype, so a step does not depend on the number of passes. Nothing
here waits for the GPU: the update itself reads the clipping norm, and whether the gradient is finite, on the device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from headrace.model import Arena, Slot
    from headrace.trainer.settings import TrainSettings

EPSILON = 1e-8
_STREAMED = 1 << 26  # elements of offloaded state that are copied to the GPU at a time
_MATRIX = 2


@dataclass
class Segment:
    """Adjacent trained tensors of an arena, all with weight decay or all without. Tensors are flat; `weights` are the model's
    own, `masters` the same in float32 (and the same memory if the weights are float32)."""

    decay: float
    weights: Tensor
    masters: Tensor
    gradient: Tensor
    means: Tensor
    squares: Tensor

    @property
    def is_own_master(self) -> bool:
        return self.masters.data_ptr() == self.weights.data_ptr()

    def part(self, slot: Slot, *, start: int) -> Segment:
        """Views of one tensor, in its shape. `start`: of the segment, in the arena."""

        def view(flat: Tensor) -> Tensor:
            return flat[slot.start - start : slot.stop - start].view(slot.shape)

        flats = (self.weights, self.masters, self.gradient, self.means, self.squares)
        return Segment(self.decay, *map(view, flats))


class FlatAdamW:
    def __init__(
        self, trained: Sequence[tuple[Arena, Mapping[str, nn.Parameter]]], settings: TrainSettings, *, offload: bool = False
    ) -> None:
        self._settings = settings
        self._is_offloaded = offload
        self._parts: dict[str, Segment] = {}  # by parameter name
        self._named: dict[int, str] = {}  # by id of the parameter
        self._arenas = [
            [self._add(arena, names, parameters) for names in _neighbours(arena, parameters)] for arena, parameters in trained
        ]
        if not all(self._arenas):
            raise ConfigError("every parameter of the model is frozen: there is nothing to train")
        self._segments = [segment for segments in self._arenas for segment in segments]
        self.num_steps = torch.zeros((), device=self._segments[0].gradient.device)

    def _add(self, arena: Arena, names: list[str], parameters: Mapping[str, nn.Parameter]) -> Segment:
        slots = [arena.slots[name] for name in names]
        start, stop = slots[0].start, slots[-1].stop
        weights = arena.flat[slots[0].dtype][start:stop]
        device = torch.device("cpu") if self._is_offloaded else weights.device
        is_own = weights.dtype == torch.float32 and weights.device == device

        def resting(tensor: Tensor) -> Tensor:
            return tensor.pin_memory() if self._is_offloaded and torch.cuda.is_available() else tensor

        segment = Segment(
            weights=weights,
            masters=weights if is_own else resting(weights.float().to(device)),
            gradient=torch.zeros(weights.shape, dtype=torch.float32, device=weights.device),
            means=resting(torch.zeros(weights.shape, dtype=torch.float32, device=device)),
            squares=resting(torch.zeros(weights.shape, dtype=torch.float32, device=device)),
            decay=self._settings.weight_decay if _is_decayed(names[0], slots[0]) else 0.0,
        )
        for name, slot in zip(names, slots, strict=True):
            self._parts[name] = segment.part(slot, start=start)
            self._named[id(parameters[name])] = name
            _collect(parameters[name], self.gradient(name))
        return segment

    @torch.no_grad()
    def step(self, *learning_rates: float) -> Tensor:
        """Step with the accumulated gradient, then zero it. Takes a learning rate and returns a gradient norm per arena. If any
        norm is not finite, weights and moments do not change and the step is not counted."""
        norm = torch.linalg.vector_norm
        norms = torch.stack([norm(torch.stack([norm(s.gradient) for s in segments])) for segments in self._arenas])
        is_odd = (~torch.isfinite(norms).all()).float()
        limit = self._settings.max_grad_norm
        shrinks = ((norms + 1e-6) / limit).clamp_min(1.0) if limit else torch.ones_like(norms)
        for segments, learning_rate, shrink in zip(self._arenas, learning_rates, shrinks, strict=True):
            for segment in segments:
                self._update(segment, learning_rate, shrink=shrink, is_odd=is_odd)
        self.num_steps += 1 - is_odd
        return norms

    def _update(self, segment: Segment, learning_rate: float, *, shrink: Tensor, is_odd: Tensor) -> None:
        for masters, gradient, means, squares in self._pieces(segment):
            torch._fused_adamw_(
                [masters],
                [gradient],
                [means],
                [squares],
                [],
                [self.num_steps + 1],
                lr=learning_rate,
                beta1=self._settings.beta1,
                beta2=self._settings.beta2,
                weight_decay=segment.decay,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
                grad_scale=shrink,
                found_inf=is_odd,
            )
        if not segment.is_own_master and not self._is_offloaded:
            segment.weights.copy_(segment.masters)
        segment.gradient.zero_()

    def _pieces(self, segment: Segment) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield (masters, gradient, means, squares): all at once or, if offloaded, in pieces, each written back after use."""
        if not self._is_offloaded:
            yield segment.masters, segment.gradient, segment.means, segment.squares
            return
        device = segment.gradient.device
        for start in range(0, len(segment.gradient), _STREAMED):
            span = slice(start, start + _STREAMED)
            kept = (segment.masters[span], segment.means[span], segment.squares[span])
            masters, means, squares = (tensor.to(device, non_blocking=True) for tensor in kept)
            yield masters, segment.gradient[span], means, squares
            for home, tensor in zip(kept, (masters, means, squares), strict=True):
                if home.data_ptr() != tensor.data_ptr():
                    home.copy_(tensor, non_blocking=True)
            segment.weights[span].copy_(masters)

    def settle(self) -> None:
        """Wait until offloaded state is written back to host memory."""
        if self._is_offloaded and self.num_steps.is_cuda:
            torch.cuda.synchronize()

    @property
    def names(self) -> set[str]:
        """Names of the trained parameters."""
        return set(self._parts)

    def gradient(self, name: str) -> Tensor:
        """A parameter's float32 gradient, as accumulated so far."""
        return self._parts[name].gradient

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """A parameter's gradient; None if it is not trained."""
        name = self._named.get(id(parameter))
        return None if name is None else self.gradient(name)

    def master(self, name: str) -> Tensor:
        """A parameter in float32."""
        return self._parts[name].masters

    def state(self) -> dict[str, Tensor]:
        """Return steps and moments by parameter, for a checkpoint; empty before the first step."""
        self.settle()
        if not float(self.num_steps):
            return {}
        found = {}
        for name, part in self._parts.items():
            found[f"{name}.exp_avg"] = part.means.to("cpu", copy=True)
            found[f"{name}.exp_avg_sq"] = part.squares.to("cpu", copy=True)
            found[f"{name}.step"] = self.num_steps.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; parameters missing there start from zero."""
        steps = [state[f"{name}.step"] for name in self._parts if f"{name}.step" in state]
        self.num_steps.copy_(steps[0] if steps else torch.zeros(()))
        for name, part in self._parts.items():
            part.means.copy_(state.get(f"{name}.exp_avg", torch.zeros(())))
            part.squares.copy_(state.get(f"{name}.exp_avg_sq", torch.zeros(())))

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Set masters and weights from float32 tensors; ignores untrained ones."""
        for name in self.names & tensors.keys():
            self._parts[name].masters.copy_(tensors[name])
            self._parts[name].weights.copy_(tensors[name])


def _collect(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Make autograd accumulate the parameter's gradient in `gradient`."""
    if parameter.dtype == torch.float32:
        parameter.grad = gradient
        return

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:  # None for a head that has accumulated its gradient itself
            gradient.add_(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)


def _neighbours(arena: Arena, parameters: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """Yield runs of trained tensors with only padding between them, of one dtype, all with weight decay or all without."""
    order = sorted(arena.slots, key=lambda name: (str(arena.slots[name].dtype), arena.slots[name].start))
    for (is_trained, _, _), names in itertools.groupby(
        order, key=lambda name: (name in parameters, arena.slots[name].dtype, _is_decayed(name, arena.slots[name]))
    ):
        if is_trained:
            yield list(names)


def _is_decayed(name: str, slot: Slot) -> bool:
    """Only matrices are; experts' biases (`gate_up_proj_bias`) and heads' norms (`q_norm.weight`) are not, though 2-D."""
    *modules, last = name.split(".")
    is_norm = bool(modules) and "norm" in modules[-1].lower()
    return len(slot.shape) >= _MATRIX and not last.endswith("bias") and not is_norm
