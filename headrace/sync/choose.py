"""From the settings of a run to one end of its weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.sync.files import FilesTransport, remove_files
from headrace.sync.shared import SharedMemoryTransport, check_room, remove_segments, shared_folder

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.sync.transport import Transport


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
            from headrace.sync.collective import CollectiveTransport

            return CollectiveTransport(device=device, host=self.host, deadline=self.deadline)
        if self.transport == "http":
            from headrace.sync.http import HttpTransport

            return HttpTransport(token=self.token, host=self.host, deadline=self.deadline, is_relay=not is_sender)
        raise ValueError(f"{self.transport!r} is no transport between processes")

    def check(self, num_bytes: int) -> None:
        """Refuse before anything is loaded what could not be published later."""
        if self.transport in ("shared_memory", "files"):
            check_room(self.place, num_bytes)

    def remove_leftovers(self) -> None:
        """What a sender that was killed could not give back."""
        remove_segments(self.place, self.prefix)
        remove_files(self.place, self.prefix)
