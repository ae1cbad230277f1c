"""Watching over processes through handles that start none."""

from __future__ import annotations

import asyncio
import math
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from headrace.config import make_recipe
from headrace.errors import SyncError
from headrace.launch.clock import ClockOffset
from headrace.launch.local import LocalProcesses
from headrace.launch.placement import Placement
from headrace.launch.process import Place, RestartBudget, RoleFailed, RoleProcess, TrainerLost
from headrace.observe.timeline import STATES, MirroredTimeline, ProcessTimeline, Slice
from headrace.rpc import Peer, RemoteError, StreamClosed, open_socket

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Clock

    from headrace.launch.placement import Order


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.launch.process._SHORTEST_PAUSE", 0.0)


class FarProcess:
    """A `ProcessHandle` of a process that is only a name, on a host that is none."""

    pid = 7

    def __init__(self) -> None:
        self.is_killed = False

    def order(self, order: Order) -> None:
        raise AssertionError("nobody is introduced here")

    def beat(self) -> None:
        raise AssertionError("nobody is introduced here")

    def kill(self) -> None:
        self.is_killed = True

    def wait(self) -> int:
        return -9

    def describe(self) -> str:
        return "process 7 on far"


def placement(log: Path) -> Placement:
    return Placement(
        host="far",
        address="far.example",
        device="cpu",
        receives_on="cpu",
        threads=1,
        run_folder=str(log.parent),
        log=str(log),
        shared_folder=str(log.parent),
    )


class Starting(LocalProcesses):
    """Whose processes are on that host, and end, raise, hang or come up while they are built, as told."""

    def __init__(self, folder: Path, *ends: str, said: list[str], count: int = 2) -> None:
        super().__init__(make_recipe({"engine.restarts": 2, "engine.count": count}), folder)
        self._ends, self.started, self._say = list(ends), [], said.append
        silent = SimpleNamespace(take=None, forget=lambda _: None)
        self._timelines = {"engine": silent, "trainer": silent}  # type: ignore[dict-item]

    def start_process(self, place: Place) -> RoleProcess:
        self.started.append(super().start_process(place))
        return self.started[-1]

    def _begin(self, place: Place) -> tuple[FarProcess, Placement]:
        return FarProcess(), placement(self._folder / f"{place.name}.log")

    async def _connect(self, process: RoleProcess) -> dict[str, asyncio.Future[Any]]:
        how = self._ends.pop(0) if self._ends else "up"

        async def build(name: str, **_: object) -> dict[str, Any]:
            assert name == "build"
            if how == "killed":
                RoleProcess.watch_end(process)
                await process.ended.wait()
                raise StreamClosed("the other end closed the stream")
            if how == "raises":
                raise RemoteError(kind="RuntimeError", message="out of memory")
            if how == "hangs":
                raise TimeoutError
            return {"relay": "", "index": process.index}

        process.streams["control"] = SimpleNamespace(call=build, stream=SimpleNamespace(close=lambda: None))  # type: ignore[assignment]
        process.open = self._open  # type: ignore[method-assign, assignment]
        process.watch_end = lambda: None  # type: ignore[method-assign]
        return {"control": None, "data": None}  # type: ignore[dict-item]

    async def _open(self, *_: object, **__: object) -> Any:
        async def run() -> None:
            await asyncio.Event().wait()

        return SimpleNamespace(run=run, stream=SimpleNamespace(close=lambda: None))


async def test_an_engine_that_weights_do_not_reach_while_it_starts_may_be_started_again(tmp_path: Path) -> None:
    """`_replace` does so for what is a `RoleFailed`; anything else ends the run."""
    processes = Starting(tmp_path, said=[])

    async def refuses(*_: object) -> None:
        raise SyncError("version 3: the link is broken")

    processes.pool.join = refuses  # type: ignore[method-assign]
    with pytest.raises(RoleFailed, match=r"engine-1 .*version 3: the link is broken\n  log .*engine-1\.log"):
        await processes.start_engine(processes.start_process(processes.place("engine", 1)))
    processes._cancel_tasks()


