"""Where the tokens of a pass lie, and who shares what: all that attention must know about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Rollouts that are laid out together: one alone, or siblings with the beginning they share."""

    members: tuple[int, ...]
    """Which of the rollouts that were planned."""
    prefix: int = 0
    """How many tokens at their beginning are the same and computed once."""


@dataclass(frozen=True)
class Document:
    """Rows that may see each other. A row of the prefix sees the prefix up to itself; a row of a branch sees the whole
    prefix and its own branch up to itself, and no other branch."""

    prefix: tuple[int, int]
    """(start row, length) of the shared tokens; length 0 where nothing is shared."""
    branches: tuple[tuple[int, int], ...]
    """(start row, length) of each sibling's own tokens, in order, directly after the rows of the prefix."""


@dataclass(frozen=True)
class Layout:
    """A pass, document after document."""

    documents: tuple[Document, ...]
    num_rows: int

    @property
    def is_shared(self) -> bool:
        """Whether some document has a prefix, so that attention is more than causal within pieces."""
        return any(document.prefix[1] for document in self.documents)

    @property
    def lengths(self) -> list[int]:
        """Of the sequences, where nothing is shared."""
        assert not self.is_shared
        return [length for document in self.documents for _, length in document.branches]
