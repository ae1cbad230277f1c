"""The roles of a run in processes of their own on this host."""

from __future__ import annotations

import asyncio
import json
import math
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.launch.build import make_roles
from headrace.launch.placement import choose_transport
from headrace.launch.source import TrainerSource
from headrace.launch.supervise import Supervisor
from headrace.score import RewardWorkers
from headrace.trainer import RemoteTrainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.config import Recipe
    from headrace.launch.inputs import UserInputs
    from headrace.launch.processes import Child, Processes
    from headrace.observe import Observer
    from headrace.run import Roles
    from headrace.sync import Lineage


_SWITCH_SECONDS = 0.001
"""How long a reward that computes may keep the event loop waiting; Python's own is five times that."""


@dataclass(frozen=True)
class LocalProcesses:
    """Started early, so that they import while the launcher prepares; connected when it is ready."""

    processes: Processes
    trainer: Child
    engines: list[Child]

    @classmethod
    def spawn(cls, processes: Processes) -> LocalProcesses:
        count = processes.recipe.engine.num_engines
        engines = [processes.spawn("engine", f"engine-{index}") for index in range(count)]
        return cls(processes, trainer=processes.spawn("trainer", "trainer"), engines=engines)

    async def start(
        self,
        model_path: str,
        given: UserInputs,
        *,
        observer: Observer,
        lineage: Lineage,
        say: Callable[[str], None],
        most_blocks: int = 0,
    ) -> tuple[Roles, Callable[[], None]]:
        """Connect and build all of them at once; the first that fails is what is raised. With the roles comes what ends the
        watch over them."""
        recipe = self.processes.recipe
        self.processes.ends(choose_transport(recipe)).check(weight_bytes(model_path, recipe))
        supervisor = Supervisor(
            self.processes,
            model=model_path,
            lineage=lineage,
            timelines=observer.mirrored(),
            say=say,
            most_blocks=most_blocks,
        )
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        await self.processes.listen()
        log = self.processes.open_log("launcher")
        workers = RewardWorkers(recipe.reward.workers, timeout=recipe.reward.timeout, stacks=log)

        def close() -> None:
            sys.setswitchinterval(before)
            supervisor.close()
            workers.close()

        starting: list[asyncio.Task[Any]] = [asyncio.ensure_future(supervisor.start_trainer(self.trainer))]
        starting += [
            asyncio.ensure_future(supervisor.start_engine(child, index=index)) for index, child in enumerate(self.engines)
        ]
        trainer = RemoteTrainer(self.trainer, deadline=recipe.deadline)
        courier = supervisor.pool.courier
        courier.source, courier.patience = TrainerSource(trainer, relays=supervisor.relays), recipe.sync.patience
        try:
            roles = make_roles(
                recipe,
                model_path,
                given,
                engine=supervisor.pool,
                trainer=trainer,
                workers=workers,
                services=(supervisor.watch,),
                describe=supervisor.describe,
                versions=lambda: supervisor.pool.versions,
                engine_peak=lambda: supervisor.engine_peak,
                refresh=supervisor.refresh,
            )
            _, *told = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            close()
            raise
        return roles.with_stop_ids(told[0]["stop_ids"]), close


def weight_bytes(model_path: str, recipe: Recipe) -> int:
    """Of the weights an engine runs, read from the headers of a folder's safetensors; 0 where there are none to read."""
    elements = 0
    for file in Path(model_path).glob("*.safetensors"):
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
        elements += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return elements * {"float32": 4, "bfloat16": 2}[recipe.model.dtype]
