"""Lineage: which life of a trainer weights come from."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Lineage:
    """One life of a trainer, from its start or restart to its end. Weights are identified by (policy, lineage, version). A
    trainer that restarts from version 40 of lineage A gets lineage B with `ancestors` {A: 40}: later versions of A are dead."""

    id: str
    ancestors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def new(cls) -> Lineage:
        return cls(id=secrets.token_hex(4))

    def after_restart(self, version: int) -> Lineage:
        """Return the lineage of a trainer that restarts from `version` of this one."""
        history = {lineage: min(last, version) for lineage, last in self.ancestors.items()}
        return Lineage(id=secrets.token_hex(4), ancestors={**history, self.id: version})

    def contains(self, lineage: str, version: int) -> bool:
        """Whether these weights belong to this lineage or its history."""
        return lineage == self.id or version <= self.ancestors.get(lineage, -1)
