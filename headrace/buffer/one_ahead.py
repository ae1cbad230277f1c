"""The usual choice: one batch may wait, so generating the next overlaps with training this one."""

from __future__ import annotations

from headrace.buffer.policy import BufferPolicy


class OneAhead(BufferPolicy):
    name = "one_ahead"
    least_lag = 1
