"""New weights on their way to the engines."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from headrace.records.manifest import NOTHING, Manifest
from headrace.records.validate import Plain, check_kind, check_plain


class Payload(enum.StrEnum):
    """What a weight update carries."""

    FULL = "full"
    ADAPTER = "adapter"
    DELTA = "delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights of a policy: which they are, how they travel, and how the receiver knows it has them."""

    policy: str
    lineage: str
    version: int
    base_version: int | None = None
    """For a delta, the version it must be applied to."""
    payload: Payload = Payload.FULL
    adapter: dict[str, Plain] | None = None
    """The adapter's configuration, for an adapter-only update."""
    transport: str = "memory"
    place: dict[str, Plain] = field(default_factory=dict)
    """Where its bytes are to be had, in the transport's own words."""
    manifest: Manifest = NOTHING
    """May be given as any sequence of `TensorInfo`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "payload", Payload(self.payload))
        if not isinstance(self.manifest, Manifest):
            object.__setattr__(self, "manifest", Manifest.of(self.manifest))
        check_kind(self.version, int, "weight update: version")
        check_plain(self.place, where="weight update: place")
        if self.version < 0 or (self.base_version is not None and not 0 <= self.base_version < self.version):
            raise ValueError(f"weight update: version {self.version} on base {self.base_version}")
        if (self.payload is Payload.DELTA) != (self.base_version is not None):
            raise ValueError(f"weight update {self.version}: a delta has a base_version, nothing else does")
        if (self.payload is Payload.ADAPTER) != (self.adapter is not None):
            raise ValueError(f"weight update {self.version}: an adapter payload has an adapter config, nothing else does")
        if self.adapter is not None:
            check_plain(self.adapter, where="weight update: adapter")