def start(tmp_path: Path, *ends: str, is_first: bool = True) -> tuple[list[RoleProcess], list[str], RoleFailed | None]:
    """The processes there were, what was said, and what was raised."""
    said: list[str] = []

    async def main() -> tuple[Starting, RoleFailed | None]:
        processes = Starting(tmp_path, *ends, said=said)
        try:
            told = await processes.start_engine(processes.start_process(processes.place("engine", 1)), is_first=is_first)
        except RoleFailed as error:
            return processes, error
        finally:
            processes._cancel_tasks()
        assert told["index"] == 1 and [engine.name for engine in processes.pool.engines] == ["engine-1"]
        return processes, None

    processes, error = asyncio.run(main())
    return processes.started, said, error


@pytest.mark.parametrize("is_first", [True, False])
def test_an_engine_killed_while_it_starts_is_started_again(tmp_path: Path, is_first: bool) -> None:
    started, said, error = start(tmp_path, "killed", "killed", is_first=is_first)
    assert error is None and [process.incarnation for process in started] == [1, 2, 3]
    assert ["killed by SIGKILL" in line and f"started again ({n} of 2)" in line for n, line in enumerate(said, 1)] == [True] * 2
    assert all("engine-1 (process 7 on far)" in line for line in said)
    assert [process.handle.is_killed for process in started] == [True, True, False]


def test_restarts_of_engines_that_never_came_up_are_counted_too(tmp_path: Path) -> None:
    started, said, error = start(tmp_path, "killed", "killed", "killed")
    assert isinstance(error, RoleFailed) and "killed by SIGKILL" in str(error) and "engine.restarts = 2 are spent" in str(error)
    assert len(started) == 3 and len(said) == 2


@pytest.mark.parametrize(("how", "words"), [("raises", "out of memory"), ("hangs", "has been loading its model for 600 s")])
def test_what_the_first_start_raises_ends_the_run_at_once(tmp_path: Path, how: str, words: str) -> None:
    started, said, error = start(tmp_path, how)
    assert isinstance(error, RoleFailed) and words in str(error) and len(started) == 1 and not said
    started, said, error = start(tmp_path, how, is_first=False)
    assert error is None and len(started) == 2 and words in said[0]


@pytest.mark.parametrize("ahead", [-3600.0, 0.0])
def test_the_slices_of_a_host_are_moved_to_this_hosts_clock(tmp_path: Path, ahead: float) -> None:
    processes, shown, offset = Starting(tmp_path, said=[]), list[Slice](), ClockOffset()
    processes._timelines["engine"] = MirroredTimeline("engine", on_slice=lambda _, each: shown.append(each))
    offset.add(ahead, within=0.001)
    process = SimpleNamespace(name="engine-1", role="engine", index=1, host=SimpleNamespace(ticks=offset))
    there = ProcessTimeline("engine")
    report = there.report() | {"slices": [(100.0 + ahead, 101.5 + ahead, {"decode": 1.5})]}
    processes._take_report(process, report)  # type: ignore[arg-type]
    assert shown == [Slice(100.0, 101.5, {"decode": 1.5})]


# Budgets


def spend(budget: RestartBudget) -> float | str:
    """The pause before a restart, or the last line of the error when none is left."""
    try:
        return budget.spend(RoleFailed("engine-0 was killed"))
    except RoleFailed as error:
        return str(error).splitlines()[-1].strip()


