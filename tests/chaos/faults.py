"""A run as a user starts it, and faults done to its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.observe.sinks import read_metrics
from headrace.sync.transport import shared_folder

RECIPE = """
steps = 40
threads = 1
heartbeat = 30.0
[model]
path = "builtin:tiny"
hidden_size = 32
num_heads = 1
num_layers = 1
context = 512
[[tasks]]
source = "builtin:sort_digits"
[sampling]
max_tokens = 48
min_tokens = 24
[train]
batch = 32
group_size = 4
learning_rate = 1e-3
[engine]
slots = 16
[staleness]
max_lag = 1
[checkpoint]
every = 4
[observe]
keep_rollouts_every = 1
"""


@dataclass
class Running:
    """A `headrace train` in a process of its own."""

    process: subprocess.Popen[str]
    folder: Path
    command: list[str]

    @property
    def version(self) -> int:
        """The last version in the metrics."""
        path = self.folder / "metrics.jsonl"
        rows = read_metrics(path) if path.exists() else []
        return int(rows[-1]["version"]) if rows else 0

    def wait_for_version(self, version: int, *, seconds: float = 300) -> None:
        until = time.monotonic() + seconds
        while self.version < version:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < until, f"still at version {self.version}"
            time.sleep(0.02)

    def finish(self, *, seconds: float = 300) -> str:
        """Everything it printed, once it has ended."""
        return self.process.communicate(timeout=seconds)[0]

    def role(self, name: str) -> int:
        """The process that has this name."""
        for pid in family(self.process.pid):
            if command_of(pid).endswith(f"headrace.launch.child {name}"):
                return pid
        raise LookupError(f"there is no process {name}")

    def roles(self) -> list[int]:
        return [pid for pid in family(self.process.pid) if "headrace.launch.child" in command_of(pid)]

    def hit(self, name: str, number: int) -> int:
        pid = self.role(name)
        os.kill(pid, number)
        return pid

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def is_ended_by_the_second_signal(self) -> bool:
        """Interrupt it while its trainer is stopped, so that the first request cannot be done: it waits, until the second."""
        self.wait_for_version(3)
        roles = self.roles()
        self.hit("trainer", signal.SIGSTOP)
        self.process.send_signal(signal.SIGINT)
        time.sleep(2)
        assert self.process.poll() is None
        self.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        self.finish()
        assert time.monotonic() - began < 30 and self.process.returncode == 130
        return not any(map(is_alive, roles)) and not self.leftovers()

    def leftovers(self) -> list[Path]:
        """Sockets and shared memory that bear the launcher's number."""
        name = f"headrace-{self.process.pid}-*"
        return [*shared_folder().glob(name), *Path(tempfile.gettempdir()).glob(name)]


def start(tmp_path: Path, *overrides: str, output: Path | None = None) -> Running:
    """`output`: a file for what it prints, where that is more than a pipe holds."""
    tmp_path.mkdir(exist_ok=True)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "headrace.cli", "train", str(recipe), f"--run-dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with output.open("w") if output else contextlib.nullcontext(subprocess.PIPE) as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.STDOUT, text=True, env=environment)
    return Running(process, folder, command)


def again(run: Running, *overrides: str) -> Running:
    """The same command."""
    process = subprocess.Popen([*run.command, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return Running(process, run.folder, run.command)


def family(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds, *, seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
