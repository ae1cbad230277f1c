"""What the native scheduler and core hand each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.records import Array


@dataclass(frozen=True, slots=True)
class Drawings:
    """Tokens drawn so far in a call."""

    token_ids: Array
    logprobs: Array
    versions: Array


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did, for the time budget."""

    prompt_rows: int
    decode_rows: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """A rollout whose keys and values stay, for others to go on from any of its tokens."""

    token_ids: Array
    blocks: list[int]
    computed: int