def test_restarts_wait_longer_each_time_and_no_longer_than_a_minute(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.launch.process.time", clock)
    monkeypatch.setattr("headrace.launch.process._SHORTEST_PAUSE", 1.0)
    budget, pauses = RestartBudget("engine.restarts", 100, window=3600), []
    for _ in range(9):
        pauses.append(spend(budget))
        clock.sleep(float(pauses[-1]) + 5)  # it dies again when it has worked for five seconds
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    clock.sleep(60)
    assert spend(budget) == 1, "it has worked for a minute"


def test_a_week_is_not_ended_by_its_fifth_lost_engine_but_an_hour_is(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.launch.process.time", clock)
    budget = RestartBudget("engine.restarts", 2, window=3600)
    for _ in range(20):
        assert isinstance(spend(budget), float)
        clock.sleep(1900)
    clock.sleep(3600)
    assert [isinstance(spend(budget), float) for _ in range(2)] == [True, True]
    clock.sleep(3500)
    assert spend(budget) == "engine.restarts = 2 are spent"
    clock.sleep(101)
    assert isinstance(spend(budget), float)


def test_restarts_of_a_trainer_come_back_with_a_newer_checkpoint(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.launch.process.time", clock)
    budget = RestartBudget("train.restarts", 1, window=math.inf)
    spend(budget)
    clock.sleep(1e6)
    assert spend(budget) == "train.restarts = 1 are spent"
    budget.refill()
    assert isinstance(spend(budget), float)


async def until_given_up(processes: Starting, name: str) -> None:
    for _ in range(10_000):
        if name in processes._given_up:
            return
        await asyncio.sleep(0.001)


def lose_engines(tmp_path: Path, *names: int, count: int) -> tuple[Starting, list[str]]:
    """Engines are lost one after another; nothing that is started in their place comes up."""
    said: list[str] = []

    async def main() -> Starting:
        processes = Starting(tmp_path, said=said, count=count)
        for index in range(count):
            await processes.start_engine(processes.start_process(processes.place("engine", index)))
        first = processes.started.copy()
        processes._ends = ["killed"] * 100
        for index in names:
            first[index].lost.set()
            first[index]._status = -9
            first[index].ended.set()
            await until_given_up(processes, f"engine-{index}")
        await asyncio.sleep(0)
        processes._cancel_tasks()
        return processes

    return asyncio.run(asyncio.wait_for(main(), 20)), said


def test_each_engine_has_its_own_restarts_and_the_run_goes_on_without_one_that_has_none_left(tmp_path: Path) -> None:
    processes, said = lose_engines(tmp_path, 1, 0, count=3)
    assert processes._failure is None and [engine.name for engine in processes.pool.engines] == ["engine-2"]
    assert [line.splitlines()[-1].strip() for line in said if "goes on" in line] == [
        "the run goes on with 2 of 3 engines",
        "the run goes on with 1 of 3 engines",
    ]
    assert sum("started again (2 of 2)" in line for line in said) == 2, "each of the two was started again twice"
    assert processes._losses()["engines_given_up"] == ["engine-1", "engine-0"]


def test_without_any_engine_the_run_ends(tmp_path: Path) -> None:
    processes, _ = lose_engines(tmp_path, 0, 1, count=2)
    assert isinstance(processes._failure, RoleFailed) and "engine.restarts = 2 are spent" in str(processes._failure)


@pytest.mark.parametrize("last_words", [False, True])
async def test_a_trainer_that_raised_is_not_taken_for_a_lost_one(tmp_path: Path, last_words: bool) -> None:
    """A lost one is started again; what one raised, it would raise again."""
    process = RoleProcess(Place("trainer", "trainer"), handle=FarProcess(), placement=placement(tmp_path / "trainer.log"))
    if last_words:
        process._take_last_words({"kind": "OutOfMemoryError", "message": "of 80 GB"})
    process.watch_end()
    error = await process.explain()
    assert isinstance(error, RoleFailed) and isinstance(error, TrainerLost) is not last_words


@pytest.mark.parametrize("lacks", ["totals", "slices", "swap"])
@pytest.mark.parametrize("how", ["report", "ping"])
async def test_an_engine_whose_report_lacks_a_key_is_lost_and_not_the_run(tmp_path: Path, how: str, lacks: str) -> None:
    processes = Starting(tmp_path, said=[])
    processes._timelines = {"engine": MirroredTimeline("engine", on_slice=lambda *_: None)}
    here, there = [await open_socket(end) for end in socket.socketpair()]
    totals = dict.fromkeys(STATES["engine"], 0.0)
    report: dict[str, Any] = {"totals": totals, "occupied": 0, "slots": 0, "state": "decode", "slices": []}
    del (totals if lacks in totals else report)[lacks]

    async def ping() -> dict[str, Any]:
        return {"state": {}, "report": report}

    engine = processes.start_process(processes.place("engine", 1))
    notices = {"report": lambda told: processes._take_report(engine, told)}
    engine.streams["control"] = Peer(here, notices=notices)
    far = Peer(there, calls={"ping": ping})
    answering = asyncio.ensure_future(far.run())
    processes._spawn(engine.read(engine.control))
    if how == "ping":
        processes._spawn(processes._keep_pinging(engine))
    else:
        far.notify("report", report)
    await asyncio.wait_for(engine.lost.wait(), 30)
    error = await engine.explain()
    assert (
        isinstance(error, RoleFailed) and "engine-1 (process 7 on far)" in str(error) and f"KeyError('{lacks}')" in str(error)
    )
    await asyncio.wait({answering})
    assert isinstance(answering.exception(), StreamClosed) and processes._failure is None and not processes._has_failed.is_set()
    processes._cancel_tasks()
