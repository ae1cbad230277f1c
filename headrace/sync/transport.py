"""The transport protocol: a transport moves buffers of bytes from a trainer's process to engines, whatever they contain."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, get_type_hints

from headrace.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from headrace.records import Part, Plain

COPIES = 2  # at most this many copies of the weights exist: the newest stays readable while the next is written


class Target(Protocol):
    """The receiver's own buffer for the bytes, on any device."""

    num_bytes: int

    @property
    def views(self) -> Mapping[str, Tensor]:
        """The buffer as named tensors, which cover everything but padding."""

    def write(self, start: int, piece: Tensor) -> None:
        """Copy `piece`, 1-D uint8, to `start`. The caller may reuse `piece` when this returns."""

    def check(self) -> None:
        """Raise `SyncError` if the receiver no longer wants the update. Every wait calls this a few times a second."""


@dataclass(frozen=True)
class TransportMemory:
    """Bytes that a transport takes, for memory predictions."""

    trainer: int = 0  # allocated by torch in the trainer's process
    exported: int = 0  # allocated by the driver on the trainer's GPU
    engine: int = 0  # mapped into an engine's process, and counted in its size


@dataclass(frozen=True)
class TransportConfig:
    """What both ends must know, as plain data that the launcher sends to every process of a run."""

    transport: str
    folder: str
    prefix: str  # of every name that the run creates outside its own folder (`leftovers.py`)
    host: str
    token: str  # a secret shared by the processes of the run
    deadline: float  # seconds without progress after which a transfer fails
    certificate: str = ""  # the run's, with its key, if weights travel between hosts: `http` is then encrypted

    @property
    def directory(self) -> Path:
        return shared_folder(self.folder)

    def handover(self, name: str) -> Path:
        """The folder in which an engine hands weights as files to its server."""
        return self.directory / f"{self.prefix}-{name}"


class Transport(ABC):
    """Moves buffers of bytes, each under a key; only a few exist at a time. All methods block, and are called from threads.
    Another thread may call `free` during `push` or `fetch`, which then fails with a `SyncError`. No method waits longer than
    the deadline without progress. A failure does not affect the next key."""

    name: ClassVar[str]
    crosses_processes: ClassVar[bool] = True
    between_hosts: ClassVar[str] = ""  # the transport by which other hosts receive, encrypted with the run's certificate
    needs_gpu: ClassVar[bool] = False  # both ends share a GPU, or their GPUs are peers
    needs_gpu_per_end: ClassVar[bool] = False  # on GPUs, no two ends may share one
    is_pushed: ClassVar[bool] = False  # the sender must `push` while receivers `fetch`
    uses_folder: ClassVar[bool] = False  # updates are in `sync.folder`. If a run is killed, the next one removes them.
    listens: ClassVar[bool] = False  # the sender listens on `sync.host`

    @classmethod
    @abstractmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> Transport:
        """Make one end."""

    @classmethod
    def memory(cls, weights: int, *, on_gpu: bool) -> TransportMemory:
        """Predict the memory for publishing `weights` bytes. On a GPU they are packed there once, then copied to the host."""
        return TransportMemory(trainer=weights) if on_gpu else TransportMemory(COPIES * weights, engine=COPIES * weights)

    @classmethod
    def check(cls, *, folder: str, host: str, on_gpu: bool) -> None:
        """Reject settings that cannot work on this machine, before a run starts anything."""
        if cls.needs_gpu and not on_gpu:
            raise SyncError(
                f"sync.transport = '{cls.name}': the run is on the CPU and has no GPU memory to share; leave it auto"
            )
        if cls.uses_folder:
            check_folder(shared_folder(folder))
        if cls.listens:
            check_host(host)

    @classmethod
    def check_space(cls, config: TransportConfig, num_bytes: int, *, beside: int = 0) -> None:
        """Reject weights too large to be published, before they are loaded; `beside` versions are kept for servers."""
        if copies := beside + COPIES * cls.uses_folder:
            check_space(config.directory, num_bytes, copies=copies)

    @classmethod
    def routes(cls, part: Part, relays: Sequence[str]) -> list[Part]:
        """Return the part as addressed to each receiver, given their `relay_url`s."""
        return [part] * len(relays)

    @property
    def relay_url(self) -> str:
        """The URL at which this end relays what it has received, or an empty string."""
        return ""

    # The sender's end

    @abstractmethod
    def allocate(self, key: str, num_bytes: int) -> Tensor:
        """Return a buffer for the sender to fill: [num_bytes] uint8, aligned to 256 bytes."""

    @abstractmethod
    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        """Offer the complete buffer, whose bytes as named tensors are `views`. Returns the place for `fetch`."""

    def push(self, key: str, receivers: Sequence[str]) -> None:  # noqa: B027  (most transports have nothing to push)
        """Send the buffer to these receivers while they `fetch` it; return when all of them have it."""

    @abstractmethod
    def free(self, key: str) -> None:
        """Drop a buffer that is released or aborted. An unknown key is no error."""

    @abstractmethod
    def close(self) -> None:
        """Free memory, files and sockets. Called at both ends."""

    # The receiver's end

    def prepare(self, places: Sequence[Mapping[str, Plain]]) -> None:  # noqa: B027  (few keep anything)
        """Called before an update is fetched, with all its places: drop what is kept for other updates or senders."""

    @abstractmethod
    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        """Write the buffer posted at `place` into the target. `receiver` is this end's name in `push`."""


P = TypeVar("P")


def read_place(kind: type[P], place: Mapping[str, Plain]) -> P:
    """Parse a place into the transport's dataclass. Places come from another process, so every field's type is checked."""
    values: dict[str, Any] = {}
    for name, wanted in get_type_hints(kind).items():
        value = tuple(found) if wanted is tuple and isinstance(found := place.get(name), list) else place.get(name)
        if type(value) is not wanted:
            raise SyncError(f"{name} = {value!r}: this is no place of this transport")
        values[name] = value
    return kind(**values)


def shared_folder(wanted: str = "") -> Path:
    """Return the wanted `sync.folder`, else the system's shared memory, else its folder for temporary files."""
    memory = Path("/dev/shm")
    return Path(wanted or (memory if memory.is_dir() else tempfile.gettempdir()))


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise SyncError(f"sync.folder = {str(folder)!r}: there is no such folder; make it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SyncError(f"sync.folder = {str(folder)!r}: it cannot be written to; name another")


def check_space(folder: Path, num_bytes: int, *, copies: int = COPIES) -> None:
    """Reject weights too large to be published, before they are loaded."""
    check_folder(folder)
    if copies * num_bytes > shutil.disk_usage(folder).free:
        raise SyncError(too_little_space(folder, num_bytes, copies=copies))


def too_little_space(folder: Path, num_bytes: int, *, copies: int = COPIES) -> str:
    free, needed = shutil.disk_usage(folder).free, copies * num_bytes
    return (
        f"{folder} has {free / 1e6:,.0f} MB free and the weights need {needed / 1e6:,.0f} MB there ({copies} versions of "
        f"{num_bytes / 1e6:,.0f} MB). Make room (shared memory: mount -o remount,size={-(-needed // 2**30) + 1}G {folder}; "
        f"in a container --shm-size), or name another folder in sync.folder"
    )


def check_host(host: str) -> None:
    """Reject a `sync.host` that this machine cannot listen on, or that engines could not connect to."""
    if host in ("", "0.0.0.0", "::"):
        raise SyncError(f"sync.host = {host!r}: engines are told this address; name the one they reach this host by")
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise SyncError(f"sync.host = {host!r}: cannot be listened on ({reason}); name an address of this host") from error
