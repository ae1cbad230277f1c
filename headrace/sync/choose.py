"""From the settings of a run to one end of its weight sync."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace import leftovers
from headrace.errors import SyncError
from headrace.sync.files import FilesTransport
from headrace.sync.shared import SharedMemoryTransport, check_room, shared_folder
from headrace.sync.transport import ANY_HOST

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.sync.transport import Transport


def check_place(transport: str, *, folder: str, host: str) -> None:
    """Refuse a `sync.folder` or a `sync.host` that the transport could not use, before anything else is begun."""
    if transport in ("shared_memory", "files"):
        place = shared_folder(folder)
        if not place.is_dir():
            raise SyncError(f"sync.folder = {str(place)!r}: there is no such folder; make it, or name another")
        if not os.access(place, os.W_OK | os.X_OK):
            raise SyncError(f"sync.folder = {str(place)!r}: it cannot be written to; name another")
    if transport in ("collective", "http"):
        if host in ANY_HOST:
            raise SyncError(f"sync.host = {host!r}: engines are told this address; name the one they reach this host by")
        try:
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except (OSError, UnicodeError) as error:
            reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
            raise SyncError(f"sync.host = {host!r}: cannot be listened on ({reason}); name an address of this host") from error


@dataclass(frozen=True)
class Ends:
    """What both ends of a transport between processes must know."""

    transport: str
    folder: str
    """`sync.folder`."""
    prefix: str
    """Of everything the run leaves outside its own folder, so that it can be found and removed."""
    host: str
    token: str
    """Known to the processes of the run alone."""
    deadline: float

    @property
    def place(self) -> Path:
        """Where files or segments lie."""
        return shared_folder(self.folder)

    def handover(self, name: str) -> Path:
        """A folder of an engine's own, where it lays weights ready for a server that reads files."""
        return self.place / f"{self.prefix}-{name}"

    def make(self, *, is_sender: bool, device: str) -> Transport:
        """One end."""
        if self.transport == "shared_memory":
            return SharedMemoryTransport(prefix=self.prefix, folder=self.place)
        if self.transport == "files":
            return FilesTransport(folder=self.place, prefix=self.prefix, deadline=self.deadline)
        if self.transport == "cuda_ipc":
            from headrace.sync.cuda_ipc import CudaIpcTransport

            return CudaIpcTransport(device)
        if self.transport == "collective":
            from headrace.sync.collective.transport import CollectiveTransport

            return CollectiveTransport(token=self.token, device=device, host=self.host, deadline=self.deadline)
        if self.transport == "http":
            from headrace.sync.http.transport import HttpTransport

            return HttpTransport(token=self.token, host=self.host, deadline=self.deadline, is_relay=not is_sender)
        raise ValueError(f"{self.transport!r} is no transport between processes")

    def check(self, num_bytes: int) -> None:
        """Refuse before anything is loaded what could not be published later."""
        if self.transport in ("shared_memory", "files"):
            check_room(self.place, num_bytes)

    def remove_leftovers(self) -> None:
        """What processes that were killed could not give back."""
        leftovers.remove(self.place, self.prefix)
