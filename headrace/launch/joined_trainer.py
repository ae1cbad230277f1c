"""A trainer on hosts that share no filesystem with the launcher: its checkpoints cross over the hosts' connections."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from headrace.durable import fingerprint, sync
from headrace.rpc import RemoteError, StreamClosed
from headrace.trainer import RemoteTrainer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from pathlib import Path

    from headrace.durable import Fingerprints
    from headrace.launch.hosts import Host
    from headrace.launch.process import RoleProcess


class JoinedTrainer(RemoteTrainer):
    """Each rank writes its files into a folder of its host, and the launcher fetches them. To load a checkpoint, each host gets
    all of it. Both copies are then removed from the host."""

    def __init__(self, ranks: Sequence[RoleProcess], *, hosts: Sequence[Host], deadline: float) -> None:
        super().__init__(ranks, deadline=deadline)
        self._hosts = tuple(hosts)  # of each rank

    def _folder_of(self, rank: RoleProcess, folder: Path) -> str:
        return f"{rank.placement.run_folder}/{folder.name.strip('.')}-{self._ranks[0].incarnation}"  # ranks start together

    async def _saved(self, folder: Path, answers: Sequence[asyncio.Future[Any]]) -> Fingerprints:
        try:
            saved: list[Fingerprints] = await self._collect("save", self._ranks, answers)
            for rank, host, files in zip(self._ranks, self._hosts, saved, strict=True):
                await self._across("save", rank, asyncio.to_thread(_fetch, host, self._folder_of(rank, folder), files, folder))
        finally:
            await self._remove(folder)
        return {name: found for files in saved for name, found in files.items()}

    async def load(self, folder: Path) -> None:
        first = {host: rank for rank, host in reversed(list(zip(self._ranks, self._hosts, strict=True)))}
        try:
            for host, rank in first.items():
                await self._across("load", rank, asyncio.to_thread(host.deliver, folder, self._folder_of(rank, folder)))
            await super().load(folder)
        finally:
            await self._remove(folder)

    async def _across(self, name: str, rank: RoleProcess, copying: Awaitable[None]) -> None:
        try:
            await copying
        except StreamClosed as error:
            raise await rank.explain() from error
        except RemoteError as error:
            raise self._raised(rank, name, error) from error

    async def _remove(self, folder: Path) -> None:
        """Waits for it: the next to be saved may have the same name."""
        for rank, host in zip(self._ranks, self._hosts, strict=True):
            with contextlib.suppress(StreamClosed):
                await asyncio.to_thread(host.remove, self._folder_of(rank, folder))


def _fetch(host: Host, place: str, files: Fingerprints, folder: Path) -> None:
    """Copy a rank's files into a folder here, and check that they are what it wrote."""
    host.fetch(place, files, folder)
    for name, expected in files.items():
        if fingerprint(folder / name) != expected:
            raise OSError(f"{name} has changed on its way from {host.name}")
        sync(folder / name)
