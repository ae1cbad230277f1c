"""Samplers: which task is next, and what they remember."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from headrace.settings import ConfigError
from headrace.tasks import RowSource, SampledTasks, SamplerSettings, Task, TaskError, TaskStream, open_source, with_sampler

Stream = TaskStream | SampledTasks


def rows(count: int = 20) -> TaskStream:
    return TaskStream({"rows": (RowSource([{"prompt": str(i)} for i in range(count)], name="rows", seed=0), 1.0)}, seed=0)


def generated() -> TaskStream:
    return TaskStream({"digits": (open_source("builtin:sort_digits", seed=0, split="train"), 1.0)}, seed=0)


def sampled(stream: TaskStream, *, given: Any = None, **settings: Any) -> Stream:
    return with_sampler(stream, SamplerSettings(**settings), seed=3, success_at=1.0, given=given)


def draw(tasks: Stream, count: int, rewards: Any, *, start: int = 0) -> list[Task]:
    """Versions of four groups each, whose rewards are `rewards(task)`."""
    drawn = []
    for number in range(start, start + count):
        drawn.append(tasks.next())
        tasks.report(number, drawn[-1], rewards(drawn[-1]))
        if number % 4 == 3:
            tasks.hand_over()
    return drawn


def some_learnable(task: Task) -> list[float]:
    return [0.0, 1.0, 0.0, 0.0] if task.index % 10 == 0 else [0.0] * 4


def test_shuffle_is_the_stream_itself() -> None:
    stream = rows()
    assert sampled(stream) is stream


@pytest.mark.parametrize("make", [rows, generated])
def test_learnable_tasks_are_drawn_more_often_and_new_ones_still_come(make: Any) -> None:
    drawn = draw(sampled(make(), kind="learnable"), 400, some_learnable)
    share = sum(task.index % 10 == 0 for task in drawn[100:]) / 300
    assert share > 0.35, "a tenth of all tasks are learnable"
    assert len({task.index for task in drawn}) == 20 if make is rows else len({task.index for task in drawn}) > 150
    assert all(task == make().get(task.source, task.index) for task in drawn[-20:])


def test_what_is_no_longer_learnable_is_left() -> None:
    tasks = sampled(rows(), kind="learnable")
    draw(tasks, 200, some_learnable)
    later = draw(tasks, 200, lambda task: [1.0] * 4 if task.index % 10 == 0 else [0.0, 1.0])
    assert sum(task.index % 10 == 0 for task in later[100:]) < 15, "0 and 10 are solved: only new draws bring them"


def test_a_task_in_flight_is_not_drawn_again_from_memory() -> None:
    tasks = sampled(rows(100), kind="learnable", explore=0.0)
    draw(tasks, 100, lambda task: [0.0, 1.0])
    assert max(Counter(tasks.next().index for _ in range(100)).values()) == 1


def test_solved_tasks_are_skipped_until_all_are() -> None:
    tasks = sampled(rows(10), skip_solved=2)
    drawn = draw(tasks, 60, lambda task: [1.0] * 4 if task.index < 9 else [0.0] * 4)
    counts = Counter(task.index for task in drawn[40:])
    assert counts == {9: 20}, "twice in a row each, then only what is not solved"
    assert draw(tasks, 8, lambda _: [1.0] * 4), "with all solved, the next is drawn"
    assert len(draw(tasks, 8, lambda _: [1.0] * 4)) == 8


def test_failed_tasks_come_back() -> None:
    plain, retrying = (draw(sampled(generated(), **kw), 200, some_learnable) for kw in ({}, {"retry_failed": 0.5}))
    assert len({task.index for task in plain}) == 200
    counts = Counter(task.index for task in retrying)
    assert 60 < 200 - len(counts) < 140 and all(index % 10 for index, count in counts.items() if count > 1)


@pytest.mark.parametrize("settings", [{"kind": "learnable"}, {"skip_solved": 1, "retry_failed": 0.3}, {"kind": "own"}])
def test_a_restored_sampler_goes_on_with_the_very_next_task(settings: dict) -> None:
    given = Curriculum if settings.pop("kind", "") == "own" else None
    settings = settings or ({} if given else {"kind": "learnable"})
    first, second = (sampled(rows(), given=given, **settings) for _ in range(2))
    draw(first, 50, some_learnable)  # two reports are not handed over yet
    second.restore(json.loads(json.dumps(first.state())))
    assert draw(second, 60, some_learnable, start=50) == draw(first, 60, some_learnable, start=50)


def test_the_memory_is_bounded() -> None:
    tasks = sampled(generated(), kind="learnable", remember=16)
    draw(tasks, 100, lambda task: [0.0, 1.0])
    assert len(tasks.state()["sampler"]["memory"]) == 16  # type: ignore[call-overload]


# A user's own


class Curriculum:
    """The rows in order, each until it is solved."""

    def __init__(self, stream: TaskStream, *, seed: int, first: int = 0) -> None:
        self.stream, self.place = stream, first
        self.seen: list[int] = []

    def next(self) -> Task:
        return self.stream.get("rows", self.place)

    def report(self, task: Task, rewards: list[float]) -> None:
        self.seen.append(task.index)
        self.place += bool(rewards and min(rewards) == 1.0)

    def state(self) -> int:
        return self.place

    def restore(self, state: int) -> None:
        self.place = state


def test_a_curriculum_of_ones_own_by_name(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, stream, *, seed, first): self.stream, self.place = stream, first\n"
        "    def next(self): return self.stream.get('rows', self.place)\n"
        "    def report(self, task, rewards): self.place += 1\n"
        "    def state(self): return self.place\n"
        "    def restore(self, state): self.place = state\n"
    )
    tasks = sampled(rows(), kind=f"{tmp_path / 'mine.py'}:Mine", options={"first": 5})
    assert [task.index for task in draw(tasks, 8, some_learnable)] == [5] * 4 + [9] * 4


def test_reports_arrive_in_the_order_of_submission() -> None:
    made: list[Curriculum] = []

    def make(stream: TaskStream, *, seed: int) -> Curriculum:
        made.append(Curriculum(stream, seed=seed))
        return made[0]

    tasks = sampled(rows(), given=make)
    for number in (3, 1, 2, 0):
        tasks.report(number, Task({"prompt": ""}, "rows", number), [0.0])
    assert made[0].seen == []
    tasks.hand_over()
    assert made[0].seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"state": lambda self: {1, 2}}, "sampler=: state() is not JSON: Object of type set is not JSON serializable; return"),
        ({"report": None}, "sampler=: has no report(); a sampler has next, report, state, restore"),
        ({"__init__": lambda self: None}, "sampler=: "),
    ],
)
def test_a_sampler_that_cannot_work_is_refused_at_once(change: dict, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sampled(rows(), given=type("Mine", (Curriculum,), change))
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(("returned", "problem"), [({"prompt": "x"}, "not a headrace.tasks.Task"), (Task({}), "no 'prompt'")])
def test_what_next_returns_is_checked(returned: Any, problem: str) -> None:
    with pytest.raises(TaskError, match=problem):
        sampled(rows(), given=type("Mine", (Curriculum,), {"next": lambda self: returned})).next()


def test_a_missing_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler.kind = 'json:Mine': json has no 'Mine'"):
        sampled(rows(), kind="json:Mine")


def test_a_report_that_a_sampler_could_not_take_is_kept() -> None:
    class Fails:
        def __init__(self, stream: TaskStream, *, seed: int) -> None:
            self.stream, self.told = stream, []

        def next(self) -> Task:
            return self.stream.next()

        def report(self, task: Task, rewards: Any) -> None:
            if len(self.told) == 1:
                raise KeyError("mine")
            self.told.append(task)

        def state(self) -> int:
            return len(self.told)

        def restore(self, state: int) -> None: ...

    tasks = sampled(rows(), given=Fails)
    for number in range(3):
        tasks.report(number, tasks.next(), [1.0, 0.0])
    with pytest.raises(KeyError, match="mine"):
        tasks.hand_over()
    assert [number for number, *_ in tasks.state()["reports"]] == [1, 2]


def test_a_draw_does_not_search_through_all_that_is_solved(monkeypatch) -> None:
    stream = TaskStream({"rows": (RowSource([{"prompt": str(n)} for n in range(3000)], name="rows", seed=0), 1.0)}, seed=0)
    tasks = sampled(stream, skip_solved=1)
    draw(tasks, 3000, lambda _: [1.0, 1.0])
    before = stream.position
    tasks.next()
    assert stream.position - before <= 1001


def test_remembered_rows_that_are_gone_are_forgotten() -> None:
    tasks = sampled(rows(), kind="learnable", explore=0.0)
    draw(tasks, 40, lambda _: [0.0, 1.0])
    fewer = TaskStream({"rows": (RowSource([{"prompt": "0"}], name="rows", seed=0), 1.0)}, seed=0)
    state = tasks.state()
    again = sampled(fewer, kind="learnable", explore=0.0)
    again.restore(state)
    assert {again.next().index for _ in range(20)} == {0}
