"""Heartbeats: who is heard, who is not, and what a run does about it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from helpers import small_run

from headrace.launch import heartbeat
from headrace.launch.heartbeat import HeartbeatSender, watch_launcher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "a" * 64
SILENCE = 0.4


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatSender]:
    monkeypatch.setattr(heartbeat, "_GRACE_SECONDS", 0.2)
    sender = HeartbeatSender(token=TOKEN, prefix="headrace-test", heartbeat=0.2)
    yield sender
    sender.close()


def listener(sender: HeartbeatSender, *, incarnation: int = 1) -> threading.Event:
    """A process that listens; the event is set when it has heard nothing for too long."""
    is_silent = threading.Event()
    order = SimpleNamespace(
        heartbeat_address=sender.address, token=TOKEN, name="engine-0", incarnation=incarnation, silence=SILENCE
    )
    watch_launcher(order, is_silent.set)  # type: ignore[arg-type]
    return is_silent


def test_heartbeats_come_while_the_main_thread_is_busy(sender: HeartbeatSender) -> None:
    sender.expect("engine-0", incarnation=1)
    is_silent = listener(sender)
    time.sleep(5 * SILENCE)
    assert not is_silent.is_set()


def test_silence_is_noticed_when_the_launcher_is_held_up_as_a_whole(sender: HeartbeatSender) -> None:
    sender.expect("engine-0", incarnation=1)
    is_silent = listener(sender)
    time.sleep(SILENCE)
    assert not is_silent.is_set()
    sender._loop.call_soon_threadsafe(time.sleep, 4 * SILENCE)
    assert is_silent.wait(10)


def test_a_closed_stream_is_silence_too(sender: HeartbeatSender) -> None:
    sender.expect("engine-0", incarnation=1)
    is_silent = listener(sender)
    time.sleep(SILENCE / 2)
    sender.expect("engine-0", incarnation=2)  # the first is no longer sent any
    assert is_silent.wait(10)


def test_an_earlier_incarnation_hears_nothing(sender: HeartbeatSender) -> None:
    sender.expect("engine-0", incarnation=2)
    assert listener(sender, incarnation=1).wait(10)


def test_a_reward_that_blocks_the_event_loop_for_many_heartbeats_loses_nobody(tmp_path: Path) -> None:
    """An async reward runs on the launcher's event loop; this one holds it as a breakpoint would."""
    calls = 0

    async def blocks(prompt: str, completion: str, **_: object) -> float:
        nonlocal calls
        calls += 1
        if calls == 20:
            time.sleep(8)  # noqa: ASYNC251  (three heartbeats of a second, two of grace, and more)
        return float(len(completion))

    run = small_run(tmp_path / "run", orchestrate="local", reward=blocks, held_out=None, steps=4, heartbeat=1.0)
    assert calls >= 20 and run.summary["status"] == "finished" and run.summary["accounting"]["failed"] == 0
    for name in ("engine-0", "trainer"):
        log = (run.folder / "logs" / f"{name}.log").read_text()
        assert log.count(f"{name} on cpu") == 1 and "heard nothing" not in log, log
