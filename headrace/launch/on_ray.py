"""`orchestrate = "ray"`: Ray places engines and trainer and starts them again, on a cluster (RAY_ADDRESS) or one of this host's
own.

Each engine, and each rank of the trainer, is an actor of a placement group, which does what `headrace join` does on a host: Ray
decides where, and starts it elsewhere when its node is lost. Rollouts, weights and checkpoints travel over the run's own
streams, never through Ray. The launcher is on the host that gives the command, and needs no GPU.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING, Any

from headrace.launch.cluster import ClusterProcesses
from headrace.launch.process import RoleFailed
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from concurrent.futures import Future
    from pathlib import Path

    from headrace.config import Recipe


class PlacedProcess:
    """An actor."""

    def run(self, role: str, url: str, token: str, threads: int, device: str) -> int:
        """Called once, and again wherever Ray starts it after its node was lost."""
        from headrace.launch.joining import JoinOptions, join

        return join(JoinOptions(role=role, url=url, token=token, threads=threads, device=device))


class RayProcesses(ClusterProcesses):
    """The trainer's ranks and `engine.count` engines where Ray places them."""

    def __init__(self, recipe: Recipe, folder: Path, *, trains: bool = True) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("orchestrate = 'ray': pip install 'headrace[ray]'") from error
        super().__init__(recipe, folder, trains=trains)
        self._ray = ray
        self._num_local, self._restarts, self._indices = 0, {}, itertools.count()
        self._actors: list[Any] = []
        self._joining: dict[str, list[Any]] = {"engine": [], "trainer": []}
        """Of each actor of a role, what its `run` will return or raise."""
        self._num_over = 0
        """How many of the engines' have."""
        self._groups: list[Any] = []
        self._is_ours = False
        """Whether this run has connected to Ray, and not the user's program."""

    def _engines_elsewhere(self) -> list[Awaitable[dict[str, Any]]]:
        return [self._first_engine()]

    async def _first_engine(self) -> dict[str, Any]:
        """Waits for an engine that Ray has placed to join."""
        deadline = self._recipe.deadline
        try:
            return await asyncio.wait_for(asyncio.shield(self.first_joined), deadline)
        except TimeoutError as error:
            raise RoleFailed(f"no engine that Ray placed has joined for {deadline:g} s (deadline)") from error

    async def listen(self) -> None:
        self._on_exit.callback(self._release)  # once the engines have heard that the run is over
        await super().listen()
        await asyncio.to_thread(self._place)
        for role, all_joining in self._joining.items():
            for joining in all_joining:
                self._spawn(self._follow(role, joining.future()))

    async def _follow(self, role: str, joining: Future[int]) -> None:
        """Waits for a process that Ray placed to fail or leave. Nobody then needs to wait for the trainer, or if it is the last
        engine for the first."""
        try:
            await asyncio.wrap_future(joining)
        except Exception as error:  # noqa: BLE001  (anything, and in Ray's wrapping)
            self._say(f"the {role} that Ray placed has failed: {getattr(error, 'cause', None) or error}")
        failure = RoleFailed(f"no {role} that Ray placed could join; why is said above")
        if role == "trainer":
            self._no_trainer = failure
            return self._has_trainer_news.set()
        self._num_over += 1
        if self._num_over == len(self._joining["engine"]) and not self.first_joined.done():
            self.first_joined.set_exception(failure)
        return None

    def _place(self) -> None:
        """Reserve room for all ranks of the trainer, close together, and all engines, and start an actor in each place."""
        ray, recipe = self._ray, self._recipe
        if not ray.is_initialized():
            self._is_ours = True
            ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False, namespace="headrace")
        if self._trains:
            self._place_role("trainer", recipe.train.parallel.ranks, recipe.train.threads, strategy="PACK")
        self._place_role("engine", recipe.engine.num_engines, recipe.engine.threads, strategy="SPREAD")

    def _place_role(self, role: str, count: int, threads: int, *, strategy: str) -> None:
        ray, recipe = self._ray, self._recipe
        num_gpus = int(recipe.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)
        threads = threads or recipe.threads or 1
        bundle = {"CPU": threads, **({"GPU": 1} if num_gpus else {})}
        group = ray.util.placement_group([bundle] * count, strategy=strategy)
        self._groups.append(group)
        if not group.wait(recipe.deadline):
            wanted = f"{count} × {bundle} ({role})"
            raise RoleFailed(f"Ray has had no room for {wanted} for {recipe.deadline:g} s (deadline)")
        how = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": threads, "num_gpus": num_gpus}
        kind, place = ray.remote(**how)(PlacedProcess), ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for index in range(count):
            actor = kind.options(scheduling_strategy=place(group, placement_group_bundle_index=index)).remote()
            self._actors.append(actor)
            device = "cuda" if num_gpus else "cpu"
            self._joining[role].append(actor.run.remote(role, self._url, self._token, threads, device))

    def _release(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        if self._is_ours:
            self._ray.shutdown()
