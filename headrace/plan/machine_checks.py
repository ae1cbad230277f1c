"""Checks of the machine that do not need torch: processor, sockets, and what dead runs left behind."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.launch import is_in_use, read_summary
from headrace.leftovers import orphans
from headrace.plan.doctor import Finding, check, size
from headrace.rpc import socket_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.plan.doctor import Check, Subject

SHARED_MEMORY = Path("/dev/shm")


@check()
def check_python(subject: Subject) -> Iterator[Finding]:
    yield Finding("ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")


@check()
def check_cores(subject: Subject) -> Iterator[Finding]:
    cores, allowed = os.cpu_count() or 1, usable_cores()
    threads = subject.recipe.threads if subject.recipe is not None else 0
    what = f"processor: {cores} cores" + (f", of which this process may use {allowed:g}" if allowed < cores else "")
    if (threads or cores) > allowed:
        asked = f"the recipe asks for {threads} threads" if threads else "the run would take one thread per core"
        yield Finding("warning", f"{what}; {asked}", f"set threads = {max(1, int(allowed))}")
    else:
        yield Finding("ok", f"{what}, " + (f"threads = {threads}" if threads else "one thread on each"))


def usable_cores() -> float:
    """Cores this process may run on, by its affinity and by its container's quota."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):  # no such file outside a container; "max" where there is no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        allowed = min(allowed, int(quota) / int(period))
    return allowed


@check()
def check_sockets(subject: Subject) -> Iterator[Finding]:
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(prefix=f"headrace-{os.getpid()}-") as place, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(Path(place) / "engine-0.socket"))
        yield Finding("ok", f"Unix sockets can be made in {folder}")
    except OSError as error:
        what = f"no Unix socket can be made in {folder}: {error}"
        yield Finding("problem", what, "set TMPDIR to a short path on a local disk, such as TMPDIR=/tmp")
    try:
        with socket.socket(socket.AF_INET) as loopback:
            loopback.bind(("127.0.0.1", 0))
        yield Finding("ok", "ports of 127.0.0.1 can be bound")
    except OSError as error:
        yield Finding("problem", f"no port of 127.0.0.1 can be bound: {error}", "let the process use the loopback interface")


def leftover_places(folder: str) -> list[Path]:
    """Folders in which runs with this `sync.folder` put files that their processes share."""
    shared = Path(folder) if folder else SHARED_MEMORY
    return list(dict.fromkeys((shared, Path(tempfile.gettempdir()), socket_place())))


@check()
def check_leftovers(subject: Subject) -> Iterator[Finding]:
    for place in leftover_places(subject.recipe.sync.folder if subject.recipe is not None else ""):
        stale = [path for prefix in orphans(place) for path in sorted(place.glob(f"{prefix}[-.]*"))]
        if stale:
            names = " ".join(map(str, stale[:8])) + (" …" if len(stale) > 8 else "")
            what = f"left behind by runs that were killed, {size(sum(map(_num_bytes, stale)))}: {names}"
            yield Finding("warning", what, "the next run on this host removes it")


def _num_bytes(path: Path) -> int:
    total = 0
    for file in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):  # a run that has just started removes it
            total += file.lstat().st_size if file.is_file() else 0
    return total


@check()
def check_runs(subject: Subject) -> Iterator[Finding]:
    """The system releases a lock when its process ends, unless a child that inherited the file outlives it."""
    folders = [subject.run_dir] if subject.run_dir is not None else sorted(subject.runs.glob("*"))
    for folder in folders:
        if not (folder / ".lock").exists():
            continue
        if is_in_use(folder):
            by = ", ".join(holders(folder / ".lock")) or "a process that cannot be seen from here"
            level: Literal["problem", "warning"] = "problem" if folder == subject.run_dir else "warning"
            yield Finding(level, f"{folder} is in use by {by}", "wait for that run or stop it, or give another --run-dir")
        elif (summary := read_summary(folder)).get("status") == "running":
            what = f"{folder}: its process died, at version {summary.get('version')} or later"
            yield Finding("warning", what, "the same command resumes from its last checkpoint; --fresh starts anew")


def holders(path: Path) -> list[str]:
    """The processes that have a file open (Linux only)."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if any(os.readlink(opened) == str(path.resolve()) for opened in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(f"process {process.name} ({command[:60]})")
    return found


CHECKS: tuple[Check, ...] = (check_python, check_cores, check_sockets, check_leftovers, check_runs)
