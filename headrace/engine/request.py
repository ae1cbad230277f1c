"""A generate call inside an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from headrace.engine.native.request import Drawings
    from headrace.engine.protocol import Increment
    from headrace.records import Array, Rollout, Sampling

    Beginning = tuple[tuple[str, int] | None, bytes]
    """Where a rollout was forked, if it was, and its token ids: those of whom both are equal share their keys and values."""


@dataclass(eq=False, slots=True)
class Request:
    """One generate call. The fields below the callbacks are the native scheduler's."""

    rollout: Rollout
    sampling: Sampling
    on_done: Callable[[Rollout], None]
    """Called once, between two steps, with the lengthened rollout."""
    on_tokens: Callable[[Increment], None] | None = None
    """Called after every step, for a stream."""
    is_streamed: bool = False
    """Somebody elsewhere waits for each of its tokens."""
    on_failed: Callable[[Exception], None] | None = None
    """Called once instead of `on_done` when it cannot be generated; without it the engine itself fails."""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values are in its blocks, or will be when the steps under way are done."""
    chain: Hashable = None
    """Names its last remembered block; None once its blocks are of more than one version."""
    remembered: int = 0
    """Its blocks known by what they hold."""
    leader: Request | None = None
    """A sibling that is computing the prompt both share."""
    followers: list[Request] = field(default_factory=list)
    saved: Drawings | None = None
    """What it had drawn when its blocks were taken from it."""
    started: float = 0.0
    masks: list[Array] = field(default_factory=list)
    told: int = 0
    """New tokens of it that `growth` has given out."""
    lineage: str | None = None
    """The life of the trainer its first token was drawn in, once that is over; None while it goes on."""
    leads: Beginning | None = None
    """The prompt it computes for whoever else begins with it."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What a running request has drawn since it was last asked."""

    request: Request
    token_ids: Array
    logprobs: Array
    versions: Array
    masks: list[Array]
    lineage: str
    """The life of the trainer its first token was drawn in."""
