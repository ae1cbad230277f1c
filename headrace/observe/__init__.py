"""Knowing what a run does and what it waits for: spans, the time budget, metrics, the trace, the screen, the report."""

from headrace.observe.observer import Observer
from headrace.observe.remote import MirroredTimeline, ProcessTimeline
from headrace.observe.spans import Signal, Timeline, bound_by

__all__ = ["MirroredTimeline", "Observer", "ProcessTimeline", "Signal", "Timeline", "bound_by"]
