"""`engine.kind = "vllm"`: a stock vLLM server over HTTP, for models past one GPU. Which GPUs it has, and how weights get there.

The trainer's ranks have the first GPUs, the servers those that follow. On a host that joins, servers have all of them and read
files. `device` is what the run computes on: "cpu" or "cuda".
"""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from headrace.engine.kind import EngineKind
from headrace.engine.native.engine_memory import EngineMemory
from headrace.partial import Interrupt, continues_over_updates, pauses_unfinished
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.engine.kind import EnginePlace, OpenedEngine
    from headrace.engine.settings import EngineSettings
    from headrace.model import ModelShape
    from headrace.observe import Timeline
    from headrace.sync import WeightSync

_SHARED_GPU = 0.4  # share of a GPU for all vLLM servers beside the trainer; vLLM's default would take nearly all
WHOLE_GPU = 0.92  # vLLM's own default
_CONTEXT_BYTES = 1 << 30  # what a process takes on a GPU before it holds anything, and a margin
CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_CACHE_GIGABYTES = "2"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be started for


class VllmKind(EngineKind):
    name = section = "vllm"
    runs_inline = False
    can_sleep = False
    has_server = records_routing = records_entropy = True

    def num_engines(self, settings: EngineSettings) -> int:
        return len(settings.vllm.urls) or settings.count

    def gpus_for_itself(self, recipe: Recipe) -> int:
        return 0 if recipe.device == "cpu" else recipe.engine.vllm.gpus_per_server

    def check(self, recipe: Recipe) -> None:
        settings = recipe.engine.vllm
        if settings.urls and recipe.cluster.listen:
            raise ConfigError("engine.vllm.urls: hosts that join start servers of their own (cluster.listen); leave it out")
        for section, sampling in (("sampling", recipe.sampling), ("evaluate.sampling", recipe.evaluate.sampling)):
            if not 0.01 <= sampling.temperature <= 2:
                given = f"{section}.temperature = {sampling.temperature}"
                raise ConfigError(f"{given}: vLLM samples at temperatures from 0.01 to 2")
        if recipe.engine.record_routing and recipe.sampling.stop:
            raise ConfigError(
                "engine.record_routing = true: vLLM reports experts when a call ends by itself, and Headrace ends one at a "
                "text of sampling.stop; leave that empty, or set engine.kind = 'native'"
            )
        if settings.start_seconds >= recipe.deadline:
            raise ConfigError(
                f"engine.vllm.start_seconds = {settings.start_seconds:g}: a run stops after deadline = {recipe.deadline:g} s "
                f"without news; raise that first"
            )
        if recipe.lora.is_on:
            server_rank(recipe)
            if continues_over_updates(recipe):
                raise ConfigError(
                    f"partial.interrupt = '{recipe.partial.interrupt}': with [lora], a call at a vLLM server keeps the adapter "
                    f"it began with; set it to 'lease', 'abort' or 'drain'"
                )
        if pauses_unfinished(recipe) and recipe.partial.pausing in (Interrupt.KEEP, Interrupt.LEASE):
            raise ConfigError(
                f"partial.interrupt = '{recipe.partial.interrupt}': vLLM cannot score new weights while it keeps unfinished "
                f"rollouts of a synchronous run paused; set it to 'abort'"
            )

    def describe(self, settings: EngineSettings, *, max_tokens: int) -> list[str]:
        vllm, count = settings.vllm, self.num_engines(settings)
        gpus = f" of {each} GPUs each, {count * each} in all" if (each := vllm.gpus_per_server) > 1 else ""
        servers = f"{count} server(s){gpus}, started here" if count else "a server for each engine that joins, started there"
        started = f"{servers} {shlex.join(vllm.command_line())}".rstrip()
        return [
            self._sizes(settings, max_tokens=max_tokens, counted="engine.vllm.urls" if vllm.urls else "engine.count"),
            f"vllm       {f'{count} server(s){gpus}, running already' if vllm.urls else started}",
        ]

    def check_machine(self, recipe: Recipe, *, device: str) -> None:
        from headrace.engine.vllm.server import choose_python, find_vllm

        if recipe.engines_join:  # no server is on this machine
            return
        cpu_cache_gigabytes()
        choose_handover(recipe, device=device)
        if device == "cuda" and not recipe.engine.vllm.urls:
            gpus_of(recipe, 0, count=num_gpus())
        if recipe.engine.record_routing and device == "cpu" and not recipe.engine.vllm.urls:
            told = "vLLM's CPU build does not report experts; leave it false, or set engine.kind = 'native'"
            raise ConfigError(f"engine.record_routing = true: {told}")
        if not recipe.engine.vllm.urls:
            find_vllm(choose_python(recipe.engine.vllm.python))

    def check_model(self, recipe: Recipe, shape: ModelShape) -> None:
        """As vLLM checks when it starts: heads are divided, KV heads divided or copied, and the vocabulary padded to 64s first.
        Experts may be divided otherwise."""

        def undivided(count: int) -> str:
            vocabulary, (fewer, more) = -(-shape.vocabulary // 64) * 64, sorted((shape.kv_heads, count))
            sizes = {
                f"{shape.heads} attention heads": shape.heads % count,
                f"{shape.kv_heads} KV heads": more % fewer,
                f"a vocabulary of {vocabulary} (padded)": vocabulary % count,
                f"an MLP of width {shape.intermediate}": not shape.experts and shape.intermediate % count,
            }
            return " and ".join(what for what, rest in sizes.items() if rest)

        count = recipe.engine.vllm.arguments.get("tensor_parallel_size", 1)
        if told := undivided(count):
            most = next(each for each in range(count, 0, -1) if not undivided(each))
            given = f"engine.vllm.arguments.tensor_parallel_size = {count}"
            raise ConfigError(f"{given}: vLLM cannot divide {told} evenly; set it to {most}")

    def listens_on_host(self, recipe: Recipe, *, device: str) -> bool:
        return choose_handover(recipe, device=device) == "nccl"

    def receives_on(self, recipe: Recipe, index: int, *, device: str, trainer: str, engine: str) -> str:
        """The engine's process passes weights on to its server from this device."""
        handover = choose_handover(recipe, device=device)
        if handover == "folder":
            return "cpu"
        if handover == "nccl":  # the GPUs of the server's workers are theirs alone
            return trainer
        if recipe.engine.vllm.urls or num_gpus() < 2:
            return engine
        return f"cuda:{gpus_of(recipe, index, count=num_gpus())[0]}"

    def versions_in_folder(self, recipe: Recipe, *, device: str) -> int:
        """An engine that is late has the one before; adapters are small."""
        has_file = not recipe.lora.is_on and choose_handover(recipe, device=device) == "folder"
        return min(2, self.num_engines(recipe.engine)) if has_file else 0

    def predict_memory(
        self, recipe: Recipe, shape: ModelShape, *, context: int, free: int, most_blocks: int, on_gpu: bool, total: int
    ) -> tuple[EngineMemory, int]:
        """On a CPU, vLLM adds two processes to its weights and its cache."""
        native, _ = super().predict_memory(
            recipe, shape, context=context, free=free, most_blocks=most_blocks, on_gpu=on_gpu, total=total
        )
        weights, arguments = native.weights, recipe.engine.vllm.arguments
        if recipe.engine.vllm.urls:
            server = 0
        elif not total:
            server = weights + (cpu_cache_gigabytes() << 30) + 2 * native.process
        elif "kv_cache_memory_bytes" in arguments:
            server = weights // recipe.engine.vllm.shards + int(arguments["kv_cache_memory_bytes"])
        else:
            share = gpu_share(recipe, 0, held=weights + native.staging, total=total)
            server = int(float(arguments.get("gpu_memory_utilization", share)) * total)
        host = 0
        if on_gpu and choose_handover(recipe, device="cuda") == "folder":
            weights, host = 0, weights if recipe.lora.is_on else 2 * weights
        return EngineMemory(weights=weights, staging=weights, cache=0, steps=0, process=native.process, host=host), server

    def gpu_memory(self, recipe: Recipe, shape: ModelShape, *, context: int) -> EngineMemory:
        native, settings = super().gpu_memory(recipe, shape, context=context), recipe.engine.vllm
        if settings.urls:
            return EngineMemory(weights=0, staging=0, cache=0, steps=0, process=0)
        is_auto = settings.handover == "auto" and not recipe.engines_join and not recipe.lora.is_on
        is_beside = settings.gpus_per_server == 1 and (is_auto or settings.handover == "ipc")
        return EngineMemory(
            weights=native.weights // settings.shards,
            staging=2 * native.weights if is_beside else 0,  # the engine's process has them there
            cache=int(settings.arguments.get("kv_cache_memory_bytes", 0)),
            steps=0,
            process=0,
        )

    async def open(
        self, recipe: Recipe, model_path: str, place: EnginePlace, *, sync: WeightSync, timeline: Timeline
    ) -> OpenedEngine:
        from headrace.engine.vllm.open import open_engine

        return await open_engine(recipe, model_path, place, sync=sync, timeline=timeline)


def choose_handover(recipe: Recipe, *, device: str) -> str:
    """`engine.vllm.handover`, with `auto` resolved."""
    settings = recipe.engine.vllm
    wanted = "folder" if recipe.engines_join else settings.handover
    if wanted == "folder" or (wanted == "auto" and (device != "cuda" or settings.urls or recipe.lora.is_on)):
        return "folder"
    setting = f"engine.vllm.handover = '{wanted}'"
    if recipe.lora.is_on:
        raise ConfigError(f"{setting}: vLLM reads adapters from folders; leave it auto")
    if device != "cuda":
        raise ConfigError(f"{setting}: the run is on the CPU, and has no GPU memory to hand over from; leave it auto")
    if settings.urls:
        return wanted
    gpus = gpus_of(recipe, 0, count=num_gpus())
    if wanted == "auto":
        is_alone = recipe.engine.count == recipe.ranks_here == 1  # otherwise one file is less than copies on GPU 0
        return "ipc" if len(gpus) == 1 else "nccl" if is_alone else "folder"
    if wanted == "ipc" and len(gpus) > 1:
        raise ConfigError(f"{setting}: a server of {len(gpus)} GPUs cannot open the memory of one; set it to 'nccl'")
    if wanted == "nccl" and gpus[0] < max(recipe.ranks_here, 1):
        raise ConfigError(f"{setting}: NCCL wants a GPU for each end, and the server has the first; leave it auto")
    return wanted


def server_rank(recipe: Recipe) -> int:
    """The smallest rank that a server can be started for and that the adapter's fits in."""
    rank = recipe.lora.rank
    if rank > _RANKS[-1]:
        raise ConfigError(f"lora.rank = {rank}: vLLM serves adapters of rank {_RANKS[-1]} at most")
    return next(each for each in _RANKS if each >= rank)


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def gpus_of(recipe: Recipe, index: int, *, count: int) -> list[int]:
    """The numbers of a server's GPUs, as many as its parallelism needs, after those of the trainer's ranks. If none is left,
    servers of one GPU share theirs."""
    each, num_servers, ranks = recipe.engine.vllm.gpus_per_server, recipe.engine.count, recipe.ranks_here
    free = count - ranks
    if each == 1 and free < 1:
        return [index % max(count, 1)]
    if each > 1 and each * num_servers > free:
        raise ConfigError(
            f"engine.vllm.arguments: {num_servers} servers of {each} GPUs each and the trainer's {ranks} are more than the "
            f"{count} there are"
        )
    return [ranks + (index * each + offset) % free for offset in range(each)]


def visible_to(recipe: Recipe, place: EnginePlace) -> str:
    """A server's CUDA_VISIBLE_DEVICES: its GPUs, translated through this process's own variable."""
    seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    first = int(place.device.partition(":")[2] or 0)
    far = list(range(first, first + recipe.engine.vllm.gpus_per_server))
    gpus = far if place.is_far else gpus_of(recipe, place.index, count=num_gpus())
    return ",".join(seen[number] if seen else str(number) for number in gpus)


def gpu_share(recipe: Recipe, index: int, *, held: int, total: int) -> float:
    """A vLLM server's share of GPU memory on this host; `held` is how many bytes its engine's process holds there."""
    if recipe.engines_join:
        return WHOLE_GPU
    firsts = [gpus_of(recipe, each, count=num_gpus())[0] for each in range(recipe.engine.count)]
    num_servers = firsts.count(firsts[index])
    if firsts[index] < recipe.ranks_here:  # the trainer's too
        return round(_SHARED_GPU / num_servers, 3)
    beside = held + _CONTEXT_BYTES if choose_handover(recipe, device="cuda") == "ipc" else 0
    return round(max(WHOLE_GPU / num_servers - beside / total, 0.0), 3)


def cpu_cache_gigabytes() -> int:
    """For the KV cache of a vLLM server on a CPU; its default would be half of the memory."""
    said = os.environ.get(CPU_CACHE_VARIABLE, _CPU_CACHE_GIGABYTES)
    if not said.isdecimal():
        raise ConfigError(f"the variable {CPU_CACHE_VARIABLE} is {said!r}: vLLM wants a whole number of gigabytes there")
    return int(said)
