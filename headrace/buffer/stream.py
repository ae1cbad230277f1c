"""No bound on what waits: only the gate, if there is one, limits how far generation runs ahead."""

from __future__ import annotations

from headrace.buffer.policy import BufferPolicy


class Stream(BufferPolicy):
    """Engines never wait for the buffer. Without gate and rejection it grows as long as they outpace the trainer."""

    name = "stream"
    least_lag = 1
    max_batches = None
