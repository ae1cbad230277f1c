"""Watching over processes, with none of them started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import SyncError
from headrace.orchestrate.processes import Child, RoleFailed
from headrace.orchestrate.supervise import Supervisor
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
