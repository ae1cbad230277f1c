"""What a checkpoint holds of the optimizer and of a reference that changes, read by ranges: in one file, or in slices that any
number of ranks wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headrace.model import flat_range

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from headrace.trainer.optimizer import FlatOptimizer

OPTIMIZER, REFERENCE = "optimizer", "reference"


def write_state(
    folder: Path,
    what: str,
    state: Mapping[str, Tensor],
    *,
    first: Mapping[str, int],
    rank: int | None,
    optimizer: FlatOptimizer | None = None,
) -> list[Path]:
    """Write all of it, or a `rank`'s slices and what they are: of each tensor its first number, and how many numbers a row of
    it stands for. `first`: of each parameter, which element of it is this rank's first; others are not written."""
    if rank is None:
        save_file(dict(state), folder / "trainer" / f"{what}.safetensors")
        return []
    homes = {} if optimizer is None else optimizer.homes
    rows = {f"{name}.{key}": (name, home.block) for name, home in homes.items() for key in home.state}
    listed, kept = {}, {}
    for key, tensor in state.items():
        name, block = rows.get(key, (key, 1))
        if name in first and tensor.numel() and not key.endswith(".step"):
            listed[key], kept[key] = [first[name], block], tensor.contiguous()
    steps = {} if optimizer is None else {"steps": float(optimizer.num_steps)}
    scale = {} if "loss_scale" not in state else {"loss_scale": state["loss_scale"].tolist()}
    path = folder / "trainer" / f"{what}-{rank:05d}"
    save_file(kept, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(json.dumps({**steps, **scale, "tensors": listed}) + "\n")
    return [path.with_suffix(".safetensors"), path.with_suffix(".json")]


class SavedState:
    """Of a checkpoint's `trainer` folder: `WHAT.safetensors`, or `WHAT-RANK.safetensors` with an index each."""

    def __init__(self, folder: Path, what: str) -> None:
        whole = folder / "trainer" / f"{what}.safetensors"
        self._index: dict[str, Any] = {}
        self._places: dict[str, list[tuple[int, int, Path]]] = {}  # (first number, numbers per row, file) of each slice
        if whole.exists():
            with safe_open(whole, framework="pt") as file:
                self._places = {key: [(0, 0, whole)] for key in file.keys()}  # noqa: SIM118  (not a dict)
        for path in sorted((folder / "trainer").glob(f"{what}-*.json")) if not whole.exists() else ():
            self._index = json.loads(path.read_text())
            for key, (first, block) in self._index["tensors"].items():
                self._places.setdefault(key, []).append((first, block, path.with_suffix(".safetensors")))
        if not self._places and not self._index and not whole.exists():
            raise FileNotFoundError(f"{folder}: there is no trainer/{what}.safetensors, nor slices of it")

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def read(self, key: str, first: int, count: int, *, block: int = 1) -> Tensor:
        """The rows that hold `count` numbers from the `first` on, in the shape of a slice."""
        found, stop = [], first + count
        for start, _, path in sorted(self._places[key], key=lambda place: place[0]):
            with safe_open(path, framework="pt") as file:
                rows = file.get_slice(key)
                shape = rows.get_shape()
                if len(shape) > 1 and block == 1:  # a whole tensor in its own shape
                    found.append(flat_range(rows, shape, first, stop))
                    continue
                low, high = max(first - start, 0) // block, -(-(stop - start) // block)
                if low < min(high, shape[0] if shape else 1):
                    found.append(rows[low:high] if shape else file.get_tensor(key).reshape(1))
        return torch.cat(found) if found else torch.zeros(0)

    def values(self, prefix: str) -> dict[str, Tensor]:
        """Whole tensors whose names begin so: a value head's."""
        return {key: self._whole(key) for key in self._places if key.startswith(f"{prefix}.") and key.count(".") == 1}

    def _whole(self, key: str) -> Tensor:
        with safe_open(self._places[key][0][2], framework="pt") as file:
            found: Tensor = file.get_tensor(key)
        return found

    def of(self, optimizer: FlatOptimizer, first: Mapping[str, int]) -> dict[str, Tensor]:
        """What `FlatOptimizer.load_state` takes. `first`: where this rank's part of each parameter begins; 0 if not listed."""
        found: dict[str, Tensor] = {}
        for name, home in optimizer.homes.items():
            slot = home.slots[name]
            for key, own in home.state_of(name).items():
                if (full := f"{name}.{key}") in self:
                    tensor = self.read(full, first.get(name, 0), slot.stop - slot.start, block=home.block)
                    found[full] = tensor.reshape(own.shape)
        for key in ("loss_scale", *(key for key in self._places if key.endswith(".step"))):
            if key in self:
                found[key] = self._whole(key)
        if "loss_scale" in self._index:
            found["loss_scale"] = torch.tensor(self._index["loss_scale"], dtype=torch.float64)
        if self._index.get("steps"):
            found |= {f"{name}.step": torch.tensor(self._index["steps"]) for name in optimizer.names}
        return found
