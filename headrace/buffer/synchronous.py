"""Generate a batch, train it, then generate the next: no token lags unless `partial.oversample` carries rollouts over."""

from __future__ import annotations

from headrace.buffer.policy import BufferPolicy


class Synchronous(BufferPolicy):
    name = "synchronous"
    takes_turns = True
