"""What the launcher decides for each process: where it runs, on which device, and where it receives new weights."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import torch

from headrace.engine import engine_kind
from headrace.settings import ConfigError
from headrace.sync import TransportConfig, resolve_transport, transport_class

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.launch.hosts import Host
    from headrace.launch.process import Place


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a process runs and what it uses. Another host or rank needs another placement, not other code."""

    host: str
    address: str
    """How other processes of the run reach that host (`sync.host`)."""
    device: str
    """`cpu`, `cuda` or `cuda:N`."""
    receives_on: str
    """The device on which new weights arrive; may differ for an engine that passes them on to a server."""
    threads: int
    """torch's CPU threads."""
    run_folder: str
    log: str
    shared_folder: str
    """For shared memory and weight files (`sync.folder`)."""
    model: str = ""
    """Where the host has the model, if not where the launcher has it."""
    frozen: dict[str, str] = field(default_factory=dict)
    """Likewise of a trainer's frozen models, by where the launcher has them."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The first line a process reads on stdin: its identity, and how to reach the launcher."""

    name: str
    role: str
    """`engine` or `trainer`."""
    index: int
    incarnation: int
    """Counts the starts of this name. Only the newest may connect, so nothing an earlier process sends is mistaken for its."""
    placement: Placement
    address: str
    """Where to connect to the launcher."""
    transport: TransportConfig
    """How weights travel; also has the run's token, and the name prefix of everything the run makes outside its folder."""
    silence: float
    """Seconds without a heartbeat after which the process ends itself."""
    deadline: float
    """Seconds it then waits for a training step without progress, or for saving, before it kills itself."""
    import_path: list[str]
    """The launcher's `sys.path`. PYTHONPATH, which the process starts with, cannot hold folders with a colon in their name."""

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def read(cls, line: str | bytes) -> Order:
        fields = json.loads(line)
        placement, transport = Placement(**fields.pop("placement")), TransportConfig(**fields.pop("transport"))
        return cls(**fields, placement=placement, transport=transport)


LENT = -1
"""The index of the spare engine on the trainer's device (`engine.lend`)."""


def place_on_this_host(recipe: Recipe, place: Place, *, run_folder: Path, shared_folder: Path) -> Placement:
    role, index = place.role, place.index
    device = device_of(recipe, role, index)
    return Placement(
        host=platform.node(),
        address=recipe.sync.host,
        device=device,
        receives_on=device if role == "trainer" or index == LENT else receiving_device(recipe, index),
        threads=threads_of(recipe, "trainer" if index == LENT else role),
        run_folder=str(run_folder.absolute()),
        log=str((run_folder / "logs" / f"{place.name}.log").absolute()),
        shared_folder=str(shared_folder),
    )


def place_on_joined_host(recipe: Recipe, place: Place, host: Host) -> Placement:
    """As the host has offered."""
    offer = host.offer
    assert offer is not None
    device = recipe.device if recipe.device == "cpu" else place.device
    threads = {"engine": recipe.engine.threads, "trainer": recipe.train.threads}[place.role]
    return Placement(
        host=offer.host,
        address=offer.address,
        device=device,
        receives_on="cpu" if place.role == "engine" and engine_kind(recipe.engine).has_server else device,
        threads=threads or recipe.threads or offer.threads,
        run_folder=offer.passing,
        log=f"{offer.folder}/{place.name}.log",
        shared_folder=offer.shared_folder,
        model=offer.model,
        frozen=offer.frozen,
    )


def versions_for_servers(recipe: Recipe, *, device: str) -> int:
    """How many versions of the weights engines on this host keep in `sync.folder` for their servers."""
    has_processes = not recipe.is_inline and recipe.engines_here
    return engine_kind(recipe.engine).versions_in_folder(recipe, device=device) if has_processes else 0


