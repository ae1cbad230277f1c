"""One batch waits while another is trained."""

from __future__ import annotations

from headrace.buffer.policy import BufferPolicy


class OneAhead(BufferPolicy):
    """The usual choice: generation of the next batch overlaps with training of this one."""

    name = "one_ahead"
    least_lag = 1
