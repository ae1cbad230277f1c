"""`orchestrate = "ray"`: Ray places the engines and starts them again, on a cluster (RAY_ADDRESS) or one of this host's own.

Each engine is an actor of a placement group, which does what `headrace join` does on a host: Ray decides where, and starts it
elsewhere when its node is lost. Rollouts and weights travel over the run's own streams, never through Ray. Trainer and launcher
are on the host that gives the command.
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


class PlacedEngine:
    """An actor."""

    def run(self, url: str, token: str, threads: int, device: str) -> int:
        """Called once, and again wherever Ray starts it after its node was lost."""
        from headrace.launch.joining import JoinOptions, join

        return join(JoinOptions(url=url, token=token, threads=threads, device=device))


class RayProcesses(ClusterProcesses):
    """The trainer on this host, and `engine.count` engines where Ray places them."""

    def __init__(self, recipe: Recipe, folder: Path, *, trains: bool = True) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("orchestrate = 'ray': pip install 'headrace[ray]'") from error
        super().__init__(recipe, folder, trains=trains)
        self._ray = ray
        self._num_local, self._restarts, self._indices = 0, {}, itertools.count()
        self._actors: list[Any] = []
        self._joining: list[Any] = []
        """Of each actor, what its `run` will return or raise."""
        self._num_over = 0
        """How many of these have."""
        self._group: Any = None
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
        for joining in self._joining:
            self._spawn(self._follow(joining.future()))

    async def _follow(self, joining: Future[int]) -> None:
        """Waits for an engine that Ray placed to fail or leave; once all of them have, nobody needs to wait for the first."""
        try:
            await asyncio.wrap_future(joining)
        except Exception as error:  # noqa: BLE001  (anything, and in Ray's wrapping)
            self._say(f"an engine that Ray placed has failed: {getattr(error, 'cause', None) or error}")
        self._num_over += 1
        if self._num_over == len(self._joining) and not self.first_joined.done():
            self.first_joined.set_exception(RoleFailed("no engine that Ray placed could join; why is said above"))

    def _place(self) -> None:
        """Reserve room for all engines and start an actor in each place."""
        ray, recipe = self._ray, self._recipe
        if not ray.is_initialized():
            self._is_ours = True
            ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False, namespace="headrace")
        has_gpus = recipe.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        threads, count = recipe.engine.threads or recipe.threads or 1, recipe.engine.num_engines
        bundle = {"CPU": threads, **({"GPU": 1} if has_gpus else {})}
        self._group = ray.util.placement_group([bundle] * count, strategy="SPREAD")
        if not self._group.wait(recipe.deadline):
            raise RoleFailed(f"Ray has had no room for {count} × {bundle} for {recipe.deadline:g} s (deadline)")

        how = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": threads, "num_gpus": int(has_gpus)}
        kind, strategy = ray.remote(**how)(PlacedEngine), ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for index in range(count):
            where = strategy(self._group, placement_group_bundle_index=index)
            actor = kind.options(scheduling_strategy=where).remote()
            self._actors.append(actor)
            self._joining.append(actor.run.remote(self._url, self._token, threads, "cuda" if has_gpus else "cpu"))

    def _release(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        if self._is_ours:
            self._ray.shutdown()