def threads_of(recipe: Recipe, role: str = "", *, cores: int = 0) -> int:
    """The role's own setting, or `threads`, or if both are 0 an equal share of the cores."""
    own = {"engine": recipe.engine.threads, "trainer": recipe.train.threads}.get(role, 0)
    num_processes = 1 if recipe.is_inline else recipe.engines_here + recipe.ranks_here
    return own or recipe.threads or max(1, (cores or os.cpu_count() or 1) // max(1, num_processes))


def set_threads(recipe: Recipe) -> None:
    """Set torch's CPU threads in the launcher's process."""
    torch.set_num_threads(threads_of(recipe))


def choose_device(recipe: Recipe) -> str:
    """What computes on this host. If engines and trainer are all elsewhere, it need not have a GPU."""
    is_elsewhere = recipe.engines_join and recipe.trainer_joins and not recipe.sft.is_on
    return pick_device("auto" if recipe.device == "cuda" and is_elsewhere else recipe.device, exact=recipe.exact)


def pick_device(wanted: str, *, exact: bool = False) -> str:
    """Resolve `auto`: the GPU if there is one, but the CPU for exact runs."""
    if wanted != "auto":
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device = 'cuda': torch sees no GPU; set device = 'cpu' or 'auto'")
        return wanted
    return "cuda" if torch.cuda.is_available() and not exact else "cpu"


def device_of(recipe: Recipe, role: str, index: int = 0) -> str:
    """On this host: the trainer's ranks have the first GPUs, engines the others in turn, or share them if none is left."""
    device, num_ranks = choose_device(recipe), recipe.ranks_here
    count = torch.cuda.device_count() if device == "cuda" else 0
    if count < 2:
        return device
    if role == "trainer" or index == LENT:
        return f"cuda:{max(index, 0)}"
    return f"cuda:{index % count}" if num_ranks >= count else f"cuda:{num_ranks + index % (count - num_ranks)}"


def trainer_devices(recipe: Recipe) -> list[str]:
    return [device_of(recipe, "trainer", rank) for rank in range(recipe.ranks_here)]


def check_ranks(recipe: Recipe) -> None:
    """Raise unless every rank of the trainer gets a process and, on this host's GPUs, a GPU of its own."""
    parallel, device = recipe.train.parallel, choose_device(recipe)
    if not parallel.is_on:
        return
    layout = f"train.parallel = {{replicate = {parallel.replicate}, shard = {parallel.shard}}}: {parallel.ranks} ranks"
    if recipe.is_inline:
        raise ConfigError(f"{layout}, and orchestrate = 'inline' has one process; set orchestrate = 'local'")
    if device == "cuda" and recipe.ranks_here > torch.cuda.device_count():
        raise ConfigError(f"{layout}, and torch sees {torch.cuda.device_count()} GPUs; each rank needs one of its own")


def receiving_devices(recipe: Recipe) -> set[str]:
    return {receiving_device(recipe, index) for index in range(recipe.engines_here)}


def receiving_device(recipe: Recipe, index: int) -> str:
    """The device on which an engine's process receives new weights."""
    device = choose_device(recipe)
    trainer, engine = device_of(recipe, "trainer"), device_of(recipe, "engine", index)
    return engine_kind(recipe.engine).receives_on(recipe, index, device=device, trainer=trainer, engine=engine)


def shares_device(recipe: Recipe) -> bool:
    """Whether engines and trainer compute on one GPU, or one core."""
    if not recipe.engines_here or not recipe.ranks_here:
        return False
    if choose_device(recipe) == "cpu":
        return len(os.sched_getaffinity(0)) < 2
    trainers, is_elsewhere = trainer_devices(recipe), bool(recipe.engine.vllm.urls)
    return not is_elsewhere and any(device_of(recipe, "engine", each) in trainers for each in range(recipe.engines_here))


def why_not_lent(recipe: Recipe) -> str:
    """Why `engine.lend` has no effect; "" if it has, or is not set."""
    if not recipe.engine.lend:
        return ""
    if recipe.is_inline:
        return "orchestrate = 'inline' has one process"
    if engine_kind(recipe.engine).has_server:
        return f"engine.kind = '{recipe.engine.kind}' cannot give memory back to the trainer"
    if not recipe.ranks_here:
        return "the trainer is on another host"
    if shares_device(recipe):
        return "engines compute on the trainer's device already"
    if choose_device(recipe) == "cuda" and transport_class(choose_transport(recipe)).needs_gpu_per_end:
        return f"sync.transport = '{recipe.sync.transport}' wants a GPU for each end, and it would share the trainer's"
    return ""


def lends(recipe: Recipe) -> bool:
    """Whether a spare engine waits on the trainer's device."""
    return recipe.engine.lend and not why_not_lent(recipe)


def choose_transport(recipe: Recipe) -> str:
    """`sync.transport`, with `auto` resolved."""
    trainers = set(trainer_devices(recipe))
    shares_gpu = "cpu" not in trainers and len(trainers) == 1 and receiving_devices(recipe) == trainers
    return resolve_transport(
        recipe.sync.transport,
        is_one_process=recipe.is_inline,
        shares_gpu=shares_gpu,
        between_hosts=bool(recipe.cluster.listen),
        on_this_host=bool(recipe.engines_here and recipe.ranks_here),
    )
