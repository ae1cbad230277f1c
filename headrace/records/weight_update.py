"""New weights for the engines, and the tensors they consist of."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from headrace.records.validate import Array, Plain, check_kind, check_plain, frozen, unchecked_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a weight update, as the sender holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    checksum: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        check_kind(self.name, str, "a tensor's name")
        check_kind(self.dtype, str, f"tensor {self.name!r}: dtype")
        if not all(type(number) is int and number >= 0 for number in (*self.shape, self.num_bytes)):
            raise ValueError(f"tensor {self.name!r}: {self.num_bytes} bytes of shape {self.shape}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """A sequence of `TensorInfo`: hundreds, of which only the checksums change between versions. They are made only when
    iterated, so that passing an update on costs nothing."""

    layout: str
    """All but the checksums, as JSON: [[name, dtype, shape, bytes], …]. The same for all versions; parsed once."""
    checksums: Array
    """[tensors] uint64"""

    def __post_init__(self) -> None:
        check_kind(self.layout, str, "manifest: layout")
        object.__setattr__(self, "checksums", frozen(self.checksums, np.uint64, "manifest: checksums"))
        if self.checksums.shape != (len(_read(self.layout)),):
            raise ValueError(f"manifest: checksums of shape {self.checksums.shape} for {len(_read(self.layout))} tensors")

    @classmethod
    def of(cls, infos: Iterable[TensorInfo]) -> Manifest:
        infos = tuple(infos)
        for info in infos:
            check_kind(info, TensorInfo, "weight update: manifest")
        layout = [[info.name, info.dtype, info.shape, info.num_bytes] for info in infos]
        return cls(layout=json.dumps(layout), checksums=np.asarray([info.checksum for info in infos], dtype=np.uint64))

    @property
    def names(self) -> list[str]:
        return [info.name for info in _read(self.layout)]

    @property
    def total_bytes(self) -> int:
        return sum(info.num_bytes for info in _read(self.layout))

    def is_like(self, other: Manifest) -> bool:
        """Whether both have the same tensors in the same order, regardless of values."""
        return self.layout == other.layout

    def with_checksums(self, checksums: Array) -> Manifest:
        """The same tensors with other values."""
        return Manifest(layout=self.layout, checksums=checksums)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.is_like(other) and np.array_equal(self.checksums, other.checksums)

    def __hash__(self) -> int:
        return hash(self.layout)

    def __len__(self) -> int:
        return len(self.checksums)

    def __iter__(self) -> Iterator[TensorInfo]:
        for info, checksum in zip(_read(self.layout), self.checksums.tolist(), strict=True):
            yield unchecked_copy(info, {"checksum": checksum})


@lru_cache(maxsize=32)
def _read(layout: str) -> list[TensorInfo]:
    """The tensors of a layout, without their checksums."""
    try:
        rows = json.loads(layout)
        return [TensorInfo(name=name, shape=shape, dtype=dtype, num_bytes=size) for name, dtype, shape, size in rows]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"manifest: its layout is not a list of name, dtype, shape and bytes: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of an update in one place, and the tensors they belong to.

    Two trainer ranks that each hold half of a matrix of 8 elements would publish

        Part(transport="files", key="trainer-0-7-0", sender="trainer-0", place={…}, num_bytes=…, ranges=(("matrix", 0, 4),))
        Part(transport="files", key="trainer-1-7-0", sender="trainer-1", place={…}, num_bytes=…, ranges=(("matrix", 4, 8),))
    """

    transport: str
    key: str
    """Identifies the bytes to the sender's transport; no two senders of a run use one key."""
    sender: str = ""
    """The trainer's process that has the bytes, if there are several."""
    place: dict[str, Plain] = field(default_factory=dict)
    """Where receivers find them, in the transport's own terms."""
    num_bytes: int
    """Bytes sent."""
    ranges: tuple[tuple[str, int, int], ...] = ()
    """(tensor, first element, one past the last), each tensor once; empty if the part is the whole update."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", tuple((str(name), start, stop) for name, start, stop in self.ranges))
        for field_name, kind in (("transport", str), ("key", str), ("sender", str), ("num_bytes", int)):
            check_kind(getattr(self, field_name), kind, f"weight update: {field_name}")
        check_plain(self.place, where="weight update: place")
        for name, start, stop in self.ranges:
            if type(start) is not int or type(stop) is not int or not 0 <= start < stop:
                raise ValueError(f"weight update: tensor {name!r} from {start!r} to {stop!r} is no range")
        if self.num_bytes < 0 or len({name for name, *_ in self.ranges}) < len(self.ranges):
            raise ValueError(f"weight update: a part of {self.num_bytes} bytes, or with two ranges of one tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights of a policy: which version, how they are sent, and how the receiver verifies them."""

    policy: str
    lineage: str
    version: int
    base_version: int | None = None
    """For a delta, the version it applies to."""
    payload: str = "full"
    """What is sent; see `headrace.sync` for the choices."""
    adapter: dict[str, Plain] | None = None
    """The settings of the adapter, if the tensors are those of one; None if they are the model's."""
    manifest: Manifest = field(default_factory=lambda: Manifest.of(()))
    """Accepts any iterable of `TensorInfo`."""
    parts: tuple[Part, ...] = ()
    """Together they hold every tensor of the manifest. Each rank of a trainer makes one, and `join` puts them together."""

    def __post_init__(self) -> None:
        if not isinstance(self.manifest, Manifest):
            object.__setattr__(self, "manifest", Manifest.of(self.manifest))
        object.__setattr__(self, "parts", tuple(self.parts))
        for part in self.parts:
            check_kind(part, Part, "weight update: parts")
        if len(self.parts) > 1 and not all(part.ranges for part in self.parts):
            raise ValueError("weight update: a part without ranges is the whole update, and there are others")
        check_kind(self.version, int, "weight update: version")
        check_kind(self.payload, str, "weight update: payload")
        if self.version < 0 or (self.base_version is not None and not 0 <= self.base_version < self.version):
            raise ValueError(f"weight update: version {self.version} on base {self.base_version}")
        if self.adapter is not None:
            check_plain(self.adapter, where="weight update: adapter")

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @classmethod
    def join(cls, updates: Sequence[WeightUpdate]) -> WeightUpdate:
        """One update of what the ranks of a trainer offer, each its own ranges: the checksum of a tensor is the sum of its
        ranges'. Raises `ValueError` if they are not ranges of one version that cover it."""
        first, *others = updates
        if not others:
            return first
        about = [(each.policy, each.lineage, each.version, each.base_version, each.payload) for each in updates]
        if len(set(about)) > 1 or not all(each.manifest.is_like(first.manifest) for each in others):
            raise ValueError(f"the ranks of a trainer offer different things: {'; '.join(dict.fromkeys(map(str, about)))}")
        parts = tuple(part for each in updates for part in each.parts)
        _check_cover(first.manifest.layout, tuple(part.ranges for part in parts))
        sums = np.stack([each.manifest.checksums for each in updates])
        checksums: Array = np.add.reduce(sums, axis=0)  # wraps, as each of them does
        return replace(first, manifest=first.manifest.with_checksums(checksums), parts=parts)


@lru_cache(maxsize=4)
def _check_cover(layout: str, ranges: tuple[tuple[tuple[str, int, int], ...], ...]) -> None:
    """Raise unless the parts' ranges cover every tensor of a layout once. They are the same in all versions."""
    reached = {info.name: 0 for info in _read(layout)}
    for name, start, stop in sorted(each for part in ranges for each in part):
        if reached.get(name) != start:
            raise ValueError(
                f"weight update: tensor {name!r} is covered up to {reached.get(name)}, and a range starts at {start}"
            )
        reached[name] = stop
    short = next((info.name for info in _read(layout) if reached[info.name] != math.prod(info.shape)), None)
    if short is not None:
        raise ValueError(f"weight update: the ranks' ranges of tensor {short!r} end at element {reached[short]}")
