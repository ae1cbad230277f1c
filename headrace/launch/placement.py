"""What the launcher decides for each process and tells it: where it runs, on which device, where new weights arrive."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from headrace.engine import PARALLEL
from headrace.settings import ConfigError
from headrace.sync import resolve_transport

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.config import Recipe

_SHARED_GPU = 0.4
"""Of the memory of a GPU that vLLM servers share with the trainer; each would take nearly all."""
_WHOLE_GPU = 0.92
"""vLLM's own choice."""
_CONTEXT_BYTES = 1 << 30
"""What a process on a GPU takes there before it holds anything, and some room."""
CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_CACHE_GIGABYTES = "2"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one process runs and what it uses there. The launcher makes it and hands it to the process, which decides none of
    this itself: a process on another host, or one rank of several, differs in its placement and not in its code."""

    host: str
    """The machine it runs on."""
    address: str
    """What other processes of the run reach that machine by (`sync.host`)."""
    device: str
    """Where it computes: `cpu`, `cuda` or `cuda:N`."""
    receives_on: str
    """Where new weights arrive. An engine that hands them on to a server may receive them on another device."""
    threads: int
    """CPU threads of torch."""
    run_folder: str
    log: str
    """Where its output goes."""
    shared_folder: str
    """Where shared memory and files of weights lie (`sync.folder`)."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The one line that a process reads on its standard input: who it is, and whom it works for."""

    name: str
    role: str
    """`engine` or `trainer`."""
    incarnation: int
    """Counts the starts of the process that has this name. Only the newest is let in, so nothing that an earlier one still
    sends is taken for the newest's."""
    placement: Placement
    address: str
    """Where the launcher waits for its streams."""
    heartbeat_address: str
    token: str
    """Known to the processes of the run alone."""
    silence: float
    """Seconds without a heartbeat after which it ends itself."""
    deadline: float
    """Seconds that saving may take then, once the step under way is done."""
    launcher: int
    """The launcher's process number."""
    prefix: str
    """Of everything the run makes outside its folder."""
    path: tuple[str, ...]
    """Where Python looks for modules in the launcher."""

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def read(cls, line: str) -> Order:
        fields = json.loads(line)
        return cls(**{**fields, "placement": Placement(**fields["placement"]), "path": tuple(fields["path"])})


def place_on_this_host(recipe: Recipe, role: str, index: int, *, run_folder: Path, name: str, shared_folder: Path) -> Placement:
    """The placement of a trainer, or of the engine with this index."""
    device = place_of(choose_device(recipe), role, index)
    return Placement(
        host=platform.node(),
        address=recipe.sync.host,
        device=device,
        receives_on=device if role == "trainer" else receiving_place(recipe, index),
        threads=threads_of(recipe, role, cores=os.cpu_count() or 1),
        run_folder=str(run_folder.absolute()),
        log=str((run_folder / "logs" / f"{name}.log").absolute()),
        shared_folder=str(shared_folder),
    )


