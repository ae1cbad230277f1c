"""New weights for the engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.records.manifest import NOTHING, Manifest
from headrace.records.validate import Plain, check_kind, check_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of an update in one place, and the tensors they belong to.

    Two trainer ranks that each hold half of a matrix of 8 elements would publish

        Part(transport="files", key="7-0", place={"file": "rank0-7-0.safetensors", …}, num_bytes=…, ranges=(("matrix", 0, 4),))
        Part(transport="files", key="7-0", place={"file": "rank1-7-0.safetensors", …}, num_bytes=…, ranges=(("matrix", 4, 8),))
    """

    transport: str
    key: str
    """Identifies the bytes to the sender's transport."""
    place: dict[str, Plain] = field(default_factory=dict)
    """Where receivers find them, in the transport's own terms."""
    num_bytes: int
    """Bytes sent."""
    ranges: tuple[tuple[str, int, int], ...] = ()
    """(tensor, first element, one past the last), each tensor once; empty if the part is the whole update."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", tuple((str(name), start, stop) for name, start, stop in self.ranges))
        check_kind(self.transport, str, "weight update: transport")
        check_kind(self.key, str, "weight update: key")
        check_kind(self.num_bytes, int, "weight update: num_bytes")
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
    """Reserved: an adapter's configuration."""
    manifest: Manifest = NOTHING
    """Accepts any iterable of `TensorInfo`."""
    parts: tuple[Part, ...] = ()
    """Together they hold every tensor of the manifest; today a sender makes a single part."""

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
