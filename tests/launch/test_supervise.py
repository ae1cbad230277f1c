"""Watching over processes through handles that start none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from headrace.config import make_recipe
from headrace.errors import SyncError
from headrace.launch.local import LocalProcesses
from headrace.launch.placement import Placement
from headrace.launch.process import RoleFailed, RoleProcess
from headrace.rpc import RemoteError, StreamClosed

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.launch.placement import Order


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

    def __init__(self, folder: Path, *ends: str, said: list[str]) -> None:
        super().__init__(make_recipe({"engine.restarts": 2}), folder)
        self._ends, self.started, self._say = list(ends), [], said.append
        self._timelines = {"engine": SimpleNamespace(take=None)}  # type: ignore[dict-item]

    def start_process(self, role: str, index: int) -> RoleProcess:
        name, incarnation = f"{role}-{index}", len(self.started) + 1
        where = placement(self._folder / f"{name}.log")
        process = RoleProcess(name, role, handle=FarProcess(), placement=where, index=index, incarnation=incarnation)
        self.started.append(process)
        return process

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


def test_an_engine_that_weights_do_not_reach_while_it_starts_may_be_started_again(tmp_path: Path) -> None:
    """`_replace` does so for what is a `RoleFailed`; anything else ends the run."""

    async def main() -> None:
        processes = Starting(tmp_path, said=[])

        async def refuses(*_: object) -> None:
            raise SyncError("version 3: the link is broken")

        processes.pool.join = refuses  # type: ignore[method-assign]
        with pytest.raises(RoleFailed, match=r"engine-1 .*version 3: the link is broken\n  log .*engine-1\.log"):
            await processes.start_engine(processes.start_process("engine", 1))
        processes._cancel_tasks()

    asyncio.run(main())


def start(tmp_path: Path, *ends: str, is_first: bool = True) -> tuple[list[RoleProcess], list[str], RoleFailed | None]:
    """The processes there were, what was said, and what was raised."""
    said: list[str] = []

    async def main() -> tuple[Starting, RoleFailed | None]:
        processes = Starting(tmp_path, *ends, said=said)
        try:
            told = await processes.start_engine(processes.start_process("engine", 1), is_first=is_first)
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
