"""Checks that memory, GPU memory, shared memory and disk are large enough for the model."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.buffer import buffer_policy
from headrace.config import make_recipe
from headrace.launch import forecast_memory, lends, versions_for_servers
from headrace.lora import base_of
from headrace.partial import pauses_unfinished
from headrace.plan.doctor import Finding, check, size
from headrace.settings import to_dict
from headrace.sync import shared_folder, transport_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.config import Recipe
    from headrace.launch import Forecast
    from headrace.model import ModelShape
    from headrace.plan.doctor import Check, Subject

_FULL = 0.95
"""A prediction above this share of a GPU's free memory may not fit."""
_FEWEST_TOKENS = 2048
"""The smallest forward pass that still keeps a GPU busy."""


@check()
def check_memory(subject: Subject) -> Iterator[Finding]:
    free, total = free_memory()
    if not total:
        return
    what, recipe = f"memory: {size(free)} free of {size(total)}", subject.recipe
    expected = _forecast(subject, recipe) if recipe is not None and _is_on_gpu(recipe) else None
    if expected is None or not expected.host:
        yield _compared(subject, what, free, total, on_gpu=False)
        return
    what += f"; the engines' processes and the files for their servers hold {size(expected.host)} of weights there"
    fix = "take fewer servers of more GPUs each (engine.count, engine.vllm.arguments), or a machine with more memory"
    yield Finding("problem", what, fix) if expected.host > free else Finding("ok", what)


@check("recipe", "shape")
def check_gpu_memory(subject: Subject, recipe: Recipe, shape: ModelShape) -> Iterator[Finding]:
    if _is_on_gpu(recipe):
        free, total = torch.cuda.mem_get_info()
        yield _compared(subject, f"GPU memory: {size(free)} free of {size(total)}", free, total, on_gpu=True)


