"""Sends new weights to a vLLM server's GPUs over NCCL: the sending end of vLLM's own `nccl` weight transfer.

vLLM is not imported: `nccl_form` writes what its workers read. They find rank 0, this process, through a torch TCPStore that it
opens, read the group's id from it and all-reduce one number with it. From then on every update is a series of broadcasts of raw
bytes; their names, dtypes and shapes go ahead over HTTP.

    sender = PackedSender(device, host=host, num_workers=..., deadline=...)
    POST /init_weight_transfer_engine   sender.init_info(release)               while sender.join() runs in a thread
    POST /update_weights                sender.update_info(tensors, release)    while sender.send(tensors) does
    sender.close()

If the server fails, `abort` ends whatever waits here. NCCL needs the same release at both ends, and a GPU for each rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from headrace.engine.vllm.nccl_form import ID_KEY, chunks, described, in_order, is_packed_at_init, open_store, pickled_id
from headrace.engine.vllm.nccl_library import NcclLibrary
from headrace.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore

    from headrace.engine.vllm.nccl_form import Named

BUFFER_BYTES = 256 << 20  # a broadcast ends with the tensor that exceeds this size; a server needs room for two of them
NUM_BUFFERS = 2
_POLL, _SLOW_POLL = 0.0002, 0.02  # seconds between polls: of GPU work, which has no wait with a timeout; of workers joining
_ENDING = 0.25  # seconds that `abort` waits for the group to end


class PackedSender:
    """Rank 0 of a group with one server's workers. `join`, then `send` any number of times; unusable after a failure. `join`
    and `send` block and are called in a thread, one at a time; `abort` and `close` from any."""

    def __init__(
        self,
        device: torch.device,
        *,
        host: str,
        num_workers: int,
        deadline: float,
        buffer_bytes: int = BUFFER_BYTES,
        library: NcclLibrary | None = None,
    ) -> None:
        """`host` is where to listen for the server; `deadline` the most seconds without progress; `library` is for tests."""
        if num_workers < 1 or buffer_bytes < 1 or deadline <= 0:
            raise ValueError(f"num_workers {num_workers}, buffer_bytes {buffer_bytes} and deadline {deadline} must be positive")
        if library is None and device.type != "cuda":
            raise ValueError(f"device {device}: NCCL moves what is on a GPU; hand weights to vLLM through a folder instead")
        self.device, self.num_workers = device, num_workers
        self._host, self._deadline, self._buffer_bytes = host, deadline, buffer_bytes
        self._library = library or NcclLibrary()
        self._calls = threading.Lock()  # held during an NCCL call, so that no call gets a communicator that is being freed
        self._communicator = 0
        self._ended = ""  # the reason, once it has ended
        self._streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(NUM_BUFFERS)]
        self._store: TCPStore | None = open_store(host, deadline=deadline)
        self._port = self._store.port

    # Over HTTP, to the server

    def init_info(self, release: str) -> dict[str, Any]:
        """For `/init_weight_transfer_engine`, in the form of this vLLM release."""
        info = {"master_address": self._host, "master_port": self._port, "rank_offset": 1, "world_size": self.num_workers + 1}
        return info | (self._packing() if is_packed_at_init(release) else {})

    def update_info(self, tensors: Mapping[str, Tensor], release: str) -> dict[str, Any]:
        """For `/update_weights`: what `send` of the same tensors will send."""
        return described(in_order(tensors)) | ({} if is_packed_at_init(release) else self._packing())

    def _packing(self) -> dict[str, Any]:
        return {"packed": True, "packed_buffer_size_bytes": self._buffer_bytes, "packed_num_buffers": NUM_BUFFERS}

    # Over NCCL, to its workers

    def join(self) -> None:
        """Wait until every worker is in the group."""
        with self._fatal():
            if self._communicator or self._ended:
                raise SyncError(self._ended or "the workers have joined already")
            # creating an id makes NCCL listen forever, so wait for a worker first
            come = f"none of the server's {self.num_workers} workers came to {self._host}:{self._port}, which it must reach,"
            self._wait(self._is_anyone_there, come, pause=_SLOW_POLL)
            with self._on(self._streams[0]):
                self._form()
            self._store = None  # all have read it

    def _form(self) -> None:
        late = (
            f"not all of the server's {self.num_workers} workers joined over NCCL {self._library.version()}, which must be the "
            "same release there and may need NCCL_SOCKET_IFNAME to name the network,"
        )
        group_id = self._library.new_id()
        self._publish(pickled_id(group_id))
        with self._calls:
            self._go_on()
            self._communicator = self._library.begin(group_id, rank=0, size=self.num_workers + 1)
        self._wait(self._is_idle, late)
        lane = _Lane(self._streams[0], torch.zeros(1, device=self.device))
        self._call(lambda it: self._library.all_reduce(it, lane.address, num_floats=1, stream=lane.handle), late)
        lane.mark()
        self._wait_for(lane, late)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Returns when every worker has them all. They may be on the GPU or in host memory, where pinned is faster."""
        with self._fatal(), torch.no_grad():
            if not self._communicator:
                raise SyncError(self._ended or "no worker has joined: call join first")
            planned = chunks(in_order(tensors), self._buffer_bytes)
            if planned:
                self._send(planned)

    def _send(self, planned: Sequence[Sequence[Named]]) -> None:
        lanes = self._lanes(planned)
        for number, chunk in enumerate(planned):
            lane = lanes[number % len(lanes)]
            late = f"broadcast {number + 1} of {len(planned)} to {self.num_workers} workers did not go on"
            self._wait_for(lane, late)
            with self._on(lane.stream):
                self._call(self._broadcast(lane, lane.fill(chunk)), late)
            lane.mark()
        for lane in lanes:
            self._wait_for(lane, f"the last of {len(planned)} broadcasts to {self.num_workers} workers did not end")

    def _lanes(self, planned: Sequence[Sequence[Named]]) -> list[_Lane]:
        """Their memory is allocated on their own streams, so that it is not reused while they still need it."""
        largest = max(sum(tensor.nbytes for _, tensor in chunk) for chunk in planned)
        lanes = []
        for stream in self._streams[: len(planned)]:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still be computing the weights
            with self._on(stream):
                lanes.append(_Lane(stream, torch.empty(largest, dtype=torch.uint8, device=self.device)))
        return lanes

    def _broadcast(self, lane: _Lane, num_bytes: int) -> Callable[[int], None]:
        return lambda it: self._library.broadcast(it, lane.address, num_bytes=num_bytes, stream=lane.handle)

    # Ending

    def abort(self, reason: str = "the sender was closed") -> None:
        """End what runs; waiting calls raise `SyncError`. Needs no worker, and can be called again."""
        self._ended = self._ended or reason
        # a call that hangs is ended by the abort itself, so do not wait long for the lock
        is_held = self._calls.acquire(timeout=_ENDING)
        communicator, self._communicator, self._store = self._communicator, 0, None
        if is_held:
            self._calls.release()
        if communicator:
            ending = threading.Thread(target=self._end, args=(communicator,), name="headrace-vllm-nccl-end", daemon=True)
            ending.start()
            ending.join(_ENDING)

    def close(self) -> None:
        self.abort()

    def _end(self, communicator: int) -> None:
        """In its own thread, since it may wait for a kernel to leave the GPU."""
        with self._on(None), contextlib.suppress(SyncError):  # it is broken already
            self._library.abort(communicator)

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """Any failure leaves the two ends out of step, so it ends the group. After an `abort`, its reason is raised."""
        try:
            yield
        except BaseException as error:
            ended = self._ended
            self.abort(str(error) or type(error).__name__)
            if ended and isinstance(error, SyncError):
                raise SyncError(ended) from error
            raise

    # Waiting

    def _wait(self, is_done: Callable[[], bool], late: str, *, pause: float = _POLL) -> None:
        until = time.monotonic() + self._deadline
        while not is_done():
            self._go_on()
            if time.monotonic() > until:
                raise SyncError(f"{late} within {self._deadline:g} s; the server's log may say why")
            time.sleep(pause)

    def _wait_for(self, lane: _Lane, late: str) -> None:
        self._wait(lambda: self._is_idle() and lane.is_free(), late)

    def _go_on(self) -> None:
        if self._ended:
            raise SyncError(self._ended)

    def _is_idle(self) -> bool:
        with self._calls:
            self._go_on()
            return self._library.is_idle(self._communicator)

    def _call(self, call: Callable[[int], None], late: str) -> None:
        """An NCCL call. It is over when its work is on the GPU's stream, which may require reaching all peers."""
        with self._calls:
            self._go_on()
            call(self._communicator)
        self._wait(self._is_idle, late)

    # The store. No frame that raises may hold it, or a kept traceback would keep it open

    def _is_anyone_there(self) -> bool:
        """A worker counts itself under a key that only torch can read; but the number of keys can be seen."""
        store = self._store
        return store is not None and store.num_keys() > 0

    def _publish(self, value: bytes) -> None:
        store = self._store
        if store is not None:
            store.set(ID_KEY, value)  # type: ignore[arg-type]  # bytes are taken as they are

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Makes our GPU, and the stream if one is given, the current ones."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield


class _Lane:
    """A buffer, and the stream on which it is filled and sent. One lane is filled while the other is sent."""

    def __init__(self, stream: torch.cuda.Stream | None, buffer: Tensor) -> None:
        self.stream, self._buffer = stream, buffer
        self._event = torch.cuda.Event() if stream is not None else None

    @property
    def address(self) -> int:
        return self._buffer.data_ptr()

    @property
    def handle(self) -> int:
        return self.stream.cuda_stream if self.stream is not None else 0

    def fill(self, chunk: Sequence[Named]) -> int:
        """Copy the tensors in; returns their size in bytes."""
        start = 0
        for _, tensor in chunk:
            room = self._buffer[start : start + tensor.nbytes]
            room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            start += tensor.nbytes
        return start

    def mark(self) -> None:
        """Let `is_free` tell when everything now on the stream is done."""
        if self._event is not None:
            self._event.record(self.stream)

    def is_free(self) -> bool:
        return self._event is None or self._event.query()
