"""Whether there is room: memory, the GPU's memory, shared memory, disk. What is needed follows from the model's size."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.orchestrate.doctor.finding import Finding, size
from headrace.orchestrate.doctor.machine import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.orchestrate.doctor.finding import Check, Subject

_THERE = ("auto", "shared_memory", "files")
"""Transports whose updates lie in sync.folder."""


def check_memory(subject: Subject) -> Iterator[Finding]:
    free, total = free_memory()
    need = 0 if _is_on_gpu(subject) else subject.weight_bytes + subject.trainer_bytes
    if not total:
        return
    what = f"memory: {size(free)} free of {size(total)}" + (f"; weights and optimizer take {size(need)}" if need else "")
    if need > free:
        yield Finding("problem", what, "take a smaller model, or a machine with more memory")
    else:
        yield Finding("ok", what)


def free_memory() -> tuple[int, int]:
    """(bytes available, bytes in all), within this process's container; zeros where the system does not tell."""
    free = total = 0
    with contextlib.suppress(OSError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (1024 * int(lines[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    with contextlib.suppress(OSError, ValueError):  # no such files outside a container; "max" where there is no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def check_gpu_memory(subject: Subject) -> Iterator[Finding]:
    need = subject.weight_bytes + subject.trainer_bytes
    if not need or not _is_on_gpu(subject):
        return
    free, total = torch.cuda.mem_get_info()
    what = f"GPU memory: {size(free)} free of {size(total)}; weights and optimizer take {size(need)}, the KV cache the rest"
    if need > total:
        yield Finding("problem", what, "take a smaller model, model.dtype = 'bfloat16', or a larger GPU")
    elif need > 0.8 * free:
        yield Finding("warning", what, "little is left for the KV cache and activations; free the GPU of other processes")
    else:
        yield Finding("ok", what)


def check_shared_memory(subject: Subject) -> Iterator[Finding]:
    folder = Path(subject.recipe.sync.folder) if subject.recipe and subject.recipe.sync.folder else SHARED_MEMORY
    if not folder.is_dir():
        return
    free, need = shutil.disk_usage(folder).free, 2 * subject.weight_bytes
    what = f"{folder}: {size(free)} free" + (f"; two versions of the weights take {size(need)}" if need else "")
    if free >= max(need, 1):
        yield Finding("ok", what)
        return
    recipe = subject.recipe
    is_used = recipe is not None and recipe.orchestrate == "local" and recipe.sync.transport in _THERE
    fix = f"make it larger: `mount -o remount,size={need // 10**9 + 1}G {folder}`, or --shm-size of a container"
    if folder != SHARED_MEMORY:
        fix = "make room there, or name another folder in sync.folder"
    yield Finding("problem" if is_used else "warning", what, fix)


def check_disk(subject: Subject) -> Iterator[Finding]:
    folder = (subject.run_dir or subject.runs).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    keep = subject.recipe.checkpoint.keep if subject.recipe is not None else 0
    need = (keep + 1) * 12 * subject.num_parameters  # float32 weights and both moments; the next is written before one goes
    what = f"disk at {folder}: {size(free)} free" + (f"; {keep} checkpoints and the next take {size(need)}" if need else "")
    if free < need:
        yield Finding("problem", what, "make room, give a --run-dir on another disk, or lower checkpoint.keep")
    elif free < 10**9:
        yield Finding("warning", what, "make room, or give a --run-dir on another disk")
    else:
        yield Finding("ok", what)


def _is_on_gpu(subject: Subject) -> bool:
    recipe = subject.recipe
    return torch.cuda.is_available() and recipe is not None and recipe.device != "cpu" and not recipe.exact


CHECKS: tuple[Check, ...] = (check_memory, check_gpu_memory, check_shared_memory, check_disk)
