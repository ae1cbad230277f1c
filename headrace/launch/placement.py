"""What the launcher decides for each process and tells it: where it runs, on which device, where new weights arrive."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from headrace.engine import engine_kind
from headrace.settings import ConfigError
from headrace.sync import resolve_transport

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.config import Recipe


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
    """Where an engine's process receives new weights."""
    device = choose_device(recipe)
    trainer, engine = place_of(device, "trainer"), place_of(device, "engine", index)
    return engine_kind(recipe.engine).receives_on(recipe, index, device=device, trainer=trainer, engine=engine)


def choose_transport(recipe: Recipe) -> str:
    """`sync.transport`, with `auto` resolved."""
    trainer = place_of(choose_device(recipe), "trainer")
    places = {receiving_place(recipe, index) for index in range(recipe.engine.num_engines)}
    shares_gpu = trainer != "cpu" and places == {trainer}
    return resolve_transport(recipe.sync.transport, is_one_process=recipe.is_inline, shares_gpu=shares_gpu)


def _count(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 0
