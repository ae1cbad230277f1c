"""Tensors of a model by name, their checksums, and copying them in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.types import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    from headrace.types import WeightUpdate


class WeightError(RuntimeError):
    """Weights did not arrive as they were sent; whoever receives them stays on its old version."""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer once, tied ones under their first name."""
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def checksum(tensor: Tensor) -> int:
    """Of a tensor's bits: a sum of its 32-bit words, each times an odd number of its own place, modulo 2**64.

    One changed bit, or two equal-sized parts exchanged, changes it.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 4)])
    words = flat.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), 1 << 22):
        part = words[start : start + (1 << 22)].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=part.device) * 2 + 1
        total += int((part * places).sum())
    return total & 0x7FFFFFFFFFFFFFFF


def describe(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        num_bytes=tensor.numel() * tensor.element_size(),
        checksum=checksum(tensor),
    )


def make_manifest(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorInfo, ...]:
    """What a sender holds."""
    return tuple(describe(name, tensor) for name, tensor in tensors)


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> None:
    """Copy an update into a model in place and check what the model now holds; on any difference, undo and raise."""
    own = dict(named_tensors(model))
    expected = {info.name: info for info in update.manifest}
    before = {name: tensor.clone() for name, tensor in own.items()}
    try:
        arrived = set()
        for name, tensor in tensors:
            if name not in own or name not in expected or own[name].shape != tensor.shape:
                raise WeightError(f"version {update.version}: tensor {name!r} is not one this model holds")
            own[name].copy_(tensor)
            arrived.add(name)
        missing = sorted(own.keys() - arrived)
        if missing:
            raise WeightError(f"version {update.version}: {len(missing)} tensors did not arrive, first {missing[0]!r}")
        for name, tensor in own.items():
            if describe(name, tensor) != expected[name]:
                raise WeightError(f"version {update.version}: tensor {name!r} differs from what was sent")
    except WeightError:
        for name, tensor in own.items():
            tensor.copy_(before[name])
        raise
