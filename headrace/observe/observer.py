"""The one object that every role of a run reports to."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

from headrace.observe.inspect import kept_files
from headrace.observe.screen import Screen
from headrace.observe.settings import ObserveSettings
from headrace.observe.sinks import JsonLines, Sink, TensorBoard, WeightsAndBiases, open_sinks, remove_oldest
from headrace.observe.timeline import STATES, MirroredTimeline, Timeline
from headrace.observe.trace import Trace
from headrace.records import encode, pack_rollouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from headrace.observe.timeline import Budget, Slice
    from headrace.records import Rollout


EVENTS = "events.jsonl"
"""Settings that were changed and stops, each with the version that was the newest."""


class Observer:
    """Timelines, metrics, trace, kept rollouts and the screen of one run. Without a folder it writes nothing; a failed write
    does not stop the run. `elsewhere`: roles in other processes; `restored`: the version that a run resumes from;
    `listener`: one more sink of the metrics."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        screen: Screen | None = None,
        sinks: tuple[str, ...] = (),
        trace: bool = False,
        max_gb: float = ObserveSettings.max_gb,
        restored: int | None = None,
        config: Mapping[str, Any] | None = None,
        elsewhere: Sequence[str] = (),
        listener: Sink | None = None,
    ) -> None:
        self.screen: Screen = screen or Screen()
        self.folder = folder
        self._sinks: list[Sink] = open_sinks(sinks, folder, restored=restored, config=config or {}) if folder else []
        if listener is not None:
            self._sinks.append(listener)
        if folder and (folder / EVENTS).exists():
            JsonLines(folder / EVENTS, restored=restored).close()  # what comes after that version will happen again
        self._max_bytes = int(max_gb * 1e9)
        self._trace = Trace(folder / "trace.json", max_bytes=self._max_bytes) if folder and trace else None
        if self._trace is not None:
            self._sinks.append(self._trace)
        self._timelines = {
            role: (MirroredTimeline if role in elsewhere else Timeline)(role, on_slice=self._on_slice) for role in STATES
        }
        self._before: dict[str, float] = {}
        self._keeping = threading.Lock()

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

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """The time in this block is not part of the time budget."""
        with contextlib.ExitStack() as blocks:
            for timeline in self._timelines.values():
                blocks.enter_context(timeline.left_out())
            yield

    def budget(self) -> Budget:
        """Every role's shares of time, which sum to 1."""
        return {role: timeline.shares() for role, timeline in self._timelines.items()}

    @property
    def occupancy(self) -> float:
        """The share of slots in use, averaged over decode steps."""
        engine = self._timelines["engine"]
        return engine.occupied / engine.slots if engine.slots else 0.0

    def version(self, version: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """After a version is trained: write its metrics, and the seconds in each state since the last version. Returns the
        row as written."""
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
        return {"version": version, **metrics, **seconds}

    def event(self, version: int, event: Mapping[str, Any]) -> None:
        """Write something that happened once `version` was trained to events.jsonl."""
        if self.folder is not None:
            try:
                with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"version": version, **event}) + "\n")
            except OSError as error:
                self.screen.say(f"{EVENTS} could not be written: {error}; the run goes on")

    def held_out(self, version: int, metrics: Mapping[str, Any]) -> None:
        """After an evaluation of a version: write its metrics, which may come after those of later versions."""
        for sink in self._sinks.copy():
            if sink is not self._trace:
                self._write(sink, sink.write, version, metrics)

    def keep_rollouts(self, version: int, rollouts: Sequence[Rollout]) -> Path | None:
        """Write them for `headrace inspect`, over any of the same version, and remove older ones that leave no room for them.
        Returns the file, or None if it was not written. Any thread may call it."""
        if self.folder is None:
            return None
        path, size, room = self.folder / "rollouts" / f"step-{version}.wire", 0, -1
        try:
            path.parent.mkdir(exist_ok=True)
            with self._keeping, path.open("wb") as file:
                for number, rollout in enumerate(rollouts):
                    frame = encode(pack_rollouts([rollout]))
                    size += len(frame)
                    if size > self._max_bytes:
                        what = f"{number} of {len(rollouts)} rollouts of step {version} are kept"
                        self.screen.say(f"{what}: observe.max_gb = {self._max_bytes / 1e9:g} has no room for more")
                        break
                    if size > room:
                        older = [each for each in kept_files(self.folder) if each != path]
                        room = self._max_bytes - remove_oldest(older, max_bytes=self._max_bytes - size)
                    file.write(frame)
        except Exception as error:  # noqa: BLE001  (as for sinks)
            path.unlink(missing_ok=True)
            self.screen.say(f"the rollouts of step {version} are not kept: {error}")
            return None
        return path

    def show_rollouts(self, version: int, rows: Sequence[Mapping[str, Any]], *, num_tabled: int, num_printed: int) -> None:
        """Write the first rows as a table to each sink that has tables, and print the first of them. Any
        thread may call it."""
        if rows[:num_tabled]:
            for sink in self._sinks.copy():
                if isinstance(sink, TensorBoard | WeightsAndBiases):
                    self._write(sink, sink.write_table, version, rows[:num_tabled])
        for row in rows[:num_printed]:
            numbers = (f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, float))
            self.screen.say(f"version {version}  {row['prompt']!r} -> {row['completion']!r}  {', '.join(numbers)}")

    def close(self) -> None:
        self.screen.close()
        for timeline in self._timelines.values():
            timeline.end()
        sinks, self._sinks = self._sinks, []  # slices that still come are not written
        for sink in sinks:
            self._write(sink, sink.close)

    def _on_slice(self, track: str, piece: Slice) -> None:
        if self._trace is not None and self._trace in self._sinks:
            self._write(self._trace, self._trace.show, track, piece)

    def _write(self, sink: Sink, write: Callable[..., object], *arguments: object) -> None:
        """Write to a sink; if it fails, drop it."""
        try:
            write(*arguments)
        except Exception as error:  # noqa: BLE001  (a full disk, or whatever a metrics service raises)
            self.screen.say(f"{type(sink).__name__} is no longer written: {error}; the run goes on")
            self._sinks = [each for each in self._sinks if each is not sink]
