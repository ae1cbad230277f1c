"""`orchestrate = "ray"`: Ray places engines and trainer and starts them again, on a cluster (RAY_ADDRESS) or one of this host's
own.

Each engine, and each rank of the trainer, is an actor of a placement group, which does what `headrace join` does on a host: Ray
decides where, and starts it elsewhere when its node is lost. Rollouts, weights and checkpoints travel over the run's own
streams, never through Ray. The launcher is on the host that gives the command, and needs no GPU. Engines past `engine.count`
are actors of their own, which come and go (`scaling.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from headrace.engine import engine_kind
from headrace.launch.cluster import ClusterProcesses
from headrace.launch.process import RoleFailed
from headrace.launch.scaling import Measured, wanted_change
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.launch.hosts import Host
    from headrace.launch.process import Place

    Run = Callable[[], Future[int]]
    """Calls an actor's `run`."""


_WAIT_SECONDS = 1
"""Of one look for room; Ray drops fractions."""


class PlacedProcess:
    """An actor."""

    def run(self, role: str, url: str, token: str, threads: int, device: str, label: str) -> int:
        """Called once, again when it has left, and wherever Ray starts it after its node was lost."""
        from headrace.launch.joining import JoinOptions, join

        return join(JoinOptions(role=role, url=url, token=token, threads=threads, device=device, label=label))


