"""The ways an engine pauses."""

from __future__ import annotations

import enum


class Interrupt(enum.StrEnum):
    """How an engine pauses."""

    KEEP = "keep"
    RETRACT = "retract"
    DRAIN = "drain"
    ABORT = "abort"


def interrupt_of(name: str, *, kv: str) -> Interrupt:
    """The interrupt of `partial.interrupt` and `partial.kv`."""
    interrupt = Interrupt(name)
    return Interrupt.RETRACT if interrupt is Interrupt.KEEP and kv == "recompute" else interrupt
