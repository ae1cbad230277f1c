"""The lives of a trainer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Lineage:
    """One life of a trainer. Weights are identified by (policy, lineage, version).

    A trainer that restarts from version 40 of life A is life B, and of A only versions up to 40 are still history:
    `ancestors` is then {A: 40}.
    """

    id: str
    ancestors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def new(cls) -> Lineage:
        return cls(id=secrets.token_hex(4))

    def after_restart(self, version: int) -> Lineage:
        """The next life, begun from `version` of this one."""
        history = {life: min(last, version) for life, last in self.ancestors.items()}
        return Lineage(id=secrets.token_hex(4), ancestors={**history, self.id: version})

    def contains(self, lineage: str, version: int) -> bool:
        """Whether those weights are this life's own or its history."""
        return lineage == self.id or version <= self.ancestors.get(lineage, -1)
