"""What a run does and what it waits for.

Each role has a `Timeline`; together they make the time budget (`bound_by` names the role that limits the run) and the trace. An
`Observer` holds them, writes metrics, trace and kept rollouts, and drives the screen. Roles in other processes keep a
`ProcessTimeline` and report it to the launcher's `MirroredTimeline`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.observe.inspect import read_rollouts, render
    from headrace.observe.observer import EVENTS, Observer
    from headrace.observe.process_memory import peak_memory
    from headrace.observe.report import evaluation_table, final_report
    from headrace.observe.screen import held_out_line, open_screen
    from headrace.observe.settings import ObserveSettings
    from headrace.observe.sinks import Sink, read_lines, read_metrics
    from headrace.observe.timeline import WAITING, MirroredTimeline, ProcessTimeline, Signal, Timeline, bound_by
else:
    __getattr__ = front_door(__name__)