def free_memory() -> tuple[int, int]:
    """(bytes available, bytes in total) in this process's container; zeros if unknown."""
    free = total = 0
    with contextlib.suppress(OSError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (1024 * int(lines[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    with contextlib.suppress(OSError, ValueError):  # no such files outside a container; "max" where there is no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def _compared(subject: Subject, what: str, free: int, total: int, *, on_gpu: bool) -> Finding:
    """What the recipe needs against what there is, if it runs there."""
    recipe = subject.recipe
    expected = _forecast(subject, recipe) if recipe is not None and _is_on_gpu(recipe) == on_gpu else None
    if recipe is None or expected is None:
        return Finding("ok", what)
    need, what = expected.fullest_device, f"{what}; {_described(expected)}"
    if need > total:
        return Finding("problem", what, _fix(subject, recipe, total))
    if need > free:
        first = "free the GPU of other processes" if on_gpu else "end other processes"
        return Finding("problem", what, f"{first}, or {_fix(subject, recipe, free)}")
    if need > _FULL * free:
        return Finding("warning", what, f"it may just fit; to be sure, {_fix(subject, recipe, int(_FULL * free))}")
    return Finding("ok", what)


def _forecast(subject: Subject, recipe: Recipe) -> Forecast | None:
    """The memory a recipe would take with the subject's model; None if the model is unknown or the device is missing."""
    if subject.shape is None or (recipe.device == "cuda" and not torch.cuda.is_available()):
        return None
    return forecast_memory(
        recipe,
        subject.shape,
        context=subject.context,
        longest_prompt=subject.longest_prompt,
        num_held_out=sum(map(len, subject.held_out_rows.values())),
        num_parameters=subject.num_parameters,
    )


def _described(expected: Forecast) -> str:
    trainer, engine = expected.trainer, expected.engine
    optimizer = trainer.masters + trainer.gradients + trainer.moments
    twice = "twice " if engine.weights == engine.staging else ""
    held = f"an engine {size(engine.total)} (weights {twice}{size(engine.weights + engine.staging)}"
    behind = f"), the vLLM server behind it {size(expected.server)}" if expected.server else f", KV cache {size(engine.cache)})"
    ranks = expected.recipe.train.parallel.ranks
    who = "the trainer" if ranks == 1 else f"each of {ranks} trainer ranks"
    return (
        f"at its peak {who} takes {size(trainer.total)} (weights {size(trainer.weights)}, optimizer {size(optimizer)}, "
        f"activations of {trainer.tokens} tokens {size(trainer.activations)}), {held}{behind}"
        f"{', and the spare one on its device as much while it is lent (engine.lend)' if lends(expected.recipe) else ''}"
    )


def _fix(subject: Subject, recipe: Recipe, room: int) -> str:
    """The cheapest change with which the run is predicted to fit."""
    for change in _changes(recipe):
        changed = make_recipe({**to_dict(recipe), **change})
        expected = _forecast(subject, changed)
        if expected is not None and expected.fullest_device <= room:
            words = " and ".join(f"{key} = {value!r}" for key, value in change.items())
            return f"set {words}: {size(expected.trainer.total)} for the trainer then"
    larger = "GPU" if _is_on_gpu(recipe) else "machine"
    return f"lower engine.kv_blocks, take a smaller model or model.dtype = 'bfloat16', or a larger {larger}"


def _changes(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Possible changes, cheapest first."""
    if not recipe.engine.sleeps and buffer_policy(recipe).takes_turns and not pauses_unfinished(recipe):
        yield {"engine.sleep": "cache"}
        yield {"engine.sleep": "weights"}
    if lends(recipe):
        yield {"engine.lend": False}
    tokens = recipe.train.micro_batch_tokens // 2
    while tokens >= _FEWEST_TOKENS:
        yield {"train.micro_batch_tokens": tokens}
        tokens //= 2
    layers = {"train.recompute": "layers"}
    yield layers
    few = {**layers, "train.micro_batch_tokens": min(recipe.train.micro_batch_tokens, _FEWEST_TOKENS)}
    yield few
    yield {**few, "train.offload": ["optimizer", "activations"]}


@check()
def check_shared_memory(subject: Subject) -> Iterator[Finding]:
    recipe = subject.recipe
    folder = shared_folder(recipe.sync.folder if recipe else "")
    if not folder.is_dir():
        return
    for_servers = 0 if recipe is None else versions_for_servers(recipe, device="cuda" if _is_on_gpu(recipe) else "cpu")
    free, need = shutil.disk_usage(folder).free, (2 + for_servers) * subject.published_bytes
    versions = f"{2 + for_servers} versions, {for_servers} of them for servers," if for_servers else "two versions"
    what = f"{folder}: {size(free)} free" + (f"; {versions} of the weights take {size(need)}" if need else "")
    if free >= max(need, 1):
        yield Finding("ok", what)
        return
    transport = recipe.sync.transport if recipe is not None and not recipe.is_inline else ""
    is_used = for_servers or transport == "auto" or (transport and transport_class(transport).uses_folder)
    fix = f"make it larger: `mount -o remount,size={need // 10**9 + 1}G {folder}`, or --shm-size of a container"
    if folder != shared_folder():
        fix = "make room there, or name another folder in sync.folder"
    yield Finding("problem" if is_used else "warning", what, fix)


@check()
def check_disk(subject: Subject) -> Iterator[Finding]:
    folder = (subject.run_dir or subject.runs).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    keep = subject.recipe.checkpoint.keep if subject.recipe is not None else 0
    observed = 2e9 * subject.recipe.observe.max_gb if subject.recipe is not None else 1e9  # trace and kept rollouts
    trained = subject.adapter or subject.num_parameters
    need = (keep + 1) * 12 * trained  # float32 weights, two moments; a new one is written before one is removed
    what = f"disk at {folder}: {size(free)} free" + (f"; {keep} checkpoints and the next take {size(need)}" if need else "")
    if need and subject.recipe is not None and subject.recipe.lora.is_quantized and not base_of(subject.recipe.model.path):
        need += subject.weight_bytes
        what += f"; the rounded model (lora.quantize) {size(subject.weight_bytes)}"
    if free < need:
        yield Finding("problem", what, "make room, give a --run-dir on another disk, or lower checkpoint.keep")
    elif free < need + observed:
        what += f"; trace and rollouts up to {size(int(observed))}"
        yield Finding("warning", what, "make room, give a --run-dir on another disk, or lower observe.max_gb")
    else:
        yield Finding("ok", what)


def _is_on_gpu(recipe: Recipe) -> bool:
    return torch.cuda.is_available() and recipe.device != "cpu" and not recipe.exact


CHECKS: tuple[Check, ...] = (check_memory, check_gpu_memory, check_shared_memory, check_disk)