def threads_of(recipe: Recipe, role: str, *, cores: int) -> int:
    """The setting of the role, or `threads`, or where both are 0 an equal share of the cores."""
    own = {"engine": recipe.engine.threads, "trainer": recipe.train.threads}.get(role, 0)
    num_processes = 1 if recipe.is_inline else recipe.engine.num_engines + 1
    return own or recipe.threads or max(1, cores // num_processes)


def choose_device(recipe: Recipe) -> str:
    return pick_device(recipe.device, exact=recipe.exact)


def pick_device(wanted: str, *, exact: bool = False) -> str:
    """The device a setting comes to; `auto` is the GPU where there is one, but not for exact runs."""
    if wanted != "auto":
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device = 'cuda': torch sees no GPU; set device = 'cpu' or 'auto'")
        return wanted
    return "cuda" if torch.cuda.is_available() and not exact else "cpu"


def place_of(device: str, role: str, index: int = 0) -> str:
    """Which GPU a process gets: the trainer the first, engines the others in turn, all of them the only one."""
    count = _count(device)
    if count < 2:
        return device
    return "cuda:0" if role == "trainer" else f"cuda:{1 + index % (count - 1)}"


def receiving_place(recipe: Recipe, index: int) -> str:
    """Where an engine's process takes new weights: where it computes, or where it hands them on to a server from."""
    device = choose_device(recipe)
    if recipe.engine.kind == "native":
        return place_of(device, "engine", index)
    handover = choose_handover(recipe)
    if handover == "folder":
        return "cpu"
    if handover == "nccl":  # its workers' GPUs are theirs alone
        return place_of(device, "trainer")
    return place_of(device, "engine", index) if recipe.engine.vllm.urls else _first_gpu(recipe, index, device)


def choose_transport(recipe: Recipe) -> str:
    """`sync.transport`, with `auto` resolved."""
    trainer = place_of(choose_device(recipe), "trainer")
    places = {receiving_place(recipe, index) for index in range(recipe.engine.num_engines)}
    shares_gpu = trainer != "cpu" and places == {trainer}
    return resolve_transport(recipe.sync.transport, is_one_process=recipe.is_inline, shares_gpu=shares_gpu)


def choose_handover(recipe: Recipe) -> str:
    """`engine.vllm.handover`, with `auto` resolved."""
    wanted, device = recipe.engine.vllm.handover, choose_device(recipe)
    if wanted == "folder" or (wanted == "auto" and (device != "cuda" or recipe.engine.vllm.urls)):
        return "folder"
    setting = f"engine.vllm.handover = '{wanted}'"
    if device != "cuda":
        raise ConfigError(f"{setting}: the run is on the CPU, and has no GPU memory to hand over from; leave it auto")
    if recipe.engine.vllm.urls:
        return wanted
    gpus = gpus_of(recipe, 0, count=_count(device))
    if wanted == "auto":
        return "ipc" if len(gpus) == 1 else "nccl"
    if wanted == "ipc" and len(gpus) > 1:
        raise ConfigError(f"{setting}: a server of {len(gpus)} GPUs cannot open the memory of one; set it to 'nccl'")
    if wanted == "nccl" and 0 in gpus:
        raise ConfigError(f"{setting}: NCCL wants a GPU for each end, and the server has the trainer's; set it to 'ipc'")
    return wanted


def gpus_of(recipe: Recipe, index: int, *, count: int) -> list[int]:
    """Of a vLLM server: the trainer has the first, each server those that follow, as many as its parallelism takes; of one GPU
    all have that one."""
    each = 1
    for name in PARALLEL:
        each *= int(recipe.engine.vllm.arguments.get(name, 1))
    if each == 1 and count < 2:
        return [0]
    free = max(count - 1, 1)
    if each > 1 and each * recipe.engine.num_engines > free:
        raise ConfigError(
            f"engine.vllm.arguments: {recipe.engine.num_engines} servers of {each} GPUs each and the trainer's one are more "
            f"than the {count} there are"
        )
    return [1 + (index * each + offset) % free for offset in range(each)]


def visible_to(recipe: Recipe, index: int) -> str:
    """CUDA_VISIBLE_DEVICES of a server, by the numbers that this process's own variable has."""
    seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    gpus = gpus_of(recipe, index, count=torch.cuda.device_count())
    return ",".join(seen[number] if seen else str(number) for number in gpus)


def shares_the_trainers(recipe: Recipe, index: int) -> bool:
    """Whether a server of ours has the trainer's GPU too."""
    return gpus_of(recipe, index, count=torch.cuda.device_count())[0] == 0


def gpu_share(recipe: Recipe, index: int, *, held: int, total: int) -> float:
    """Of a GPU's memory, what a vLLM server takes that is not told otherwise; `held` are the bytes that its engine's process
    holds there."""
    own = gpus_of(recipe, index, count=torch.cuda.device_count())
    servers = sum(
        gpus_of(recipe, each, count=torch.cuda.device_count())[0] == own[0] for each in range(recipe.engine.num_engines)
    )
    if shares_the_trainers(recipe, index):
        return round(_SHARED_GPU / servers, 3)
    beside = held + _CONTEXT_BYTES if choose_handover(recipe) == "ipc" else 0
    return round(max(_WHOLE_GPU / servers - beside / total, 0.0), 3)


def cpu_cache_gigabytes() -> int:
    """Of a vLLM server on a CPU, where it would take half of the memory by itself."""
    said = os.environ.get(CPU_CACHE_VARIABLE, _CPU_CACHE_GIGABYTES)
    if not said.isdecimal():
        raise ConfigError(f"the variable {CPU_CACHE_VARIABLE} is {said!r}: vLLM wants a whole number of gigabytes there")
    return int(said)


def _first_gpu(recipe: Recipe, index: int, device: str) -> str:
    count = _count(device)
    return device if count < 2 else f"cuda:{gpus_of(recipe, index, count=count)[0]}"


def _count(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 0
