"""Knowing what a run does and what it waits for: spans, the time budget, metrics, the trace, the screen, the report."""

from headrace.observe.observer import Observer
from headrace.observe.spans import Signal, Timeline, bound_by

__all__ = ["Observer", "Signal", "Timeline", "bound_by"]
