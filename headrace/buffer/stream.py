"""Engines never wait for the buffer. With neither gate nor rejection, it grows while they outpace the trainer."""

from __future__ import annotations

from headrace.buffer.policy import BufferPolicy


class Stream(BufferPolicy):
    name = "stream"
    least_lag = 1
    max_batches = None
