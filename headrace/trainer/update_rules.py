"""How an optimizer step changes weights: one class for each choice of `train.optimizer`. Each is a run of adjacent tensors with
their float32 masters, gradient and state, and knows how to update them."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from headrace.model import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.model import Arena, Slot
    from headrace.trainer.settings import TrainSettings

_STREAMED = 1 << 26  # elements of offloaded state that are copied to the GPU at a time
AT_ONCE = 1 << 24  # elements whose temporaries are held at a time, by the rules that need any
CACHED = 1 << 18  # the same on a CPU, where temporaries should stay in its cache


class Segment:
    """Adjacent trained tensors of an arena that are updated alike. All tensors are flat; `weights` are the model's own,
    `masters` the same in float32 (and the same memory if the weights are float32). State has a row for every `block` numbers.
    """

    STATE: ClassVar[dict[str, torch.dtype]]
    block = 1  # numbers of a row of state
    at_once = 0  # numbers updated at a time; 0: all that are on the device

    def __init__(
        self, arena: Arena, slots: Mapping[str, Slot], settings: TrainSettings, *, decay: float, rate: float, offload: bool
    ) -> None:
        """`rate`: as a factor of the arena's. `offload`: keep masters and state in host memory between steps."""
        self.slots, self.decay, self.rate = slots, decay, rate
        self._settings, self._is_offloaded = settings, offload
        places = list(slots.values())
        # Of a rank's part of an arena, a tensor it has nothing of may come last, before the end of another.
        self._start, stop = places[0].start, max(place.stop for place in places)
        self.weights = weights = arena.flat[places[0].dtype][self._start : stop]
        device = torch.device("cpu") if offload else weights.device
        self._is_own_master = weights.dtype == torch.float32 and weights.device == device

        def resting(tensor: Tensor) -> Tensor:
            return tensor.pin_memory() if offload and torch.cuda.is_available() else tensor

        self.masters = weights if self._is_own_master else resting(weights.float().to(device))
        if arena.gradients:
            self.gradient = arena.gradients[weights.dtype][self._start : stop]
        else:
            self.gradient = torch.zeros(weights.shape, dtype=torch.float32, device=weights.device)
        shapes = self._state_shapes(len(weights))
        self.state = {
            name: resting(torch.zeros(shapes[name], dtype=dtype, device=device)) for name, dtype in self.STATE.items()
        }

    def _state_shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.STATE, (count,))

    def update(self, learning_rate: float, *, step: Tensor, shrink: Tensor, is_odd: Tensor) -> None:
        """Step with the gradient divided by `shrink`; change nothing if `is_odd` is 1. `step` counts from 1."""
        raise NotImplementedError

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A tensor's part of `weights`, `masters` or `gradient`, in its shape."""
        slot = self.slots[name]
        return flat[slot.start - self._start : slot.stop - self._start].view(slot.shape)

    def state_of(self, name: str) -> dict[str, Tensor]:
        """A tensor's rows of the state; in its shape if a row is a number."""
        slot = self.slots[name]
        rows = self._span(slot.start - self._start, slot.stop - self._start)
        return {key: each[rows].view(slot.shape) if self.block == 1 else each[rows] for key, each in self.state.items()}

    def _span(self, start: int, stop: int) -> slice:
        return slice(start // self.block, -(-stop // self.block))

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Yield (masters, gradient, state) on the weights' device; what was offloaded is written back after use."""
        device, count = self.gradient.device, len(self.gradient)
        size = self.at_once or (_STREAMED if self._is_offloaded else max(count, 1))
        for start in range(0, count, size):
            span, rows = slice(start, start + size), self._span(start, min(start + size, count))
            homes = {"": self.masters[span], **{name: tensor[rows] for name, tensor in self.state.items()}}
            here = {name: home.to(device, non_blocking=True) for name, home in homes.items()}
            masters = here.pop("")
            yield masters, self.gradient[span], here
            for name, home in homes.items():
                used = here.get(name, masters)
                if home.data_ptr() != used.data_ptr():
                    home.copy_(used, non_blocking=True)
            if not self._is_own_master:
                self.weights[span].copy_(masters)

    def _adamw(
        self, masters: Tensor, gradient: Tensor, means: Tensor, squares: Tensor, *, rate: float, **given: Tensor
    ) -> None:
        settings = self._settings
        torch._fused_adamw_(
            [masters],
            [gradient],
            [means],
            [squares],
            [],
            [given["step"]],
            lr=rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=self.decay,
            eps=settings.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=given["shrink"],
            found_inf=given["is_odd"],
        )


class AdamW(Segment):
    STATE: ClassVar = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def update(self, learning_rate: float, **given: Tensor) -> None:
        for masters, gradient, state in self._pieces():
            self._adamw(masters, gradient, *state.values(), rate=self.rate * learning_rate, **given)


class AdamW8bit(Segment):
    """AdamW whose moments are 8-bit codes between steps, with a float32 scale for each block (Dettmers et al. 2021, 8-bit
    Optimizers via Block-wise Quantization). Unlike there, the second moment is kept as its root, which spans half as many
    decades, and is never rounded to 0: a mean divided by nothing would be a huge step. A block is a unit of the arena's
    alignment, so that none holds two tensors."""

    STATE: ClassVar = {
        "exp_avg": torch.uint8, "exp_avg_scale": torch.float32, "exp_root": torch.uint8, "exp_root_scale": torch.float32,
    }  # fmt: skip

    def _state_shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        device, self.block = self.weights.device, ALIGNMENT // self.weights.element_size()
        self.at_once = AT_ONCE if device.type == "cuda" else CACHED
        self._signed = Codes(_dynamic_table(is_signed=True).to(device))
        self._positive = Codes(_dynamic_table(is_signed=False)[1:].to(device))
        blocks = -(-count // self.block)
        return {name: (blocks, self.block) if dtype == torch.uint8 else (blocks,) for name, dtype in self.STATE.items()}

    def update(self, learning_rate: float, **given: Tensor) -> None:
        for masters, gradient, state in self._pieces():
            means = self._signed.decode(state["exp_avg"], state["exp_avg_scale"])
            squares = self._positive.decode(state["exp_root"], state["exp_root_scale"]).square_()
            flat = [each.view(-1)[: len(gradient)] for each in (means, squares)]
            self._adamw(masters, gradient, *flat, rate=self.rate * learning_rate, **given)
            found = (*self._signed.encode(means), *self._positive.encode(squares.sqrt_()))
            for old, new in zip(state.values(), found, strict=True):
                old.copy_(torch.where(given["is_odd"] > 0, old, new))


def _dynamic_table(*, is_signed: bool) -> Tensor:
    """The 256 numbers in [-1, 1] or [0, 1] that codes stand for, ascending: 0, 1 and seven decades, each with twice as many
    equally spaced numbers as the one below."""
    numbers = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not is_signed)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        numbers += [middles, -middles] if is_signed else [middles]
    return torch.cat(numbers).sort().values


class Codes:
    """8-bit codes of numbers in [-1, 1] or (0, 1], for rows with a scale each."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._middles = torch.cat([(table[:-1] + table[1:]) / 2, table.new_full((1,), math.inf)])
        # A search would take most of an update. The upper half of a float's bits gives the code of the smallest such float;
        # with 7 bits of mantissa at most two middles are above that one.
        cells = torch.arange(1 << 16, dtype=torch.int32, device=table.device) << 16
        smallest = torch.where(cells < 0, cells | 0xFFFF, cells).view(torch.float32).nan_to_num(0.0)
        self._starts = torch.bucketize(smallest, self._middles[:-1], out_int32=True)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return self._table.index_select(0, codes.view(-1).int()).view(codes.shape).mul_(scales.unsqueeze(1))

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(nearest codes, scales)."""
        scales = rows.abs().amax(dim=1)
        relative = (rows / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).view(-1)
        codes = self._starts.index_select(0, (relative.view(torch.int32) >> 16) & 0xFFFF)
        for _ in range(2):
            codes += (relative > self._middles.index_select(0, codes)).int()
        return codes.to(torch.uint8).view(rows.shape), scales


class Muon(Segment):
    """Momentum made orthogonal (Jordan et al. 2024), of an update as large as AdamW's usually is (Liu et al. 2025, Muon is
    Scalable for LLM Training). For matrices of two dimensions, and for each expert's of three; equal shapes go together."""

    STATE: ClassVar = {"momentum_buffer": torch.float32}
    MOMENTUM = 0.95

    def update(self, learning_rate: float, *, step: Tensor, shrink: Tensor, is_odd: Tensor) -> None:
        rate, is_kept = self.rate * learning_rate, is_odd > 0
        for pieces in self._batches():
            flats = (self.masters, self.state["momentum_buffer"], self.gradient)
            homes = [[self._matrices(flat, *piece) for piece in pieces] for flat in flats]
            device = self.weights.device
            masters, momentum, gradient = (torch.cat([m.to(device, non_blocking=True) for m in each]) for each in homes)
            gradient = gradient / shrink
            mixed = momentum.lerp(gradient, 1 - self.MOMENTUM)
            direction = orthogonalised(gradient.lerp(mixed, self.MOMENTUM))
            scale = 0.2 * math.sqrt(max(masters.shape[1:]))  # the root mean square of AdamW's updates is usually 0.2 to 0.4
            moved = (masters * (1 - rate * self.decay)).sub_(direction, alpha=rate * scale)
            masters, momentum = torch.where(is_kept, masters, moved), torch.where(is_kept, momentum, mixed)
            written = [(masters, homes[0]), (momentum, homes[1])]
            if not self._is_own_master:
                written.append((masters, [self._matrices(self.weights, *piece) for piece in pieces]))
            for found, places in written:
                for place, part in zip(places, found.split([len(place) for place in places]), strict=True):
                    place.copy_(part, non_blocking=True)

    def _batches(self) -> Iterator[list[tuple[str, slice]]]:
        """Tensors of one shape, as many as fit into `AT_ONCE` numbers; of one with more, as many of its matrices."""
        by_shape = sorted(self.slots, key=lambda name: self.slots[name].shape)
        for shape, grouped in itertools.groupby(by_shape, key=lambda name: self.slots[name].shape):
            count, most = math.prod(shape[:-2]), max(1, AT_ONCE // math.prod(shape[-2:]))
            pieces = [(name, slice(start, start + most)) for name in grouped for start in range(0, count, most)]
            size = max(1, most // count)
            yield from (pieces[start : start + size] for start in range(0, len(pieces), size))

    def _matrices(self, flat: Tensor, name: str, part: slice) -> Tensor:
        """[matrices, rows, columns]: part of a tensor."""
        tensor = self.view(flat, name)
        return tensor.view(-1, *tensor.shape[-2:])[part]


def orthogonalised(matrices: Tensor) -> Tensor:
    """UVᵀ of each matrix UΣVᵀ, roughly (singular values end between 0.7 and 1.2): five Newton-Schulz steps of degree five. In
    bfloat16 on a GPU; in float32 on a CPU, where products of bfloat16 are slow or missing."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if is_tall else matrices
    found = found.bfloat16() if matrices.is_cuda else found
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), found, beta=3.4445)
    return (found.mT if is_tall else found).float()


RULES: dict[str, type[Segment]] = {"adamw": AdamW, "adamw_8bit": AdamW8bit, "muon": Muon}
