"""What a GPU holds while processes share it, and the service that lets them compute at the same time."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.gauge import GIB
from headrace.bench.parts import say
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_EVERY = 0.1
_CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 20.0


class GpuMemory:
    """A context that looks at the first GPU ten times a second: torch keeps what it took, so nothing large goes unseen.

    Figures are of what was taken since it began. Without `nvidia-ml-py`, or without a GPU, there are none.
    """

    def __init__(self) -> None:
        self.peak: float | None = None
        """GiB of all processes together."""
        self.peak_of: dict[str, float] = {}
        """GiB of each process of the run, by name, where the system says which is which."""
        self._library: Any = _nvml()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="GPU memory", daemon=True)
        self._before = 0

    def __enter__(self) -> GpuMemory:
        if self._library is not None:
            self._handle = self._library.nvmlDeviceGetHandleByIndex(0)
            self._before = int(self._library.nvmlDeviceGetMemoryInfo(self._handle).used)
            self.peak = 0.0
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(_EVERY):
            used = int(self._library.nvmlDeviceGetMemoryInfo(self._handle).used) - self._before
            self.peak = max(self.peak or 0.0, used / GIB)
            for process in self._library.nvmlDeviceGetComputeRunningProcesses(self._handle):
                name = role_of(process.pid)
                if name is not None and process.usedGpuMemory is not None:
                    self.peak_of[name] = max(self.peak_of.get(name, 0.0), process.usedGpuMemory / GIB)


def role_of(process: int) -> str | None:
    """The name a run gave to a process of its own; None for others, and where numbers are of another namespace."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return words[words.index(b"headrace.launch.child") + 1].decode() if b"headrace.launch.child" in words else None


def _nvml() -> Any:  # noqa: ANN401  (the library, where it is installed and finds a GPU)
    if importlib.util.find_spec("pynvml") is None:
        return None
    library: Any = importlib.import_module("pynvml")
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    return library


def check_service() -> None:
    """Whether there is one to start."""
    if shutil.which(_CONTROL) is None:
        raise ConfigError(f"--mps: {_CONTROL} is not installed here")


@contextlib.contextmanager
def multi_process_service(folder: Path) -> Iterator[None]:
    """NVIDIA's MPS for the processes started inside; it is stopped afterwards, whatever happened.

    The process that calls this must have used CUDA before, if it does at all: a client of the service it would be waited for
    when the service is told to end.
    """
    check_service()
    places = {"CUDA_MPS_PIPE_DIRECTORY": folder / "pipe", "CUDA_MPS_LOG_DIRECTORY": folder / "log"}
    before = {name: os.environ.get(name) for name in places}
    for name, place in places.items():
        place.mkdir(parents=True)
        os.environ[name] = str(place)
    try:
        subprocess.run([_CONTROL, "-d"], check=True, timeout=_SECONDS)
        say("MPS: started")
        try:
            yield
        finally:
            subprocess.run([_CONTROL], input="quit\n", text=True, check=False, timeout=_SECONDS)
            say("MPS: stopped")
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
