"""A trainer on hosts that share no filesystem with the launcher: its checkpoints cross over the hosts' connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from headrace.durable import fingerprint, sync
from headrace.rpc import RemoteError, StreamClosed
from headrace.trainer import RemoteTrainer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from headrace.durable import Fingerprints
    from headrace.launch.hosts import Host
    from headrace.launch.process import RoleProcess


class JoinedTrainer(RemoteTrainer):
    """Each rank writes its files into a folder of its host, and the launcher fetches them. To load a checkpoint, each host gets
    all of it, once. Both copies are then removed from the host. Hosts do so side by side, the ranks of one in turn."""

    @property
    def _hosts(self) -> list[tuple[RoleProcess, Host]]:
        return [(rank, rank.host) for rank in self._ranks if rank.host is not None]

    async def _at_each_host(self, work: Callable[[list[tuple[RoleProcess, Host]]], Awaitable[None]]) -> None:
        """Waits for all, and raises the first failure. Hosts are told apart by name: under Ray each rank of a node is a host of
        its own here."""
        by_name: dict[str, list[tuple[RoleProcess, Host]]] = defaultdict(list)
        for rank, host in self._hosts:
            by_name[host.name].append((rank, host))
        for failure in await asyncio.gather(*map(work, by_name.values()), return_exceptions=True):
            if failure is not None:
                raise failure

    def _folder_of(self, rank: RoleProcess, folder: Path) -> str:
        return f"{rank.placement.run_folder}/{folder.name.strip('.')}-{self._ranks[0].incarnation}"  # ranks start together

    async def _saved(self, folder: Path, answers: Sequence[asyncio.Future[Any]]) -> Fingerprints:
        try:
            saved: list[Fingerprints] = await self._collect("save", self._ranks, answers)
            of_rank = dict(zip(self._ranks, saved, strict=True))

            async def fetch(ranks: list[tuple[RoleProcess, Host]]) -> None:
                for rank, host in ranks:
                    await self._across("save", rank, host, _fetch, host, self._folder_of(rank, folder), of_rank[rank], folder)

            await self._at_each_host(fetch)
        finally:
            await self._remove(folder)
        return {name: found for files in saved for name, found in files.items()}

    async def load(self, folder: Path) -> None:
        async def deliver(ranks: list[tuple[RoleProcess, Host]]) -> None:
            copy = ""
            for host, rank in {host: rank for rank, host in reversed(ranks)}.items():
                place = self._folder_of(rank, folder)
                await self._across("load", rank, host, host.deliver, folder, place, copy)
                copy = place

        try:
            await self._at_each_host(deliver)
            await super().load(folder)
        finally:
            await self._remove(folder)

    async def _across(self, name: str, rank: RoleProcess, host: Host, copy: Callable[..., None], *arguments: object) -> None:
        """Copy in a thread. A host that stops reading or writing is let go: the trainer starts again without it."""
        try:
            await asyncio.to_thread(copy, *arguments, deadline=self._deadline)
        except TimeoutError as error:
            rank.give_up(f"cannot {name} a checkpoint: {error}")
            host.dismiss(str(error))
            raise await rank.explain() from error
        except StreamClosed as error:
            raise await rank.explain() from error
        except RemoteError as error:
            raise self._raised(rank, name, error) from error

    async def _remove(self, folder: Path) -> None:
        """Waits for it: the next to be saved may have the same name."""
        for rank, host in self._hosts:
            with contextlib.suppress(StreamClosed, TimeoutError):  # one that hangs is found out by the next that is saved
                await asyncio.to_thread(host.remove, self._folder_of(rank, folder), deadline=self._deadline)


def _fetch(host: Host, place: str, files: Fingerprints, folder: Path, *, deadline: float) -> None:
    """Copy a rank's files into a folder here, and check that they are what it wrote."""
    host.fetch(place, files, folder, deadline=deadline)
    for name, expected in files.items():
        if fingerprint(folder / name) != expected:
            raise OSError(f"{name} has changed on its way from {host.name}")
        sync(folder / name)
