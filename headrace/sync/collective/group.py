"""A process group for broadcasts, separate from a trainer's own groups: gloo on CPU, NCCL on GPUs.

It is built directly on our own store, so the default group of `torch.distributed` is never touched. This file also handles how
each backend behaves when a peer fails, and how to abort it from outside.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from headrace.errors import SyncError
from headrace.sync.sockets import TICK

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CPU_DEPTH, GPU_DEPTH = 4, 2  # buckets in flight. gloo needs more, to hide that it wakes every rank for each bucket.
_POLL = 0.0005  # seconds between polls of GPU work, which has no wait with a timeout
_FORMING_POLL = 0.005
_ENDING = 0.25  # seconds that `abort` waits for the group's connections and threads to end
_NCCL_TIMEOUT = timedelta(hours=24)
_ENVIRONMENT = threading.Lock()


class Mailbox(Store):
    """One rank's copy of the store in which members exchange addresses. `share` sends each value that this rank sets to the
    others; `put` adds the values that they have set. `stop` ends the wait of a process group for its peers."""

    def __init__(self, *, patience: float, share: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._patience, self._share = patience, share
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._stopped = ""

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def stop(self, reason: str) -> None:
        with self._changed:
            self._stopped = reason
            self._changed.notify_all()

    # Called by the process group, from its own threads

    def set(self, key: str, value: str | bytes) -> None:
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, encoded)
        self._share(key, encoded)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self.check(keys), self._patience)
        if not self.check(keys):
            raise RuntimeError(self._stopped or f"nobody has set {', '.join(keys)}")

    def check(self, keys: list[str]) -> bool:
        return self._values.keys() >= set(keys)

    def has_extended_api(self) -> bool:
        return False


class Group:
    """Rank `rank` of `size`. Call `form`, then `start` and `finish` broadcasts from rank 0, and always `abort` at the end."""

    def __init__(
        self,
        id: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        host: str,
        deadline: float,
        share: Callable[[str, bytes], None],
    ) -> None:
        self.id, self.rank, self.size, self.device = id, rank, size, device
        self.is_formed = False
        self.mailbox = Mailbox(patience=deadline, share=share)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.depth = GPU_DEPTH if self.stream is not None else CPU_DEPTH
        self._host, self._deadline = host, deadline
        self._backend: Any = None
        self._is_aborted = False
        self._lock = threading.Lock()  # between `_form` and `abort`
        self._failure: Exception | None = None
        self._forming = threading.Thread(target=self._form, name="headrace-collective-form", daemon=True)
        self._works: collections.deque[Any] = collections.deque()  # the broadcasts in flight, oldest first
        self._staging: list[Tensor] = []

    def form(self, check: Callable[[], None], *, key: str) -> None:
        """Connect to the other members. Calls `check` meanwhile, which puts the values of other members into the mailbox and
        raises to give up. `key` is for error messages."""
        self._forming.start()
        while self._forming.is_alive():
            self._forming.join(_FORMING_POLL)
            check()
        if self._failure is not None:
            raise SyncError(f"{key}: the group did not form: {self._failure}") from self._failure
        self.is_formed = True

    def start(self, piece: Tensor) -> None:
        """Start a broadcast that reads `piece` at rank 0 and writes it at other ranks."""
        assert piece.device.type == self.device.type, "gloo is never given a GPU's memory, NCCL never the host's"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        backend = self._backend
        if backend is None:
            raise SyncError("the group was aborted")
        with self.on_stream():
            self._works.append(backend.broadcast([piece], options))

    @property
    def num_in_flight(self) -> int:
        return len(self._works)

    def finish(self, seconds: float) -> bool:
        """Return whether the oldest broadcast ended in time. Raises RuntimeError if it failed."""
        failure = ""
        try:
            is_over = self._is_over(seconds)
        except RuntimeError as error:
            failure = str(error)
        if failure:  # a new error: the frames of the first refer to the work, and would keep a dead group's connections open
            raise RuntimeError(failure)
        if is_over:
            self._works.popleft()
        return is_over

    def _is_over(self, seconds: float) -> bool:
        work = self._works[0]
        if self.stream is not None:  # NCCL's `wait` blocks the stream, not this thread
            until = time.monotonic() + seconds
            while not work.is_completed():
                if time.monotonic() > until:
                    return False
                time.sleep(_POLL)
            with self.on_stream():
                work.wait()
            return True
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False  # only the timeout; the work goes on
            work.wait()  # ended since, or failed: then this raises the reason
        return True

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def staging(self, num_bytes: int) -> list[Tensor]:
        """Return one buffer per bucket in flight, kept with the group."""
        if not self._staging or self._staging[0].numel() < num_bytes:
            self._staging = [torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.depth)]
        return self._staging

    def abort(self, reason: str) -> None:
        """End everything in progress, without waiting for peers."""
        self.mailbox.stop(reason)
        with self._lock:
            self._is_aborted = True
            last = [self._backend]
            self._backend = None
        self._works.clear()
        self._end(last)
        if self._forming.is_alive():
            self._forming.join(self._deadline)

    def _form(self) -> None:
        try:
            made = [self._nccl() if self.stream is not None else self._gloo()]
            with self._lock:
                if not self._is_aborted:
                    self._backend = made.pop()
            if made:
                self._end(made)
            elif self.stream is not None:  # the first call creates NCCL's communicator, and waits for the other ranks
                self.start(torch.zeros(1, dtype=torch.uint8, device=self.device))
                while not self._is_aborted and not self.finish(TICK):
                    pass
        except Exception as error:  # noqa: BLE001 - `form` raises any failure of the backend
            self._failure = error

    def _end(self, last: list[Any]) -> None:
        """Destroy the backend, whose last reference is in the list. A separate thread does it, because ncclCommAbort can wait
        for a running kernel, and gloo's destructor for a timeout if a silent peer has sent half a message."""
        if last[0] is not None:
            ending = threading.Thread(target=self._end_here, args=(last,), name="headrace-collective-end", daemon=True)
            ending.start()
            ending.join(_ENDING)

    def _end_here(self, last: list[Any]) -> None:
        """`ProcessGroupGloo.abort` does nothing (torch 2.11 and 2.13), but a receive that times out closes all connections of
        its group. So this starts a receive that no peer answers, with a timeout of 1 ms."""
        if self.stream is not None:
            last[0].abort()
        else:
            peer = 1 - min(self.rank, 1)
            with contextlib.suppress(RuntimeError):  # it is meant to fail
                last[0].recv([torch.empty(1, dtype=torch.uint8)], peer, 1 << 20).wait(timedelta(milliseconds=1))
        last.clear()

    def _gloo(self) -> Any:  # noqa: ANN401
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._deadline + 1.0)  # our own deadline fires first, and names who is late
        options._threads = self.depth
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        return dist.ProcessGroupGloo(self.mailbox, self.rank, self.size, options)

    def _nccl(self) -> Any:  # noqa: ANN401
        """By default NCCL's watchdog kills the process on a late or failed call. The environment variable that prevents this is
        read when the group is created, and set only for that moment: a trainer's own groups keep their setting."""
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = _NCCL_TIMEOUT
        torch.cuda.set_device(self.device)  # for this thread only
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        with _ENVIRONMENT:
            before = os.environ.get(name)
            os.environ[name] = "0"
            try:
                return dist.ProcessGroupNCCL(self.mailbox, self.rank, self.size, options)
            finally:
                del os.environ[name]
                if before is not None:
                    os.environ[name] = before
