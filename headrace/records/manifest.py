"""What a weight update consists of, tensor by tensor: hundreds of them, and nearly always the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, overload

import numpy as np

from headrace.records.validate import Array, check_kind, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a weight update, as its sender holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    checksum: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if self.num_bytes < 0:
            raise ValueError(f"tensor {self.name!r}: {self.num_bytes} bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest(Sequence[TensorInfo]):
    """A sequence of `TensorInfo`, each made when it is looked at. Two are equal if all they say is."""

    layout: str
    """All but the checksums, as JSON: [[name, dtype, shape, bytes], …]. The same for every version of a model; read once."""
    checksums: Array
    """[tensors] uint64"""

    def __post_init__(self) -> None:
        check_kind(self.layout, str, "manifest: layout")
        object.__setattr__(self, "checksums", _whole_numbers(self.checksums))
        if len(self.checksums) != len(self.tensors.names):
            raise ValueError(f"manifest: {len(self.checksums)} checksums of {len(self.tensors.names)} tensors")

    @classmethod
    def of(cls, infos: Iterable[TensorInfo]) -> Manifest:
        infos = tuple(infos)
        for info in infos:
            check_kind(info, TensorInfo, "weight update: manifest")
        layout = [[info.name, info.dtype, list(info.shape), info.num_bytes] for info in infos]
        return cls(layout=json.dumps(layout), checksums=np.asarray([info.checksum for info in infos], dtype=np.uint64))

    @property
    def tensors(self) -> Tensors:
        return _read(self.layout)

    @property
    def names(self) -> tuple[str, ...]:
        return self.tensors.names

    @property
    def total_bytes(self) -> int:
        return sum(self.tensors.num_bytes)

    def is_like(self, other: Manifest) -> bool:
        """Whether it names the same tensors in the same order, whatever they hold."""
        return self.layout == other.layout

    def with_checksums(self, checksums: Array) -> Manifest:
        """The same tensors, holding something else."""
        return Manifest(layout=self.layout, checksums=checksums)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Manifest):
            return NotImplemented
        return self.is_like(other) and np.array_equal(self.checksums, other.checksums)

    def __hash__(self) -> int:
        return hash(self.layout)

    def __len__(self) -> int:
        return len(self.checksums)

    def __iter__(self) -> Iterator[TensorInfo]:
        return (self._info(index) for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> TensorInfo: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TensorInfo, ...]: ...
    def __getitem__(self, index: int | slice) -> TensorInfo | tuple[TensorInfo, ...]:
        if isinstance(index, slice):
            return tuple(self._info(place) for place in range(*index.indices(len(self))))
        return self._info(range(len(self))[index])

    def _info(self, index: int) -> TensorInfo:
        tensors = self.tensors
        return TensorInfo(
            name=tensors.names[index],
            shape=tensors.shapes[index],
            dtype=tensors.dtypes[index],
            num_bytes=tensors.num_bytes[index],
            checksum=int(self.checksums[index]),
        )


@dataclass(frozen=True)
class Tensors:
    """What a layout says, as columns."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: tuple[int, ...]


@lru_cache(maxsize=32)
def _read(layout: str) -> Tensors:
    try:
        rows = json.loads(layout)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"manifest: its layout cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise ValueError("manifest: its layout is a list of name, dtype, shape and bytes")
    names, dtypes, shapes, num_bytes = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Tensors(names, dtypes, tuple(map(tuple, shapes)), num_bytes)


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 4:
        return False
    name, dtype, shape, num_bytes = row
    numbers = [*shape, num_bytes] if isinstance(shape, list) else [-1]
    return isinstance(name, str) and isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers)


def _whole_numbers(column: object) -> Array:
    array = np.asarray(column)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype.kind == "i" and (array < 0).any()):
        raise ValueError("manifest: checksums are whole numbers ≥ 0 in one dimension")
    return frozen(array, np.uint64, "manifest: checksums")


NOTHING = Manifest.of(())
