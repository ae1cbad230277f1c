"""Which rows of a pass belong together and what they share: all that attention needs to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Rollouts laid out together: one alone, or siblings that share a prefix."""

    members: tuple[int, ...]  # indices of the planned rollouts
    prefix: int = 0  # length of their common prefix, which is computed once


@dataclass(frozen=True)
class Document:
    """A row of the prefix sees the prefix up to itself; a row of a branch sees the prefix and its own branch up to itself."""

    prefix: tuple[int, int]  # (start row, length); length 0 if nothing is shared
    branches: tuple[tuple[int, int], ...]  # (start row, length) of each sibling's own tokens, directly after the prefix


@dataclass(frozen=True)
class Layout:
    """A pass, document after document."""

    documents: tuple[Document, ...]
    num_rows: int

    @property
    def is_shared(self) -> bool:
        """Whether some document has a shared prefix."""
        return any(document.prefix[1] for document in self.documents)

    @property
    def lengths(self) -> list[int]:
        """The lengths of the sequences, if nothing is shared."""
        assert not self.is_shared
        return [length for document in self.documents for _, length in document.branches]
