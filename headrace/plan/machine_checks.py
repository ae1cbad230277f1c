"""Checks of the machine that do not need torch: processor, and runs that go on or have died."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.launch import is_in_use, read_summary
from headrace.plan.doctor import Finding, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.plan.doctor import Check, Subject


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


CHECKS: tuple[Check, ...] = (check_python, check_cores, check_runs)
