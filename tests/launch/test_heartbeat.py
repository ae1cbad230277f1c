"""Heartbeats: who is heard, who is not, and what a run does about it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from helpers import small_run

from headrace.config import make_recipe
from headrace.launch import heartbeat
from headrace.launch.child import RoleWorker
from headrace.launch.heartbeat import send_heartbeats, watch_launcher
from headrace.launch.placement import place_on_this_host
from headrace.launch.process import ChildProcess, Place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SILENCE = 1.0


class Pipe:
    """Stands for the handle of a process, which listens to the other end of the pipe."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self.is_silent = threading.Event()
        self.seconds_held_up = 0.0
        self.launcher_ended = watch_launcher(self._reading, SILENCE, self.is_silent.set)

    def beat(self) -> None:
        time.sleep(self.seconds_held_up)
        os.write(self._writing, b"\n")

    def close(self) -> None:
        os.close(self._writing)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    monkeypatch.setattr(heartbeat, "_GRACE_SECONDS", 0.5)
    pipe = Pipe()
    stop = send_heartbeats(lambda: [pipe], 0.2)  # type: ignore[list-item]
    yield pipe
    stop()


def test_heartbeats_come_while_the_main_thread_is_busy(pipe: Pipe) -> None:
    time.sleep(5 * SILENCE)
    assert not pipe.is_silent.is_set() and not pipe.launcher_ended.is_set()


def test_silence_is_noticed_when_the_launcher_is_held_up_as_a_whole(pipe: Pipe) -> None:
    time.sleep(SILENCE)
    assert not pipe.is_silent.is_set()
    pipe.seconds_held_up = 4 * SILENCE
    assert pipe.is_silent.wait(10) and not pipe.launcher_ended.is_set()


def test_a_launcher_that_ends_is_noticed_at_once() -> None:
    pipe = Pipe()
    pipe.beat()
    pipe.close()
    assert pipe.launcher_ended.wait(10) and not pipe.is_silent.is_set()
    assert pipe.is_silent.wait(10), "if its event loop does not notice the closed stream"


def test_a_process_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    """Such as a stopped one: its pipe is full at some time."""
    (tmp_path / "logs").mkdir()
    recipe = make_recipe({"threads": 1})
    placement = place_on_this_host(recipe, Place("trainer", "trainer"), run_folder=tmp_path, shared_folder=tmp_path)
    child = ChildProcess("trainer", placement)
    os.kill(child.pid, signal.SIGSTOP)
    for _ in range(100_000):
        child.beat()
    assert "stopped by SIGSTOP" in child.describe()
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.beat()  # does nothing


@pytest.mark.long
def test_a_reward_that_blocks_the_event_loop_for_many_heartbeats_loses_nobody(tmp_path: Path) -> None:
    """An async reward runs on the launcher's event loop; this one holds it as a breakpoint would."""
    calls = 0

    async def blocks(prompt: str, completion: str, **_: object) -> float:
        nonlocal calls
        calls += 1
        if calls == 20:
            time.sleep(14)  # noqa: ASYNC251  (three heartbeats of three seconds, two of grace, and more)
        return float(len(completion))

    run = small_run(tmp_path / "run", orchestrate="local", reward=blocks, held_out=None, steps=4, heartbeat=3.0)
    assert calls >= 20 and run.summary["status"] == "finished" and run.summary["accounting"]["failed"] == 0
    for name in ("engine-0", "trainer"):
        log = (run.folder / "logs" / f"{name}.log").read_text()
        assert log.count(f"{name} on cpu") == 1 and "heard nothing" not in log, log


def test_ranks_that_a_launcher_left_at_different_versions_rescue_into_one_folder(tmp_path: Path) -> None:
    async def rescue(rank: int, version: int, saving: asyncio.Barrier) -> str:
        async def abandon() -> None: ...

        async def save(folder: Path) -> None:
            await saving.wait()
            await asyncio.sleep(0.3 * rank)
            (folder / f"optimizer-{rank}").touch()

        worker: Any = RoleWorker.__new__(RoleWorker)
        placement = SimpleNamespace(run_folder=str(tmp_path))
        worker._order, worker._num_ranks = SimpleNamespace(placement=placement, index=rank, incarnation=2), 2
        return await worker._rescue(SimpleNamespace(version=version, abandon=abandon, save=save))

    async def both() -> list[str]:
        saving = asyncio.Barrier(2)
        return await asyncio.wait_for(asyncio.gather(rescue(0, 7, saving), rescue(1, 6, saving)), 10)

    in_vain = tmp_path / "checkpoints" / ".step-rescued-2.tmp"
    in_vain.mkdir(parents=True)
    (in_vain / ".saved-by-1").touch()
    words = asyncio.run(both())
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert folder.name == "rescued-7" and str(folder) in words[0] and str(folder) not in words[1]
    assert sorted(path.name for path in folder.iterdir()) == ["optimizer-0", "optimizer-1"]
