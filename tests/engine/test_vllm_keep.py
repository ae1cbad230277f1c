"""The keeper of a server: nothing of what it keeps outlives whoever asked for it."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from headrace.engine.vllm import keep

STUBBORN = """
import multiprocessing, signal, sys, time
from multiprocessing import shared_memory

def stubborn(is_up):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_up.set()
    time.sleep(600)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = shared_memory.SharedMemory(create=True, size=64)
    spawn = multiprocessing.get_context("spawn")
    is_up = spawn.Event()
    spawn.Process(target=stubborn, args=(is_up,)).start()
    is_up.wait()
    print(memory.name, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the keeper finds processes in /proc")
def test_shared_memory_of_processes_that_do_not_heed_it_is_removed(tmp_path: Path) -> None:
    """They are killed; the process that Python keeps to clean up after them is not, before it has."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    impatient = (
        f"import sys; sys.path.insert(0, {str(Path(keep.__file__).parent)!r}); import keep; keep._PATIENCE = 0.1; keep.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", impatient, sys.executable, str(tmp_path / "stubborn.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdout:
        name = process.stdout.readline().strip()
        process.stdin.close()
        process.wait()
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name=name)
