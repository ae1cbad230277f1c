"""Shared fixtures: small models made once, and a cache folder that is not the user's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vllm_server import Running

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before anything imports Triton

_ASYNC_SECONDS, _LONG_ASYNC_SECONDS = 120, 600
"""Of an async test, and of a long one: enough on a slow machine, so that only one that hangs is ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests start processes come first: two workers then end at about the same time."""
    slow = ("tests/run", "tests/launch", "tests/chaos", "tests/bench")
    items.sort(key=lambda item: not item.nodeid.startswith(slow))


def pytest_collection_finish() -> None:
    """Half a million objects of the libraries are not traversed again with every collection, of which each run makes one."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Triton complains about objects that outlive it


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs async tests. What a fixture opens, an async context manager, is entered in the event loop of the test."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    seconds = _LONG_ASYNC_SECONDS if pyfuncitem.get_closest_marker("long") else _ASYNC_SECONDS

    async def main() -> None:
        async with asyncio.timeout(seconds), contextlib.AsyncExitStack() as stack:
            given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            for name, value in given.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**given)

    asyncio.run(main())
    return True


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warmed-up models and rescued checkpoints of the whole session."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["HEADRACE_CACHE"] = str(folder)
    return folder


class Clock:
    """Stands for the module `time`: it moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Timelines go by this clock, and the system keeps no thread from its processor."""
    clock = Clock()
    monkeypatch.setattr("headrace.observe.timeline.time", clock)
    monkeypatch.setattr("headrace.observe.timeline.ProcessTimeline._read_delay", lambda _: 0)
    return clock


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with an untrained `builtin:tiny`."""
    from headrace.model import ModelSettings
    from headrace.model.tiny import build_folder

    folder = tmp_path_factory.mktemp("tiny")
    build_folder(folder, ModelSettings(), seed=0)
    return str(folder)


@pytest.fixture(scope="session")
def vllm_server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A real vLLM server of the tiny model, where vLLM is set up."""
    import vllm_server

    if vllm_server.vllm_python() is None:
        pytest.skip(vllm_server.MISSING)
    with vllm_server.running(tiny_model, tmp_path_factory.mktemp("vllm") / "server.log") as server:
        yield server


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of five megabytes; only root may make one."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a file system needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
