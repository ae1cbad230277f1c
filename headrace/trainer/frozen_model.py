"""Models that are scored with but not trained: the reference of a KL, the teacher of a distillation. A reference may follow the
policy (`train.reference_every`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from headrace.model import Arena, Head, adapter_of, read_pieces, take_files
from headrace.trainer.sharding import place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from headrace.trainer.ranks import Ranks


class FrozenModel:
    """A model and its head, used as a context. If offloaded, its weights are on the GPU only within it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        exact: bool = False,
        offload: bool = False,
        keep_digits: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """`keep_digits`: hold narrow weights in float32 too, in the host's memory, because `mix` would lose a small share in
        their rounding. `ranks`: over which the model is sharded; it may then be on the host."""
        self.model, files = model.eval().requires_grad_(False), take_files(model)
        self.sharding = place(self.model, ranks)
        self.arena = self.sharding.arena if self.sharding is not None else Arena.adopt(self.model)
        self.head = Head(self.model, exact=exact)
        if files is not None:
            assert self.sharding is not None
            for name, piece in read_pieces(model, self.sharding.arena, files):
                self.arena.views[name].copy_(piece)
            self.sharding.probe(self.model, exact=exact)
        narrow = {dtype: flat for dtype, flat in self.arena.flat.items() if dtype.is_floating_point and dtype.itemsize < 4}
        self._wide = {dtype: flat.to("cpu", torch.float32) for dtype, flat in narrow.items() if keep_digits}
        self._on_host: Arena | None = None
        if offload and self.arena.device.type == "cuda":
            self._on_host = Arena(self.arena.slots, device=torch.device("cpu"), allocate=_pinned)
            self._on_host.copy_from(self.arena)
            self._num_bytes = self.arena.memory.untyped_storage().size()
            self.__exit__()

    def __enter__(self) -> None:
        if self._on_host is not None:
            self.arena.memory.untyped_storage().resize_(self._num_bytes)
            self.arena.memory.copy_(self._on_host.memory, non_blocking=True)

    def __exit__(self, *_: object) -> None:
        if self._on_host is not None:
            torch.cuda.current_stream(self.arena.device).synchronize()
            self.arena.memory.untyped_storage().resize_(0)

    @torch.no_grad()
    def mix(self, other: Arena, share: float) -> None:
        """Set the weights to share · other + (1 − share) · own; `other` has the same layout."""
        assert other.slots == self.arena.slots
        for dtype, own in self._held().items():
            theirs = other.flat[dtype].to(own.device, own.dtype)
            if share < 1 and dtype.is_floating_point:
                own.lerp_(theirs, share)
            else:
                own.copy_(theirs)
        self._use_held()

    def state(self) -> dict[str, Tensor]:
        """Copies of the weights by name, for a checkpoint. May be called while the model is used."""
        held, names = self._held(), {slot: name for name, slot in self.arena.slots.items()}  # of tied tensors, one
        return {
            name: held[slot.dtype][slot.start : slot.stop].view(slot.shape).to("cpu", copy=True) for slot, name in names.items()
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        held = self._held()
        for name, tensor in state.items():
            slot = self.arena.slots[name]
            held[slot.dtype][slot.start : slot.stop].copy_(tensor.reshape(-1))
        self._use_held()

    def _held(self) -> dict[torch.dtype, Tensor]:
        """The flat weights of each dtype of the model, where they are always and with all digits."""
        return {**(self._on_host or self.arena).flat, **self._wide}

    def _use_held(self) -> None:
        for dtype, wide in self._wide.items():
            (self._on_host or self.arena).flat[dtype].copy_(wide)


class WithoutAdapter:
    """The policy with its adapter off, which is the model that training started from: a reference that takes no memory."""

    def __init__(self, model: PreTrainedModel, *, exact: bool = False) -> None:
        self.model, self.head, self._off = model, Head(model, exact=exact), contextlib.ExitStack()

    def __enter__(self) -> None:
        adapter = adapter_of(self.model)
        assert adapter is not None
        self._off.enter_context(adapter.off())

    def __exit__(self, *_: object) -> None:
        self._off.close()


def _pinned(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=True)
