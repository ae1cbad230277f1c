"""What a run does and what it waits for.

Each role has a `Timeline`; together they make the time budget (`bound_by` names the role that limits the run) and the trace. An
`Observer` holds them, writes metrics, trace and kept rollouts, and drives the screen. Roles in other processes keep a
`ProcessTimeline` and report it to the launcher's `MirroredTimeline`.
"""

from typing import TYPE_CHECKING

from headrace.front_door import front_door

if TYPE_CHECKING:
    from headrace.observe.inspect import InspectError as InspectError, read_rollouts as read_rollouts, render as render
    from headrace.observe.observer import Observer as Observer
    from headrace.observe.process_memory import peak_memory as peak_memory
    from headrace.observe.remote import MirroredTimeline as MirroredTimeline, ProcessTimeline as ProcessTimeline
    from headrace.observe.report import final_report as final_report
    from headrace.observe.screen import Screen as Screen, open_screen as open_screen, share as share
    from headrace.observe.settings import ObserveSettings as ObserveSettings
    from headrace.observe.sinks import read_metrics as read_metrics
    from headrace.observe.spans import WAITING as WAITING, Signal as Signal, Timeline as Timeline, bound_by as bound_by
else:
    __getattr__ = front_door(__name__)
