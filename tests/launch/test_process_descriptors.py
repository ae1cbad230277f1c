"""The processes of a run, with programs in their place that end at once."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.config import make_recipe
from headrace.launch.local import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN = "/proc/self/fd"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Where segments lie, and where sockets do, whose paths must be short."""
    for folder in ("shared", "logs"):
        (tmp_path / folder).mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        yield tmp_path / "shared", Path(temporary)


def processes(places: tuple[Path, Path]) -> LocalProcesses:
    return LocalProcesses(make_recipe({"sync.folder": str(places[0])}), places[0].parent)


@pytest.fixture(autouse=True)
def short_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for Python in the processes that are started."""
    program = shutil.which("true")
    assert program is not None
    monkeypatch.setattr(sys, "executable", program)


@pytest.mark.skipif(not os.path.isdir(OPEN), reason="this system does not list open files")
def test_a_process_that_was_replaced_leaves_no_descriptor(places: tuple[Path, Path]) -> None:
    async def main() -> None:
        with processes(places) as held:
            await held.listen()
            await start_and_end(held)
            gc.collect()  # what earlier tests left open
            before = len(os.listdir(OPEN))
            for _ in range(3):
                await start_and_end(held)
            assert len(os.listdir(OPEN)) == before

    async def start_and_end(held: LocalProcesses) -> None:
        process = held.start_process(held.place("engine", 0))
        process.watch_end()
        held.introduce(process)
        await process.ended.wait()

    asyncio.run(main())


async def test_what_a_run_left_whose_processes_were_all_killed_goes_when_the_next_starts(places: tuple[Path, Path]) -> None:
    killed = processes(places)
    await killed.listen()
    for folder in places:
        (folder / f"{killed.prefix}-1-0").touch()
    with processes(places) as alive:
        await alive.listen()
        assert all((folder / f"{killed.prefix}-1-0").exists() for folder in places), "it was alive"
        for claim in killed.claims:
            assert claim._descriptor is not None
            os.close(claim._descriptor)  # as the system does when it ends
        with processes(places):
            for folder in places:
                assert not list(folder.glob(f"{killed.prefix}*")) and list(folder.glob(f"{alive.prefix}*"))
    assert not any(list(folder.iterdir()) for folder in places)