class RayProcesses(ClusterProcesses):
    """The trainer's ranks and `engine.count` engines where Ray places them."""

    def __init__(self, recipe: Recipe, folder: Path, *, trains: bool = True) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("orchestrate = 'ray': pip install 'headrace[ray]'") from error
        super().__init__(recipe, folder, trains=trains)
        self._ray: Any = ray
        self._actors: dict[str, Any] = {}
        """By the label of what it runs."""
        self._over: dict[str, str] = {}
        """Why engines are given up, or their actor has failed, by label."""
        self._labels = itertools.count()
        self._extra: list[str] = []
        """Labels of engines past `engine.count`."""
        self._groups: list[Any] = []
        self._waits_no_more = threading.Event()
        """Nobody waits for `_place` any more, whose thread must then end too."""
        self._is_ours = False
        """Whether this run has connected to Ray, and not the user's program."""
        self._thread = ThreadPoolExecutor(1)
        """Lives until Ray is no longer needed: a Ray that a thread has started ends with the thread."""

    async def listen(self) -> None:
        self._on_exit.callback(self._thread.shutdown)
        self._on_exit.callback(lambda: self._thread.submit(self._release).result())  # once engines have heard of the end
        await super().listen()
        try:
            with self.stop.cancels(asyncio.current_task(), at=1):
                placed = await asyncio.wrap_future(self._thread.submit(self._place))
        finally:
            self._waits_no_more.set()
        for role, label, run in placed:
            self._spawn(self._follow(role, label, run))
        if self._trains and self._recipe.engine.max_count > self._recipe.engine.num_engines:
            self._spawn(self._scale())

    async def _follow(self, role: str, label: str, run: Run) -> None:
        """Has an actor join, and join again when it has left, but for engines past `engine.count`. Waits for it to fail or to
        be given up. Nobody then needs to wait for the trainer, or if it is the last engine for the first."""
        try:
            while not (status := await asyncio.wrap_future(run())) and label not in {*self._extra, *self._over}:
                if role == "engine":  # losses of the trainer are counted by `train.restarts`
                    await asyncio.sleep(self._restarts[label].spend(RoleFailed("it has left")))
            why = f"it found no launcher at {self._url}" if status else self._over.get(label, "it was given back")
        except Exception as error:  # noqa: BLE001  (anything, and in Ray's wrapping)
            why = str(getattr(error, "cause", None) or error)
            if label in self._actors or label not in self._extra:  # else it was withdrawn
                self._say(f"the {role} that Ray placed has failed: {why}")
        failure = RoleFailed(f"no {role} that Ray placed could join: {why}")
        if role == "trainer":
            self._no_trainer = failure
            return self._has_trainer_news.set()
        if label in self._extra:
            self._extra.remove(label)
            return self._kill(label)  # frees its place
        self._over.setdefault(label, why)
        if len(self._over) == self._recipe.engine.num_engines and not self.first_joined.done():
            self.first_joined.set_exception(failure)
        return None

    def _do_without(self, place: Place, host: Host, error: Exception) -> None:
        super()._do_without(place, host, error)
        if host.offer and host.offer.label in self._actors and not host.is_gone:  # else lost with the host: another may do
            self._over[host.offer.label] = str(error)

    # More engines, and fewer

    async def _scale(self) -> None:
        """Waits for trainer and engines to have worked for a while; then adds an engine, or lets one go. The next time is
        measured from when that engine is there, or gone; one that Ray has no room for is withdrawn if it is not wanted then."""
        settings, before, pending = self._recipe.engine, None, list[str]()
        while True:
            await asyncio.sleep(1.0)
            hosts = [place.host for place in self._places.values() if place.host is not None and not place.is_over]
            joined = {host.offer.label: host for host in hosts if host.offer and not host.is_gone}
            now = Measured.now(self._timelines, version=max(self.pool.versions.values(), default=0))
            still_pending = [label for label in self._extra if label not in joined]
            if before is None or not now.continues(before) or still_pending != pending:
                before, pending = now, still_pending
            elif now.is_enough_since(before):
                count = settings.num_engines + len(self._extra)
                change, before = wanted_change(before, now, num_engines=len(self.pool.engines)), None
                if pending:
                    if change <= 0:
                        self._say("the trainer no longer waits for engines: Ray is not asked for one more")
                        self._kill(pending[0])
                elif change > 0 and count < settings.max_count:
                    self._say(f"the trainer waits for engines: asking Ray for one more ({count} + 1)")
                    label, run = await asyncio.to_thread(self._start_actor, "engine", settings.threads, "SPREAD")
                    self._extra.append(label)
                    self._spawn(self._follow("engine", label, run))
                elif change < 0 and self._extra and len(self.pool.engines) > settings.num_engines:
                    # Else one of `count` is lost, or the ones past it have joined by hand.
                    self._say(f"the engines idle: one of {count} is given back")
                    await self._let_go(joined[self._extra[-1]])

    def _kill(self, label: str) -> None:
        if (actor := self._actors.pop(label, None)) is not None:
            self._ray.kill(actor)

    def _place(self) -> list[tuple[str, str, Run]]:
        """Reserve room for all ranks of the trainer, close together, and all engines, and start an actor in each place. Returns
        of each its role, label and `Run`."""
        ray, recipe = self._ray, self._recipe
        if not ray.is_initialized():
            self._is_ours = True
            ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, include_dashboard=False, namespace="headrace")
        trainer = []
        if self._trains:
            trainer = self._place_role("trainer", recipe.train.parallel.ranks, recipe.train.threads, strategy="PACK")
        placed = self._place_role("engine", recipe.engine.num_engines, recipe.engine.threads, strategy="SPREAD")
        return [*trainer, *placed]

    def _place_role(self, role: str, count: int, threads: int, *, strategy: str) -> list[tuple[str, str, Run]]:
        ray, recipe = self._ray, self._recipe
        threads, num_gpus = self._needs(role, threads)
        bundle = {"CPU": threads, **({"GPU": num_gpus} if num_gpus else {})}
        group = ray.util.placement_group([bundle] * count, strategy=strategy)
        self._groups.append(group)
        until = time.monotonic() + recipe.deadline
        while not group.wait(_WAIT_SECONDS):
            if self._waits_no_more.is_set() or time.monotonic() > until:
                wanted = f"{count} × {bundle} ({role})"
                raise RoleFailed(f"Ray has had no room for {wanted} for {recipe.deadline:g} s (deadline)")
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        places = [place(group, placement_group_bundle_index=index) for index in range(count)]
        return [(role, *self._start_actor(role, threads, each)) for each in places]

    def _needs(self, role: str, threads: int) -> tuple[int, int]:
        """CPUs and GPUs of a process. With `device = "cuda"` Ray waits for GPUs, which an autoscaler may yet bring."""
        recipe = self._recipe
        on_gpu = recipe.device == "cuda" or (recipe.device == "auto" and self._ray.cluster_resources().get("GPU", 0) > 0)
        own = engine_kind(recipe.engine).gpus_for_itself(recipe) if role == "engine" else 0
        return threads or recipe.threads or 1, max(own, 1) if on_gpu else 0

    def _start_actor(self, role: str, threads: int, where: object) -> tuple[str, Run]:
        """Returns its label, and its `Run`. If there is no room now, Ray starts it when there is."""
        threads, num_gpus = self._needs(role, threads)
        how = {"max_restarts": -1, "max_task_retries": -1, "num_cpus": threads, "num_gpus": num_gpus}
        label = f"{role} {next(self._labels)}"
        actor = self._actors[label] = self._ray.remote(**how)(PlacedProcess).options(scheduling_strategy=where).remote()
        device = "cuda" if num_gpus else "cpu"
        return label, lambda: actor.run.remote(role, self._url, self._token, threads, device, label).future()

    def _release(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        if self._is_ours:
            self._ray.shutdown()
