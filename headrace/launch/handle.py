"""`headrace.start`: a run in a thread of the caller's process, so that its rewards and callbacks may be any objects.

The thread's event loop is the run's launcher; with `orchestrate = "local"` the work is done in other processes, and the
caller's program has its thread to itself. Signals stay with the caller. When the program ends, the run is stopped and saved
first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from headrace.errors import without_our_frames
from headrace.launch.launcher import launch
from headrace.launch.stop import SIGNAL_SECONDS
from headrace.run import Change, changed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headrace.config import Recipe
    from headrace.launch.inputs import UserInputs
    from headrace.launch.launcher import Launch, RunResult


class RunKilled(RuntimeError):
    """`RunHandle.kill` ended the run at once, or `stop` while no trainer was there to save it."""


class RunHandle:
    """A run that goes on in the background. As a context manager it waits for the end, or stops the run if the block raises."""

    def __init__(self, recipe: Recipe, given: UserInputs, how: Launch) -> None:
        self._rows: list[dict[str, Any]] = []
        self._evaluated: dict[int, Mapping[str, Any]] = {}
        """An evaluation whose version's metrics are still to come."""
        self._requests: list[Change] = []
        self._recipe, self._stop = recipe, how.stop
        self._has_news = threading.Condition()
        self._future: Future[RunResult] = Future()
        how = dataclasses.replace(how, requests=self._requests, listener=self)
        self._thread = threading.Thread(target=self._run, args=(recipe, given, how), name="headrace", daemon=True)
        end = weakref.WeakMethod(self._end)
        # Before `concurrent.futures` ends its threads, which a run needs to save; at `atexit` they are gone.
        threading._register_atexit(lambda: (method := end()) and method())  # type: ignore[attr-defined]
        self._thread.start()

    @property
    def version(self) -> int:
        """The newest version whose metrics are written; 0 before the first."""
        return int(self.metrics.get("version", 0))

    @property
    def metrics(self) -> dict[str, Any]:
        """Of that version, as in metrics.jsonl; empty before the first."""
        rows = self._rows
        return dict(rows[-1]) if rows else {}

    @property
    def is_running(self) -> bool:
        return not self._future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds. Returns whether the run has ended, however it did."""
        until = time.monotonic() + (math.inf if timeout is None else timeout)
        return self._wait_for(self._future.done, until)

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait for the end, and return or raise what `headrace.train` would. Raises `TimeoutError` if it has not ended."""
        if not self.wait(timeout):
            raise TimeoutError(f"the run has not ended within {timeout:g} seconds")
        return self._future.result()

    def stop(self) -> None:
        """Ask the run to end with a checkpoint, after the batch in training, which is given up if parts of it are missing and
        no step of it is made. Returns at once; `result` has the result."""
        if not self._stop.num_made:
            self._stop.make("handle.stop")

    def kill(self) -> None:
        """End the run without saving; the same call resumes from its last checkpoint. `result` then raises `RunKilled`."""
        while self._stop.num_made < 2:
            self._stop.make("handle.kill")

    def change(self, key: str, value: object) -> None:
        """Change a setting for every batch not started once the newest version is trained. Raises if it cannot change."""
        self._recipe = changed(self._recipe, key, value, version=self.version)
        self._requests.append(Change(key=key, value=value, by="handle.change"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The metrics of each version since the start, as they come, until the run ends; then raises if the run failed. After
        a trainer is restarted, versions since its checkpoint come again."""
        index = 0
        while True:
            self._wait_for(lambda seen=index: len(self._rows) > seen or self._future.done())  # type: ignore[misc]
            if index == len(self._rows):
                self.result()
                return
            yield dict(self._rows[index])
            index += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.result()
        else:
            self._end()

    def __repr__(self) -> str:
        return f"RunHandle({'running' if self.is_running else 'ended'}, version {self.version})"

    # A sink of metrics, which the run's thread calls

    def write(self, version: int, metrics: Mapping[str, Any]) -> None:
        """An evaluation's metrics come apart from its version's, before them if the trainer waits: they join its row and make
        none of their own."""
        with self._has_news:
            row = next((row for row in reversed(self._rows) if row["version"] == version), None)
            if "reward" in metrics:
                self._rows.append({"version": version, **self._evaluated.pop(version, {}), **metrics})
            elif row is None or not row.keys().isdisjoint(metrics):  # or the version is trained again
                self._evaluated = {version: metrics}
            else:
                row.update(metrics)
            self._has_news.notify_all()

    def close(self) -> None:
        """A restarted trainer's metrics go on from here."""

    def _run(self, recipe: Recipe, given: UserInputs, how: Launch) -> None:
        try:
            self._future.set_result(launch(recipe, given, how))
        except asyncio.CancelledError:
            what = "killed" if self._stop.num_made > 1 else "stopped while it waited for hosts"
            self._future.set_exception(RunKilled(f"the run was {what}; the same call resumes from its last checkpoint"))
        except BaseException as error:  # noqa: BLE001  (`result` raises it)
            self._future.set_exception(without_our_frames(error))
        with self._has_news:
            self._has_news.notify_all()

    def _wait_for(self, holds: Callable[[], bool], until: float = math.inf) -> bool:
        with self._has_news:
            while not holds() and (left := until - time.monotonic()) > 0:
                self._has_news.wait(min(left, SIGNAL_SECONDS))
            return holds()

    def _end(self) -> None:
        """Stop and wait; an interrupt meanwhile kills the run."""
        self.stop()
        while self.is_running:
            try:
                self.wait()
            except KeyboardInterrupt:
                self.kill()
