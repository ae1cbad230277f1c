"""What a weight update consists of, tensor by tensor: kept as columns, since hundreds of them travel with every version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

import numpy as np

from headrace.validate import Array, check_kind, frozen, trusted

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


_LAYOUT = ("names", "dtypes", "ranks", "sizes", "num_bytes")


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest(Sequence[TensorInfo]):
    """A sequence of `TensorInfo`, each made when it is looked at. Two are equal if all they say is."""

    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    ranks: Array
    """[tensors] dimensions of each."""
    sizes: Array
    """[sum of ranks] the shapes, one after another."""
    num_bytes: Array
    """[tensors]"""
    checksums: Array
    """[tensors] uint64"""

    def __post_init__(self) -> None:
        for name in ("names", "dtypes"):
            column = tuple(getattr(self, name))
            if not all(type(entry) is str for entry in column):
                raise ValueError(f"manifest: {name} are strings")
            object.__setattr__(self, name, column)
        for name, kind in (("ranks", np.int64), ("sizes", np.int64), ("num_bytes", np.int64), ("checksums", np.uint64)):
            object.__setattr__(self, name, _whole_numbers(getattr(self, name), kind, name))
        columns = (self.names, self.dtypes, self.ranks, self.num_bytes, self.checksums)
        if len({len(column) for column in columns}) > 1 or int(self.ranks.sum()) != len(self.sizes):
            raise ValueError("manifest: its columns are not of one length")

    @classmethod
    def of(cls, infos: Iterable[TensorInfo]) -> Manifest:
        """The same as columns."""
        infos = tuple(infos)
        for info in infos:
            check_kind(info, TensorInfo, "weight update: manifest")
        return cls.of_shapes(
            [info.name for info in infos],
            [info.dtype for info in infos],
            [info.shape for info in infos],
            num_bytes=np.asarray([info.num_bytes for info in infos], dtype=np.int64),
            checksums=np.asarray([info.checksum for info in infos], dtype=np.uint64),
        )

    @classmethod
    def of_shapes(
        cls,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        *,
        num_bytes: Array,
        checksums: Array,
    ) -> Manifest:
        return cls(
            names=tuple(names),
            dtypes=tuple(dtypes),
            ranks=np.asarray([len(shape) for shape in shapes], dtype=np.int64),
            sizes=np.asarray([size for shape in shapes for size in shape], dtype=np.int64),
            num_bytes=num_bytes,
            checksums=checksums,
        )

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of each tensor."""
        sizes, stops = self.sizes.tolist(), np.cumsum(self.ranks).tolist()
        return tuple(tuple(sizes[stop - rank : stop]) for stop, rank in zip(stops, self.ranks.tolist(), strict=True))

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    def is_like(self, other: Manifest) -> bool:
        """Whether it names the same tensors in the same order, whatever they hold."""
        return (
            self.names == other.names
            and self.dtypes == other.dtypes
            and np.array_equal(self.ranks, other.ranks)
            and np.array_equal(self.sizes, other.sizes)
            and np.array_equal(self.num_bytes, other.num_bytes)
        )

    def with_checksums(self, checksums: Array) -> Manifest:
        """The same tensors, holding something else."""
        column = _whole_numbers(checksums, np.uint64, "checksums")
        if len(column) != len(self):
            raise ValueError(f"manifest: {len(column)} checksums of {len(self)} tensors")
        return trusted(Manifest, {name: getattr(self, name) for name in _LAYOUT} | {"checksums": column})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Manifest):
            return NotImplemented
        return self.is_like(other) and np.array_equal(self.checksums, other.checksums)

    def __hash__(self) -> int:
        return hash((self.names, self.dtypes))

    def __len__(self) -> int:
        return len(self.names)

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
        return TensorInfo(
            name=self.names[index],
            shape=self.shapes[index],
            dtype=self.dtypes[index],
            num_bytes=int(self.num_bytes[index]),
            checksum=int(self.checksums[index]),
        )


def _whole_numbers(column: object, kind: type[np.integer], name: str) -> Array:
    array = np.asarray(column)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or (array < 0).any():
        raise ValueError(f"manifest: {name} are whole numbers ≥ 0 in one dimension")
    return frozen(array, kind, f"manifest: {name}")


NOTHING = Manifest.of(())
