"""The one object that every role of a run reports to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.observe.screen import Screen
from headrace.observe.sinks import Sink, open_sinks
from headrace.observe.timeline import STATES, MirroredTimeline, Timeline
from headrace.observe.trace import Trace
from headrace.records import encode, pack_rollouts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from headrace.observe.timeline import Budget
    from headrace.records import Rollout


class Observer:
    """Timelines, metrics, trace, kept rollouts and the screen of one run. Without a folder it writes nothing; a failed write
    does not stop the run. `elsewhere`: roles in other processes; `restored`: the version that a run resumes from."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        screen: Screen | None = None,
        sinks: tuple[str, ...] = (),
        trace: bool = False,
        restored: int | None = None,
        config: Mapping[str, Any] | None = None,
        elsewhere: Sequence[str] = (),
    ) -> None:
        self.screen: Screen = screen or Screen()
        self._folder = folder
        self._sinks: list[Sink] = open_sinks(sinks, folder, restored=restored, config=config or {}) if folder else []
        self._trace = Trace(folder / "trace.json") if folder and trace else None
        if self._trace is not None:
            self._sinks.append(self._trace)
        self._timelines = {
            role: (MirroredTimeline if role in elsewhere else Timeline)(role, on_span=self._on_span) for role in STATES
        }
        self._before: dict[str, float] = {}

    def timeline(self, role: str) -> Timeline:
        return self._timelines[role]

    def mirrored(self) -> dict[str, MirroredTimeline]:
        """The timelines of roles in other processes."""
        return {role: timeline for role, timeline in self._timelines.items() if isinstance(timeline, MirroredTimeline)}

    def start(self) -> None:
        """Start the time budget's window, just before the first rollout."""
        for timeline in self._timelines.values():
            timeline.start()
        self._before = {}

    def budget(self) -> Budget:
        """Every role's shares of time, which sum to 1."""
        return {role: timeline.shares() for role, timeline in self._timelines.items()}

    @property
    def occupancy(self) -> float:
        """The share of slots in use, averaged over decode steps."""
        engine = self._timelines["engine"]
        return engine.occupied / engine.slots if engine.slots else 0.0

    def version(self, version: int, metrics: Mapping[str, Any]) -> None:
        """After a version is trained: write its metrics, and the seconds in each state since the last version."""
        budget = self.budget()  # closes the current spans
        totals = {
            f"seconds/{role}/{state}": total
            for role, timeline in self._timelines.items()
            for state, total in timeline.totals.items()
        }
        seconds = {name: round(total - self._before.get(name, 0.0), 6) for name, total in totals.items()}
        self._before = totals
        for sink in self._sinks.copy():
            self._write(sink, sink.write, version, {**metrics, **seconds})
        self.screen.row({"version": version, **metrics}, budget)

    def keep_rollouts(self, version: int, rollouts: Sequence[Rollout]) -> Path | None:
        """Write them for `headrace inspect`, over any of the same version. Returns the file, or None if it was not written."""
        if self._folder is None:
            return None
        path = self._folder / "rollouts" / f"step-{version}.wire"
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("wb") as file:
                for rollout in rollouts:
                    file.write(encode(pack_rollouts([rollout])))
        except Exception as error:  # noqa: BLE001  (as for sinks)
            self.screen.say(f"the rollouts of step {version} are not kept: {error}")
            return None
        return path

    def close(self) -> None:
        self.screen.close()
        sinks, self._sinks = self._sinks, []  # spans that still come are not written
        for sink in sinks:
            self._write(sink, sink.close)

    def _on_span(self, role: str, state: str, start: float, stop: float) -> None:
        if self._trace is not None and self._trace in self._sinks:
            self._write(self._trace, self._trace.span, role, state, start, stop)

    def _write(self, sink: Sink, write: Callable[..., object], *arguments: object) -> None:
        """Write to a sink; if it fails, drop it."""
        try:
            write(*arguments)
        except Exception as error:  # noqa: BLE001  (a full disk, or whatever a metrics service raises)
            self.screen.say(f"{type(sink).__name__} is no longer written: {error}; the run goes on")
            self._sinks = [each for each in self._sinks if each is not sink]
