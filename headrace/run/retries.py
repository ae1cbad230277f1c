"""`staleness.rejected = "retry"`: tasks whose group was rejected are submitted again, under a new group number."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

from headrace.tasks import Task

MAX_SUBMISSIONS = 3
"""Of one task. Without a bound, tasks that always take too long would fill every place behind the gate."""


class Retries:
    """The rejected tasks of one policy that wait to be submitted again."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Task, int]] = deque()
        """With how often each was submitted."""
        self._submissions: dict[int, int] = {}
        """How often the task of a group was submitted before, by the group's number."""
        self._tasks: dict[int, Task] = {}
        """Of groups that wait in the buffer, where they may be without their episodes."""
        self.num_resubmitted = 0
        """Groups, since this process started."""

    def next_task(self, number: int) -> Task | None:
        """The task that waits longest, to be submitted as group `number`; None if none waits."""
        if not self._waiting:
            return None
        task, self._submissions[number] = self._waiting.popleft()
        self.num_resubmitted += 1
        return task

    def keep(self, number: int, task: Task) -> None:
        """Group `number` enters the buffer."""
        self._tasks[number] = task

    def add(self, number: int, task: Task | None = None) -> None:
        """Group `number` was rejected; `task` if it has not entered the buffer."""
        submissions = self._submissions.get(number, 0) + 1
        if submissions < MAX_SUBMISSIONS:
            self._waiting.append((task or self._tasks[number], submissions))

    def forget(self, number: int) -> None:
        """The group was trained or dropped."""
        self._submissions.pop(number, None)
        self._tasks.pop(number, None)

    def state(self) -> dict[str, Any]:
        waiting = [[*dataclasses.astuple(task), submissions] for task, submissions in self._waiting]
        return {"waiting": waiting, "submissions": list(self._submissions.items())}

    def restore(self, state: dict[str, Any]) -> None:
        self._waiting = deque((Task(*task), submissions) for *task, submissions in state["waiting"])
        self._submissions = dict(state["submissions"])
