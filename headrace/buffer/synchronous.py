"""Generate a batch, train it, and only then generate the next."""

from __future__ import annotations

from headrace.buffer.policy import BufferPolicy


class Synchronous(BufferPolicy):
    """Every token is sampled by the version that trains it, unless `partial.oversample` carries rollouts over."""

    name = "synchronous"
    takes_turns = True
