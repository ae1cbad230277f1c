"""Which GPUs a vLLM server has, how much of them, and how new weights get there.

The trainer has the first GPU, each server those that follow. `device` is what the run computes on: "cpu" or "cuda".
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from headrace.engine.native.engine_memory import EngineMemory, predict_engine_memory
from headrace.engine.vllm.settings import PARALLEL
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.model import ModelShape

_SHARED_GPU = 0.4
"""Share of the memory of a GPU that vLLM servers have together with the trainer; vLLM by itself would take nearly all."""
_WHOLE_GPU = 0.92
"""vLLM's own default."""
_CONTEXT_BYTES = 1 << 30
"""What a process takes on a GPU before it holds anything, and some room."""
CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_CACHE_GIGABYTES = "2"


def choose_handover(recipe: Recipe, *, device: str) -> str:
    """`engine.vllm.handover`, with `auto` resolved."""
    settings = recipe.engine.vllm
    wanted = settings.handover
    if wanted == "folder" or (wanted == "auto" and (device != "cuda" or settings.urls)):
        return "folder"
    setting = f"engine.vllm.handover = '{wanted}'"
    if device != "cuda":
        raise ConfigError(f"{setting}: the run is on the CPU, and has no GPU memory to hand over from; leave it auto")
    if settings.urls:
        return wanted
    gpus = gpus_of(recipe, 0, count=torch.cuda.device_count())
    if wanted == "auto":
        return "ipc" if len(gpus) == 1 else "nccl"
    if wanted == "ipc" and len(gpus) > 1:
        raise ConfigError(f"{setting}: a server of {len(gpus)} GPUs cannot open the memory of one; set it to 'nccl'")
    if wanted == "nccl" and 0 in gpus:
        raise ConfigError(f"{setting}: NCCL wants a GPU for each end, and the server has the trainer's; set it to 'ipc'")
    return wanted


def receiving_device(recipe: Recipe, index: int, *, device: str, trainer: str, engine: str) -> str:
    """Where an engine's process receives new weights, to hand them on to its server from there."""
    handover = choose_handover(recipe, device=device)
    if handover == "folder":
        return "cpu"
    if handover == "nccl":  # the GPUs of the server's workers are theirs alone
        return trainer
    count = torch.cuda.device_count()
    if recipe.engine.vllm.urls or count < 2:
        return engine
    return f"cuda:{gpus_of(recipe, index, count=count)[0]}"


def gpus_of(recipe: Recipe, index: int, *, count: int) -> list[int]:
    """The numbers of a server's GPUs, as many as its parallelism takes. On a machine of one GPU, trainer and servers share
    that one."""
    each, num_servers = 1, recipe.engine.count
    for name in PARALLEL:
        each *= int(recipe.engine.vllm.arguments.get(name, 1))
    if each == 1 and count < 2:
        return [0]
    free = max(count - 1, 1)
    if each > 1 and each * num_servers > free:
        raise ConfigError(
            f"engine.vllm.arguments: {num_servers} servers of {each} GPUs each and the trainer's one are more than the "
            f"{count} there are"
        )
    return [1 + (index * each + offset) % free for offset in range(each)]


def visible_to(recipe: Recipe, index: int) -> str:
    """CUDA_VISIBLE_DEVICES of a server, by the numbers that this process's own variable has."""
    seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    gpus = gpus_of(recipe, index, count=torch.cuda.device_count())
    return ",".join(seen[number] if seen else str(number) for number in gpus)


def gpu_share(recipe: Recipe, index: int, *, held: int, total: int) -> float:
    """The share of a GPU's memory to give a vLLM server; `held` is how many bytes its engine's process holds there."""
    count = torch.cuda.device_count()
    first = gpus_of(recipe, index, count=count)[0]
    servers = sum(gpus_of(recipe, each, count=count)[0] == first for each in range(recipe.engine.count))
    if first == 0:  # which is the trainer's too
        return round(_SHARED_GPU / servers, 3)
    beside = held + _CONTEXT_BYTES if choose_handover(recipe, device="cuda") == "ipc" else 0
    return round(max(_WHOLE_GPU / servers - beside / total, 0.0), 3)


def predict_memory(
    recipe: Recipe, shape: ModelShape, *, context: int, free: int, on_gpu: bool, total: int
) -> tuple[EngineMemory, int]:
    """(bytes in the engine's process, bytes of the server behind it). On a CPU vLLM has two processes beside its cache."""
    native = predict_engine_memory(shape, recipe.engine, dtype=recipe.model.dtype, context=context, free=free, on_gpu=on_gpu)
    weights, arguments = native.weights, recipe.engine.vllm.arguments
    if recipe.engine.vllm.urls:
        server = 0
    elif not total:
        server = weights + (cpu_cache_gigabytes() << 30) + 2 * native.process
    elif "kv_cache_memory_bytes" in arguments:
        server = weights + int(arguments["kv_cache_memory_bytes"])
    else:
        share = gpu_share(recipe, 0, held=weights + native.staging, total=total)
        server = int(float(arguments.get("gpu_memory_utilization", share)) * total)
    if on_gpu and choose_handover(recipe, device="cuda") == "folder":
        weights = 0  # it holds them in the host's memory
    return EngineMemory(weights=weights, staging=weights, cache=0, steps=0, process=native.process), server


def cpu_cache_gigabytes() -> int:
    """For the KV cache of a vLLM server on a CPU, which by itself would take half of the memory."""
    said = os.environ.get(CPU_CACHE_VARIABLE, _CPU_CACHE_GIGABYTES)
    if not said.isdecimal():
        raise ConfigError(f"the variable {CPU_CACHE_VARIABLE} is {said!r}: vLLM wants a whole number of gigabytes there")
    return int(said)
