"""Hands new weights to a vLLM server's GPUs over NCCL: the sending end of vLLM's own `nccl` weight transfer.

Neither vLLM nor torch's process groups are used, whose ids vLLM's workers do not read. The workers find rank 0, this process,
through a torch TCPStore that it opens, read the group's id from it and all-reduce one number with it. From then on every update
is a series of broadcasts of raw bytes; their names, dtypes and shapes go ahead over HTTP. NCCL needs the same release at both
ends, and a GPU for each rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import re
import socket
import threading
import time
from ctypes import byref, c_size_t, c_void_p
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import TCPStore

from headrace.engine.vllm.handover import Handover, described
from headrace.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from torch import Tensor

    from headrace.engine.vllm.api import VllmApi
    from headrace.engine.vllm.handover import Named, Tensors

BUFFER_BYTES = 256 << 20  # a broadcast ends with the tensor that exceeds this size; a server needs room for two of them
_NUM_BUFFERS = 2
_POLL, _SLOW_POLL = 0.0002, 0.02  # seconds between polls: of GPU work, which has no wait with a timeout; of workers joining
_END_SECONDS = 0.25  # to end the group, before it is left to end by itself
_PACKED_AT_INIT = [0, 28]  # from this release on, a server is told the packing at init, before with every update
_ID_KEY = "broadcast_from/0/0"  # where a worker's `StatelessProcessGroup` finds the first broadcast of rank 0

_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_CONFIG_VERSION, _CONFIG_MAGIC = 21400, 0xCAFEBEEF  # the first release with a config struct; later ones still read it


class _Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * _ID_BYTES)]


class _Config(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int)]


class Nccl:
    """The library that torch has loaded; its functions are called by name."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise SyncError(
                f"no NCCL here ({error}): install a torch built for CUDA, or hand weights to vLLM through a folder"
            ) from error
        self._library.ncclGetErrorString.restype = self._library.ncclGetLastError.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        self.check(name, getattr(self._library, name)(*arguments))

    def check(self, name: str, status: int) -> None:
        if status not in (_SUCCESS, _IN_PROGRESS):
            said = [self._library.ncclGetErrorString(status), self._library.ncclGetLastError(None)]
            raise SyncError(": ".join([name, *(text.decode(errors="replace").strip() for text in said if text)]))


def in_order(tensors: Tensors) -> list[Named]:
    """In sending order: long elements first, since a worker needs each tensor at a multiple of its element size."""
    return sorted(tensors.items(), key=lambda named: -named[1].element_size())


def chunks(ordered: Sequence[Named], buffer_bytes: int) -> list[list[Tensor]]:
    """The tensors of each broadcast. Like a worker, it starts the next one after the tensor that exceeds the size."""
    made: list[list[Tensor]] = []
    total = buffer_bytes + 1
    for _, tensor in ordered:
        if total > buffer_bytes:
            made.append([])
            total = 0
        made[-1].append(tensor)
        total += tensor.nbytes
    return made


def pickled_id(group_id: bytes) -> bytes:
    """A group's id as a worker reads it: a pickle of the ctypes structure in vLLM's NCCL wrapper. Headrace never reads one."""
    names = b"c_ctypes\n_unpickle\ncvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    # Protocol 3; both names; no attributes, and the bytes, as one pair; that and the class as another; call; end
    return b"\x80\x03" + names + b"}C" + bytes([_ID_BYTES]) + group_id + b"\x86\x86R."


