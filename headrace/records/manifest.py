"""The tensors of a weight update. There are hundreds, and only their checksums change between versions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from headrace.records.validate import Array, check_kind, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a weight update, as the sender holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    checksum: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if self.num_bytes < 0:
            raise ValueError(f"tensor {self.name!r}: {self.num_bytes} bytes")


@dataclass(frozen=True)
class TensorColumns:
    """A layout's tensors as columns."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """A sequence of `TensorInfo`, made only when iterated, so that passing an update on costs nothing."""

    layout: str
    """All but the checksums, as JSON: [[name, dtype, shape, bytes], …]. The same for all versions; parsed once."""
    checksums: Array
    """[tensors] uint64"""

    def __post_init__(self) -> None:
        check_kind(self.layout, str, "manifest: layout")
        sums = np.asarray(self.checksums)
        if sums.ndim != 1 or sums.dtype.kind not in "iu" or (sums.dtype.kind == "i" and (sums < 0).any()):
            raise ValueError("manifest: checksums are whole numbers ≥ 0 in one dimension")
        object.__setattr__(self, "checksums", frozen(sums, np.uint64, "manifest: checksums"))
        if len(self.checksums) != len(self.names):
            raise ValueError(f"manifest: {len(self.checksums)} checksums of {len(self.names)} tensors")

    @classmethod
    def of(cls, infos: Iterable[TensorInfo]) -> Manifest:
        infos = tuple(infos)
        for info in infos:
            check_kind(info, TensorInfo, "weight update: manifest")
        layout = [[info.name, info.dtype, list(info.shape), info.num_bytes] for info in infos]
        return cls(layout=json.dumps(layout), checksums=np.asarray([info.checksum for info in infos], dtype=np.uint64))

    @property
    def tensors(self) -> TensorColumns:
        return _read(self.layout)

    @property
    def names(self) -> tuple[str, ...]:
        return self.tensors.names

    @property
    def total_bytes(self) -> int:
        return sum(self.tensors.num_bytes)

    def is_like(self, other: Manifest) -> bool:
        """Whether both have the same tensors in the same order, regardless of values."""
        return self.layout == other.layout

    def with_checksums(self, checksums: Array) -> Manifest:
        """The same tensors with other values."""
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
        each = self.tensors
        for name, dtype, shape, size, checksum in zip(
            each.names, each.dtypes, each.shapes, each.num_bytes, self.checksums.tolist(), strict=True
        ):
            yield TensorInfo(name=name, shape=shape, dtype=dtype, num_bytes=size, checksum=checksum)


@lru_cache(maxsize=32)
def _read(layout: str) -> TensorColumns:
    try:
        rows = json.loads(layout)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"manifest: its layout cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise ValueError("manifest: its layout is a list of name, dtype, shape and bytes")
    names, dtypes, shapes, num_bytes = zip(*rows, strict=True) if rows else ((), (), (), ())
    return TensorColumns(names, dtypes, tuple(map(tuple, shapes)), num_bytes)


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or len(row) != 4:
        return False
    name, dtype, shape, num_bytes = row
    numbers = [*shape, num_bytes] if isinstance(shape, list) else [-1]
    return isinstance(name, str) and isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers)


NOTHING = Manifest.of(())
