"""The few NCCL calls that a sender needs, from the library that torch brings along.

torch's process groups exchange their id in another way than vLLM's workers, so NCCL is called directly. The communicator is
non-blocking: its calls return at once, its state is polled, and it can be aborted at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from pathlib import Path

from headrace.errors import SyncError

ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_NAME = "libnccl.so.2"
_CONFIG_VERSION, _CONFIG_MAGIC = 21400, 0xCAFEBEEF  # the first release with a config struct; later ones still read it


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * ID_BYTES)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


_CALLS: dict[str, list[type]] = {
    "ncclGetVersion": [ctypes.c_void_p],
    "ncclGetUniqueId": [ctypes.c_void_p],
    "ncclCommInitRankConfig": [ctypes.c_void_p, ctypes.c_int, _Id, ctypes.c_int, ctypes.c_void_p],
    "ncclCommGetAsyncError": [ctypes.c_void_p, ctypes.c_void_p],
    "ncclCommAbort": [ctypes.c_void_p],
    "ncclAllReduce": [
        *[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int],
        *[ctypes.c_void_p, ctypes.c_void_p],
    ],
    "ncclBroadcast": [
        *[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int],
        *[ctypes.c_void_p, ctypes.c_void_p],
    ],
}


class NcclLibrary:
    """NCCL's functions. A communicator is a number, 0 is none. NCCL's errors are raised as `SyncError`."""

    def __init__(self) -> None:
        self._library = _load()
        for name, arguments in _CALLS.items():
            if not hasattr(self._library, name):
                raise SyncError(f"the NCCL that torch loaded has no {name}: vllm's nccl handover needs NCCL 2.14 or later")
            getattr(self._library, name).argtypes = arguments

    def version(self) -> str:
        code = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(code))
        return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"

    def new_id(self) -> bytes:
        """The id by which the ranks of a group find each other. NCCL listens for them from now on."""
        made = _Id()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return ctypes.string_at(ctypes.byref(made), ID_BYTES)

    def begin(self, group_id: bytes, *, rank: int, size: int) -> int:
        """A communicator on the current GPU, ready when `is_idle` says so."""
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        communicator = ctypes.c_void_p()
        known = _Id.from_buffer_copy(group_id)
        self._call("ncclCommInitRankConfig", ctypes.byref(communicator), size, known, rank, ctypes.byref(config))
        return communicator.value or 0

    def is_idle(self, communicator: int) -> bool:
        """Whether the last call has put its work on the GPU. Raises any failure so far."""
        status = ctypes.c_int()
        self._call("ncclCommGetAsyncError", communicator, ctypes.byref(status))
        self._check("the group", status.value)
        return status.value == _SUCCESS

    def all_reduce(self, communicator: int, address: int, *, num_floats: int, stream: int) -> None:
        """Sum, in place."""
        self._call("ncclAllReduce", address, address, num_floats, _FLOAT32, _SUM, communicator, stream)

    def broadcast(self, communicator: int, address: int, *, num_bytes: int, stream: int) -> None:
        """From rank 0, this process."""
        self._call("ncclBroadcast", address, address, num_bytes, _UINT8, 0, communicator, stream)

    def abort(self, communicator: int) -> None:
        """End what runs and free everything. Needs no peer; may wait for a kernel to leave the GPU."""
        self._call("ncclCommAbort", communicator)

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status not in (_SUCCESS, _IN_PROGRESS):
            said = [self._text("ncclGetErrorString", ctypes.c_int(status)) or f"status {status}"]
            said.append(self._text("ncclGetLastError", ctypes.c_void_p()))  # of the process: the argument is not used
            raise SyncError(f"{name}: {': '.join(filter(None, said))}")

    def _text(self, name: str, argument: object) -> str:
        if not hasattr(self._library, name):
            return ""
        function = getattr(self._library, name)
        function.restype = ctypes.c_char_p
        return (function(argument) or b"").decode(errors="replace").strip()


def _load() -> ctypes.CDLL:
    """The one already loaded, by its bare name; else the one in torch's packages."""
    places = [_NAME]
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("nvidia.nccl")
        folders = found.submodule_search_locations if found is not None else None
        places += [str(Path(folder) / "lib" / _NAME) for folder in folders or ()]
    failures = []
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            failures.append(str(error))
    raise SyncError(
        f"no NCCL here ({'; '.join(failures)}): install a torch built for CUDA, or hand weights to vLLM through a folder"
    )