def _open_store(host: str, *, deadline: float) -> TCPStore:
    """A store on a free port of `host` alone; torch by itself would listen on all addresses."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise SyncError(f"cannot listen on {host}: {error}; name an address of this machine that the server reaches") from error
    port, limit = listening.getsockname()[1], timedelta(seconds=deadline)
    handle = listening.detach()  # the store's from now on
    return TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=handle, use_libuv=False)


class NcclHandover(Handover):
    """Rank 0 of a group with the server's workers, on a GPU that is none of theirs. `join`, then `send` for every update; both
    block and run in a thread. A failure of either leaves the two ends out of step, so it ends the group for good."""

    def __init__(
        self,
        device: torch.device,
        *,
        host: str,
        deadline: float,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """`host` is an address of this machine that the server reaches, `deadline` the most seconds without progress. Tests
        have neither NCCL nor a GPU, and so no streams."""
        self._device, self._host, self._deadline, self._buffer_bytes = device, host, deadline, buffer_bytes
        self._nccl = Nccl()
        self._streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(_NUM_BUFFERS)]
        self._store: Any = _open_store(host, deadline=deadline)  # None once all have read it
        self.port = self._store.port
        self._communicator = c_void_p()  # non-blocking: its calls return at once, `_is_idle` tells when they have taken effect
        self._num_workers = 0
        self._is_packed_at_init = True
        self._tensors: Tensors = {}
        self._work = threading.Lock()  # held by `join` and `send`
        self._ended = ""  # the reason, once it has ended

    # Over HTTP, to the server

    async def open(self, api: VllmApi, release: str) -> None:
        told = self.init_info(await api.num_workers(), release)
        await self._together(api.init_transfer(told), self.join)

    def prepare(self, tensors: Tensors, *, name: str) -> None:
        self._tensors = tensors

    async def hand_over(self, api: VllmApi) -> None:
        told = self.update_info(self._tensors)
        try:
            await api.start_update()
            await self._together(api.update_weights(told), functools.partial(self.send, self._tensors))
            await api.finish_update()
        except BaseException as error:
            await asyncio.to_thread(self.close, f"the server ended it: {error}")
            raise

    async def _together(self, asking: Awaitable[None], sending: Callable[[], None]) -> None:
        """The server answers when it has received everything. If one side fails, the other would wait for it."""
        answer = asyncio.ensure_future(asking)
        try:
            await asyncio.gather(answer, asyncio.to_thread(sending))
        except BaseException as error:
            answer.cancel()
            await asyncio.to_thread(self.close, f"the server ended it: {error}")
            raise

    def init_info(self, num_workers: int, release: str) -> dict[str, Any]:
        """For the server, before `join`; a release without a number counts as new."""
        numbers = re.match(r"v?(\d+)\.(\d+)", release)
        self._is_packed_at_init = numbers is None or [int(each) for each in numbers.groups()] >= _PACKED_AT_INIT
        self._num_workers = num_workers
        place = {"master_address": self._host, "master_port": self.port, "rank_offset": 1, "world_size": num_workers + 1}
        return place | (self._packing() if self._is_packed_at_init else {})

    def update_info(self, tensors: Tensors) -> dict[str, Any]:
        """For the server: what `send` of the same tensors will send."""
        return described(in_order(tensors)) | ({} if self._is_packed_at_init else self._packing())

    def _packing(self) -> dict[str, Any]:
        return {"packed": True, "packed_buffer_size_bytes": self._buffer_bytes, "packed_num_buffers": _NUM_BUFFERS}

    # Over NCCL, to its workers

    def join(self) -> None:
        """Wait until every worker is in the group."""
        stream = self._streams[0]
        with self._working(), torch.cuda.stream(stream):
            come = f"none of the server's {self._num_workers} workers came to {self._host}:{self.port}, which it must reach,"
            self._wait(lambda: self._store.num_keys() > 0, come, poll=_SLOW_POLL)  # then one has counted itself there
            group_id, release = _Id(), ctypes.c_int()
            self._nccl.call("ncclGetUniqueId", byref(group_id))  # not before, since NCCL then listens forever
            self._nccl.call("ncclGetVersion", byref(release))
            self._store.set(_ID_KEY, pickled_id(bytes(group_id)))
            config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
            size = self._num_workers + 1
            self._nccl.call("ncclCommInitRankConfig", byref(self._communicator), size, group_id, 0, byref(config))
            late = (
                f"not all of the server's {self._num_workers} workers joined over NCCL {release.value}, which must be the same "
                "release there and may need NCCL_SOCKET_IFNAME to name the network,"
            )
            self._wait(self._is_idle, late)
            number = torch.zeros(1, device=self._device)
            place, one = c_void_p(number.data_ptr()), c_size_t(1)
            self._nccl.call("ncclAllReduce", place, place, one, _FLOAT32, _SUM, self._communicator, _handle(stream))
            self._wait(functools.partial(self._is_idle, stream), late)
            self._store = None  # all have read it

    def send(self, tensors: Tensors) -> None:
        """Returns when every worker has them all. They may be on the GPU or in host memory, where pinned is faster. One buffer
        is filled while the other is sent, each on a stream of its own."""
        planned = chunks(in_order(tensors), self._buffer_bytes)
        largest = max((sum(tensor.nbytes for tensor in chunk) for chunk in planned), default=0)
        with self._working(), torch.no_grad():
            lanes = [(self._allocate(largest, stream), stream) for stream in self._streams[: len(planned)]]
            for number, chunk in enumerate(planned):
                buffer, stream = lanes[number % len(lanes)]
                late = f"broadcast {number + 1} of {len(planned)} to {self._num_workers} workers did not go on"
                self._wait(functools.partial(self._is_idle, stream), late)
                with torch.cuda.stream(stream):
                    size, place = c_size_t(_fill(buffer, chunk)), c_void_p(buffer.data_ptr())
                    self._nccl.call("ncclBroadcast", place, place, size, _UINT8, 0, self._communicator, _handle(stream))
                self._wait(self._is_idle, late)
            late = f"the last of {len(planned)} broadcasts to {self._num_workers} workers did not end"
            for _, stream in lanes:
                self._wait(functools.partial(self._is_idle, stream), late)

    def _allocate(self, num_bytes: int, stream: torch.cuda.Stream | None) -> Tensor:
        """Allocated on its own stream, so that its memory is not reused while that still needs it."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))  # which may still be computing the weights
        with torch.cuda.stream(stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def close(self, reason: str = "the sender was closed") -> None:
        """End the group, from any thread: a `join` or `send` that waits raises `SyncError`. Needs no worker."""
        self._ended, self._tensors = self._ended or reason, {}
        if self._work.acquire(timeout=_END_SECONDS):  # otherwise whoever holds it ends the group
            self._end()
            self._work.release()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with self._work:
            try:
                self._raise_if_ended()
                yield
            except BaseException as error:
                self._ended = self._ended or str(error) or type(error).__name__
                self._end()
                raise

    def _end(self) -> None:
        communicator, self._communicator, self._store = self._communicator, c_void_p(), None
        if communicator:  # in a thread, since it may wait for a kernel to leave the GPU
            ending = threading.Thread(target=self._abort, args=(communicator,), name="headrace-vllm-nccl-end", daemon=True)
            ending.start()
            ending.join(_END_SECONDS)

    def _abort(self, communicator: c_void_p) -> None:
        with torch.cuda.stream(self._streams[0]), contextlib.suppress(SyncError):  # it is broken already
            self._nccl.call("ncclCommAbort", communicator)

    def _is_idle(self, stream: torch.cuda.Stream | None = None) -> bool:
        """Whether the last call's work is on the GPU's stream, which may require reaching all peers; with `stream`, whether
        that has done it. Raises any failure so far."""
        status = ctypes.c_int()
        self._nccl.call("ncclCommGetAsyncError", self._communicator, byref(status))
        self._nccl.check("the group", status.value)
        return status.value == _SUCCESS and (stream is None or stream.query())

    def _wait(self, is_done: Callable[[], bool], late: str, *, poll: float = _POLL) -> None:
        until = time.monotonic() + self._deadline
        while not is_done():
            self._raise_if_ended()
            if time.monotonic() > until:
                raise SyncError(f"{late} within {self._deadline:g} s; the server's log may say why")
            time.sleep(poll)

    def _raise_if_ended(self) -> None:
        if self._ended:
            raise SyncError(self._ended)


def _handle(stream: torch.cuda.Stream | None) -> c_void_p:
    return c_void_p(None if stream is None else stream.cuda_stream)


def _fill(buffer: Tensor, chunk: Sequence[Tensor]) -> int:
    """Copy the tensors into the buffer; returns their size in bytes."""
    start = 0
    for tensor in chunk:
        room = buffer[start : start + tensor.nbytes]
        room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        start += tensor.nbytes
    return start
