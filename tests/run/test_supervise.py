"""Watching over processes, with none of them started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import SyncError
from headrace.launch.processes import Child, RoleFailed
from headrace.launch.supervise import Supervisor
from headrace.rpc import RemoteError
from headrace.sync import Lineage

if TYPE_CHECKING:
    from pathlib import Path


class Watched(Supervisor):
    """A process that begins at once."""

    async def _connect(self, child: Child, channels: tuple[str, ...]) -> dict[str, asyncio.Future[Any]]:
        child.peer = SimpleNamespace()  # type: ignore[assignment]
        return dict.fromkeys(channels)  # type: ignore[arg-type]

    async def _build(self, child: Child, *, index: int) -> dict[str, Any]:
        return {"relay": ""}

    async def _take_data(self, *_: object) -> None:
        """There is none."""


def test_an_engine_that_weights_do_not_reach_while_it_starts_may_be_started_again(tmp_path: Path) -> None:
    """`_replace` does so for what is a `RoleFailed`; anything else ends the run."""

    async def main() -> None:
        supervisor = Watched(
            SimpleNamespace(recipe=None),  # type: ignore[arg-type]
            model="",
            lineage=Lineage("life"),
            timelines={"engine": SimpleNamespace(take=None)},  # type: ignore[dict-item]
            say=print,
        )

        async def refuses(*_: object) -> None:
            raise SyncError("version 3: the link is broken")

        supervisor.pool.join = refuses  # type: ignore[method-assign]
        child = Child("engine-1", "engine", SimpleNamespace(pid=1), tmp_path / "engine-1.log")  # type: ignore[arg-type]
        with pytest.raises(RoleFailed, match=r"engine-1 .*version 3: the link is broken\n  log .*engine-1\.log"):
            await supervisor.start_engine(child, index=1)

    asyncio.run(main())


class Fleeting:
    """Processes that are only names; as many of the first ones as it is told are killed while they start."""

    def __init__(self, logs: Path, *, restarts: int, ends: list[str]) -> None:
        self.recipe = SimpleNamespace(engine=SimpleNamespace(restarts=restarts))
        self._logs, self._ends = logs, ends
        self.spawned: list[Child] = []

    def spawn(self, role: str, name: str) -> Child:
        process = SimpleNamespace(pid=len(self.spawned), kill=lambda: None, poll=lambda: -9)
        self.spawned.append(Child(name, role, process, self._logs / f"{name}.log"))  # type: ignore[arg-type]
        return self.spawned[-1]


class Starting(Watched):
    """Whose processes end, raise, hang or come up while they are built, as told."""

    async def _build(self, child: Child, *, index: int) -> dict[str, Any]:
        how = self._processes._ends.pop(0) if self._processes._ends else "up"  # type: ignore[attr-defined]
        if how == "killed":
            child.lost.set()
            child.settled.set()
            raise await child.explain()
        if how == "raises":
            raise child.failed(RemoteError(kind="RuntimeError", message="out of memory"))
        if how == "hangs":
            child.give_up("has been loading its model for 600 s (deadline)")
            raise await child.explain()
        return {"relay": "", "index": index}


def start(
    tmp_path: Path, *ends: str, restarts: int = 2, is_first: bool = True
) -> tuple[Fleeting, list[str], RoleFailed | None]:
    """The processes there were, what was said, and what was raised."""
    processes, said = Fleeting(tmp_path, restarts=2, ends=list(ends)), []

    async def main() -> RoleFailed | None:
        timelines = {"engine": SimpleNamespace(take=None)}
        supervisor = Starting(processes, model="", lineage=Lineage("life"), timelines=timelines, say=said.append)  # type: ignore[arg-type]
        try:
            told = await supervisor.start_engine(processes.spawn("engine", "engine-1"), index=1, is_first=is_first)
        except RoleFailed as error:
            return error
        finally:
            supervisor.close()
        assert told["index"] == 1 and [member.name for member in supervisor.pool.members] == ["engine-1"]
        return None

    return processes, said, asyncio.run(main())


@pytest.mark.parametrize("is_first", [True, False])
def test_an_engine_killed_while_it_starts_is_started_again(tmp_path: Path, is_first: bool) -> None:
    processes, said, error = start(tmp_path, "killed", "killed", is_first=is_first)
    assert error is None and len(processes.spawned) == 3
    assert ["killed by SIGKILL" in line and f"started again ({n} of 2)" in line for n, line in enumerate(said, 1)] == [True] * 2


def test_restarts_of_engines_that_never_came_up_are_counted_too(tmp_path: Path) -> None:
    processes, said, error = start(tmp_path, "killed", "killed", "killed")
    assert isinstance(error, RoleFailed) and "killed by SIGKILL" in str(error) and "engine.restarts = 2 are spent" in str(error)
    assert len(processes.spawned) == 3 and len(said) == 2


@pytest.mark.parametrize(("how", "words"), [("raises", "out of memory"), ("hangs", "has been loading its model for 600 s")])
def test_what_the_first_start_raises_ends_the_run_at_once(tmp_path: Path, how: str, words: str) -> None:
    processes, said, error = start(tmp_path, how)
    assert isinstance(error, RoleFailed) and words in str(error) and len(processes.spawned) == 1 and not said
    processes, said, error = start(tmp_path, how, is_first=False)
    assert error is None and len(processes.spawned) == 2 and words in said[0]
