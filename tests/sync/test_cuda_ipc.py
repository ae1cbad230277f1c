"""What a receiver keeps open of a sender's GPU memory; the driver itself is tried where there is a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from headrace.errors import SyncError
from headrace.sync import ipc_memory
from headrace.sync.cuda_ipc import CudaIpcTransport

if TYPE_CHECKING:
    from torch import Tensor


class Opened:
    alive: list[str]

    def __init__(self, handle: str, num_bytes: int, device: torch.device) -> None:
        self.handle, self.tensor = handle, torch.zeros(num_bytes, dtype=torch.uint8)
        self.alive.append(handle)

    def drop(self) -> None:
        self.alive.remove(self.handle)


def fetch(transport: CudaIpcTransport, handle: str) -> None:
    def write(start: int, piece: Tensor) -> None:
        assert len(piece) == 3

    target = SimpleNamespace(num_bytes=3, write=write)
    place = {"handle": handle, "size": 8, "bytes": 3, "gpu": 0}
    transport.fetch(place, target, receiver="engine-0")  # type: ignore[arg-type]


def test_memory_that_is_read_no_more_is_closed(monkeypatch):
    """A difference is of another size each time, and so is the memory it lies in: none could be freed while it is open here."""
    Opened.alive = []
    monkeypatch.setattr(ipc_memory, "OpenedMemory", Opened)
    transport = CudaIpcTransport("cuda:0")
    for number in range(40):
        fetch(transport, f"{number:02x}")
        fetch(transport, "home")
    assert Opened.alive.count("home") == 1 and len(Opened.alive) == 4
    transport.close()
    assert Opened.alive == []


@pytest.mark.parametrize("handle", ["zz", "00", ""])
def test_what_is_no_handle_is_refused(handle):
    with pytest.raises(SyncError):
        fetch(CudaIpcTransport("cuda:0"), handle)
