"""Captures the buckets' steps as CUDA graphs on a thread beside the decode thread; meanwhile steps run eagerly."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from headrace.engine.native.cuda import compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from headrace.engine.native.cuda.buckets import Bucket, Buckets
    from headrace.engine.native.cuda.slot_state import SlotState

log = logging.getLogger("headrace.engine")


class GraphCapture:
    """Graphs run the twin, with its layers compiled where that works."""

    def __init__(
        self, buckets: Buckets, state: SlotState, twin: PreTrainedModel, *, compiles: bool, device: torch.device
    ) -> None:
        self._buckets, self._state, self._twin, self._compiles, self._device = buckets, state, twin, compiles, device
        self._pool: Any = None  # of memory that all graphs share
        self._is_compiled = False
        self._started: set[bool] = set()
        self._thread: threading.Thread | None = None
        self._turn = threading.Condition()  # between the capture thread and the decode thread, which may release memory
        self._is_suspended = self._is_capturing = self._is_closing = False

    @property
    def is_started(self) -> bool:
        return bool(self._started)

    def start(self, *, is_restricted: bool = False) -> None:
        """Compile the layers and capture the graphs, once; those with restricted rows at the first such step."""
        before = self._thread
        if is_restricted not in self._started:
            self._started.add(is_restricted)
            self._thread = threading.Thread(target=self._warm, args=(before, is_restricted), name="warm", daemon=True)
            self._thread.start()

    def restart(self) -> None:
        """Forget all graphs and capture them again: something has moved, and they hold its old address."""
        with self._buckets.lock:
            for bucket in self._buckets.all():
                bucket.graphs.clear()
            self._pool = None  # freed with the graphs
        started, self._started = self._started, set()
        for is_restricted in sorted(started):
            self.start(is_restricted=is_restricted)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop after the current capture."""
        with self._turn:
            self._is_closing = True
            self._turn.notify_all()
        self.wait()

    def suspend(self) -> None:
        """Wait for the capture in progress (the first also compiles); the next one waits for `resume`."""
        with self._turn:
            self._is_suspended = True
            self._turn.wait_for(lambda: not self._is_capturing)

    def resume(self) -> None:
        with self._turn:
            self._is_suspended = False
            self._turn.notify_all()

    def _warm(self, before: threading.Thread | None, is_restricted: bool) -> None:
        if before is not None:
            before.join()
        try:
            with torch.no_grad():
                self._capture_all(is_restricted=is_restricted)
        except Exception:
            log.warning("this model's steps could not be captured as CUDA graphs; it is served eagerly", exc_info=True)

    def _capture_all(self, *, is_restricted: bool) -> None:
        torch.cuda.set_device(self._device)
        if self._compiles and not self._is_compiled:
            compiled.compile_layers(self._twin)
        self._is_compiled = True
        decode = [self._buckets.get(size) for size in reversed(self._buckets.decode_sizes)]
        prompt = [self._buckets.get(shape) for shape in reversed(self._buckets.prompt_shapes)]
        if is_restricted:
            self._buckets.allowed_rows(0)  # allocated now, so that no graph does
        # cuBLAS has a workspace per stream, and a graph keeps that of its capture stream: anything else that ran on that stream
        # during a replay would corrupt sums or deadlock. So trial runs have a stream of their own.
        tried_on, captured_on = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        began = time.perf_counter()
        for bucket in (decode[0], prompt[0], *decode[1:], *prompt[1:]):
            with self._capturing():
                if self._is_closing:
                    return
                if is_restricted not in bucket.graphs:
                    self._capture_compiled(bucket, tried_on, captured_on, is_restricted=is_restricted)
        log.info("captured %d graphs in %.1f s", len(decode) + len(prompt), time.perf_counter() - began)

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """Within it weights and cache stay in place: entering waits while they are released, `suspend` waits for the exit."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_closing or not self._is_suspended)
            self._is_capturing = True
        try:
            yield
        finally:
            with self._turn:
                self._is_capturing = False
                self._turn.notify_all()

    def _capture_compiled(self, bucket: Bucket, *streams: torch.cuda.Stream, is_restricted: bool) -> None:
        try:
            self._capture(bucket, *streams, is_restricted=is_restricted)
        except Exception:
            if not self._compiles:
                raise
            log.warning("this model's layers could not be compiled; its graphs hold them as they are", exc_info=True)
            compiled.undo_compile(self._twin)
            self._compiles = False
            self._capture(bucket, *streams, is_restricted=is_restricted)

    def _capture(
        self, bucket: Bucket, tried_on: torch.cuda.Stream, captured_on: torch.cuda.Stream, *, is_restricted: bool
    ) -> None:
        """Run once in scratch buffers with no rollout in any row, then capture with the real ones."""
        scratch, stops = bucket.make_scratch(), self._state.stops
        tried_on.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(tried_on):
            scratch.run(self._twin, is_restricted)
        tried_on.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=pool, stream=captured_on, capture_error_mode="thread_local"):
            allowed = bucket.run(self._twin, is_restricted)
        with self._buckets.lock:
            if self._state.stops is stops:  # else the graph points at freed memory; `restart` captures it again
                bucket.graphs[is_restricted], self._pool = (
                    (graph, allowed),
                    pool,
                )  # a pool that no graph uses cannot be used again
