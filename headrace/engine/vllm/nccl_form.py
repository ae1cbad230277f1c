"""What vLLM's workers read in an `nccl` weight transfer, made without vLLM: the store in which they find rank 0, the group's id
in it, and where one broadcast of packed weights ends and the next starts, which both ends compute and must agree on."""

from __future__ import annotations

import contextlib
import re
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import TCPStore

from headrace.engine.vllm.nccl_library import ID_BYTES
from headrace.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    Named = tuple[str, Tensor]

ID_KEY = "broadcast_from/0/0"  # where a worker's `StatelessProcessGroup` finds the first broadcast of rank 0
_PACKED_AT_INIT = (0, 28)


def is_packed_at_init(release: str) -> bool:
    """Whether this vLLM must be told the packing at init, not with every update. A release without a number counts as new."""
    numbers = re.match(r"v?(\d+)\.(\d+)", release)
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= _PACKED_AT_INIT


def described(tensors: Iterable[Named]) -> dict[str, Any]:
    """The names, dtypes and shapes of an update."""
    named = list(tensors)
    return {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }


def in_order(tensors: Mapping[str, Tensor]) -> list[Named]:
    """In sending order: long elements first, since a worker needs each tensor at a multiple of its element size."""
    return sorted(tensors.items(), key=lambda named: -named[1].element_size())


def chunks(ordered: Sequence[Named], buffer_bytes: int) -> list[list[Named]]:
    """The tensors of each broadcast. Like a worker, it starts the next one after the tensor that exceeds the size."""
    made: list[list[Named]] = []
    total = buffer_bytes + 1
    for name, tensor in ordered:
        if total > buffer_bytes:
            made.append([])
            total = 0
        made[-1].append((name, tensor))
        total += tensor.nbytes
    return made


def pickled_id(group_id: bytes) -> bytes:
    """The id as a worker reads it: a pickle of the ctypes structure in vLLM's NCCL wrapper. Headrace never reads one."""
    assert len(group_id) == ID_BYTES
    names = b"c_ctypes\n_unpickle\ncvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    # Protocol 3; both names; no attributes, and the bytes, as one pair; that and the class as another; call; end
    return b"\x80\x03" + names + b"}C" + bytes([ID_BYTES]) + group_id + b"\x86\x86R."


def open_store(host: str, *, deadline: float) -> TCPStore:
    """A store on a free port of `host` alone; torch by itself would listen on all addresses."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise SyncError(f"cannot listen on {host}: {error}; name an address of this machine that the server reaches") from error
    port, handle = listening.getsockname()[1], listening.detach()
    limit = timedelta(seconds=deadline)
    try:
        return TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=handle, use_libuv=False)
    except BaseException:
        with contextlib.suppress(OSError):
            socket.close(handle)
        raise
