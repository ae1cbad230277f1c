"""The seam between what travels and how: a transport moves buffers of bytes from a trainer's process to engines."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, get_type_hints

from headrace.errors import SyncError
from headrace.sync.folder import COPIES, check_folder, check_space, shared_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from headrace.records import Plain


class Target(Protocol):
    """Where a receiver wants the bytes: a buffer of its own, on any device."""

    num_bytes: int

    @property
    def views(self) -> Mapping[str, Tensor]:
        """The same buffer as named tensors; only padding is in none of them."""

    def write(self, start: int, piece: Tensor) -> None:
        """Copy `piece`, one dimension of uint8, to `start`. The caller may reuse `piece` when this returns."""

    def check(self) -> None:
        """Raise `SyncError` if the receiver no longer wants the update. Called a few times a second by every wait."""


@dataclass(frozen=True)
class TransportMemory:
    """Bytes that a transport takes, for predictions of memory."""

    trainer: int = 0
    """In the trainer's process, from torch."""
    exported: int = 0
    """On the trainer's GPU, from the driver."""
    engine: int = 0
    """Mapped into an engine's process, where they count as its size."""


@dataclass(frozen=True)
class TransportConfig:
    """What both ends of a transport must know. Plain data: it is sent to every process of a run."""

    transport: str
    folder: str
    """`sync.folder`."""
    prefix: str
    """Of every name that the run leaves outside its own folder, so that leftovers can be found and removed."""
    host: str
    token: str
    """Known only to the processes of the run."""
    deadline: float
    """Seconds without progress after which a transfer fails."""

    @property
    def directory(self) -> Path:
        """Where files and segments lie."""
        return shared_folder(self.folder)

    def handover(self, name: str) -> Path:
        """An engine's own folder for weights that a server reads as files."""
        return self.directory / f"{self.prefix}-{name}"


class Transport(ABC):
    """Moves buffers of bytes, each under a key; only a few exist at a time.

    All methods block, and are called from threads. `free` may come from another thread while `push` or `fetch` is running,
    and makes it fail with a `SyncError`. Nothing waits longer than the deadline without progress. After any failure the next
    key starts clean.
    """

    name: ClassVar[str]
    crosses_processes: ClassVar[bool] = True
    crosses_hosts: ClassVar[bool] = False
    needs_gpu: ClassVar[bool] = False
    """The weights never leave GPU memory: both ends share a GPU, or have GPUs that reach each other."""
    needs_gpu_per_end: ClassVar[bool] = False
    """On GPUs no two ends may share one."""
    is_pushed: ClassVar[bool] = False
    """Receivers cannot fetch by themselves: the sender must `push` meanwhile."""
    uses_folder: ClassVar[bool] = False
    """Updates lie in `sync.folder`, where a killed run leaves them for the next one to remove."""
    listens: ClassVar[bool] = False
    """The sender listens on `sync.host`."""
    keeps_buffers: ClassVar[bool] = True
    """Receivers read the buffer that `allocate` gave, so a model's own weights may live in it."""

    @classmethod
    @abstractmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> Transport:
        """One end."""

    @classmethod
    def memory(cls, weights: int, *, on_gpu: bool) -> TransportMemory:
        """What publishing so many bytes of weights takes. On a GPU they are packed once, and copied to the host from there."""
        return TransportMemory(trainer=weights) if on_gpu else TransportMemory(COPIES * weights, engine=COPIES * weights)

    @classmethod
    def check(cls, *, folder: str, host: str, on_gpu: bool) -> None:
        """Refuse settings that cannot work on this machine, before a run starts anything."""
        if cls.needs_gpu and not on_gpu:
            raise SyncError(
                f"sync.transport = '{cls.name}': the run is on the CPU and has no GPU memory to share; leave it auto"
            )
        if cls.uses_folder:
            check_folder(shared_folder(folder))
        if cls.listens:
            check_host(host)

    @classmethod
    def check_space(cls, config: TransportConfig, num_bytes: int) -> None:
        """Refuse weights that could not be published later, before they are loaded."""
        if cls.uses_folder:
            check_space(config.directory, num_bytes)

    @classmethod
    def routes(cls, place: Mapping[str, Plain], relays: Sequence[str]) -> list[Mapping[str, Plain]]:
        """The place that each receiver is told, given their `relay_url`s."""
        return [place] * len(relays)

    @property
    def relay_url(self) -> str:
        """Where this end serves to others what it has received, if it does."""
        return ""

    # The sender's end

    @abstractmethod
    def allocate(self, key: str, num_bytes: int) -> Tensor:
        """A buffer of uint8, [num_bytes], aligned to 256 bytes, for the sender to write into."""

    @abstractmethod
    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        """The buffer is complete; `views` are its bytes as named tensors. Returns the place that `fetch` is given."""

    def push(self, key: str, receivers: Sequence[str]) -> None:  # noqa: B027  (most transports have nothing to push)
        """Send the buffer to these receivers while they `fetch` it; returns when all of them have it."""

    @abstractmethod
    def free(self, key: str) -> None:
        """The buffer is no longer needed, or given up. An unknown key is no error."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory, files and sockets. Called at both ends."""

    # The receiver's end

    @abstractmethod
    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        """Write the buffer that was posted at `place` into the target. `receiver` is this end's name in `push`."""


P = TypeVar("P")


def read_place(kind: type[P], place: Mapping[str, Plain]) -> P:
    """A place as a dataclass of the transport: places cross process lines, so every field must be there, of its type."""
    values: dict[str, Any] = {}
    for name, wanted in get_type_hints(kind).items():
        value = tuple(found) if wanted is tuple and isinstance(found := place.get(name), list) else place.get(name)
        if type(value) is not wanted:
            raise SyncError(f"{name} = {value!r}: this is no place of this transport")
        values[name] = value
    return kind(**values)


def check_host(host: str) -> None:
    """Refuse a `sync.host` that this machine cannot listen on, or that engines could not connect to."""
    if host in ("", "0.0.0.0", "::"):
        raise SyncError(f"sync.host = {host!r}: engines are told this address; name the one they reach this host by")
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise SyncError(f"sync.host = {host!r}: cannot be listened on ({reason}); name an address of this host") from error
