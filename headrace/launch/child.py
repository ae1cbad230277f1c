"""What an engine or trainer process runs: `python -m headrace.launch.child`.

It imports what it will need, waits for one line on its standard input that says who it is and where to connect, and then
answers calls until the launcher is gone. Settings and names come in; code never does. Output goes to the role's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import leftovers
from headrace.config import make_recipe
from headrace.engine import EngineWorker, ThreadedEngine
from headrace.launch.build import build_core, build_trainer, set_threads, stop_tokens
from headrace.launch.placement import choose_device, place_of, receiving_place
from headrace.model import load_tokenizer
from headrace.observe import ProcessTimeline
from headrace.rpc import Peer, Stream, StreamClosed, connect, describe_error
from headrace.sync import Ends, Lineage, WeightSync
from headrace.trainer import LocalTrainer

if TYPE_CHECKING:
    from concurrent.futures import Future

    from headrace.config import Recipe
    from headrace.engine import VllmEngine
    from headrace.launch.vllm import Opened

log = logging.getLogger("headrace.child")
_ORPHANED_SECONDS = 2.0


class Process:
    """One role, from its first connection to its end."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self.name, self.role = str(order["name"]), str(order["role"])
        self._timeline = ProcessTimeline(self.role)
        self._sync: WeightSync | None = None
        self._worker: EngineWorker | LocalTrainer | None = None
        self._reading: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[None] | None = None
        self._opened: Opened | None = None
        """A vLLM server of ours: it lives as long as this is held."""
        self._is_told_to_end = False

    async def run(self) -> int:
        """Until the launcher is gone, or until something here fails; the process's status."""
        self._failure = asyncio.get_running_loop().create_future()
        self._control = Peer(
            await self._connect("control"),
            calls={"ping": self._ping, "build": self._build},
            notices={"end": lambda _: setattr(self, "_is_told_to_end", True)},
        )
        serving = asyncio.ensure_future(self._control.run())
        await asyncio.wait({serving, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        if not self._failure.done():
            serving.exception()
            log.info("the launcher is done; ending")
            return 0
        error = self._failure.exception()
        assert error is not None
        log.error("%s failed", self.name, exc_info=error)
        with contextlib.suppress(StreamClosed):
            self._control.notify("failed", describe_error(error))
            await self._control.stream.drain()
            await asyncio.sleep(0.1)  # the frame leaves before the process does
        return 1

    def clean_up(self) -> None:
        """Leave no shared memory and no socket behind, whoever went first."""
        if self._sync is not None:
            self._sync.close()
        if self._opened is not None:
            self._opened.end()
        if self._is_told_to_end or not _is_gone(int(self._order["launcher"])):
            return
        ends = Ends(**self._order["leftovers"])
        ends.remove_leftovers()  # the trainer may have been killed too
        kind, _, path = str(self._order["address"]).partition(":")
        if kind == "unix":
            leftovers.remove(Path(path).parent.parent, ends.prefix)

    async def _connect(self, channel: str) -> Stream:
        order = self._order
        return await connect(order["address"], token=order["token"], name=self.name, channel=channel)

    async def _ping(self) -> dict[str, Any]:
        state = {} if self._worker is None else await self._worker.state()
        return {"state": state, "report": self._timeline.report()}

    async def _build(
        self, recipe: dict[str, Any], model: str, lineage: dict[str, Any], ends: dict[str, Any], index: int, most_blocks: int
    ) -> dict[str, Any]:
        """Load the model and take up the role. The answer is what the launcher needs to know of it."""
        settings = make_recipe(recipe)
        set_threads(settings, self.role)
        device = place_of(choose_device(settings), self.role, index)
        is_sender = self.role == "trainer"
        known = Ends(**ends)
        transport = known.make(is_sender=is_sender, device=device if is_sender else receiving_place(settings, index))
        life = Lineage(lineage["id"], lineage["ancestors"])
        self._sync = WeightSync(life, transport, payload=settings.sync.payload, name=self.name)
        log.info("%s on %s, model %s, process %d", self.name, device, model, os.getpid())
        if self.role == "engine":
            handover = known.handover(self.name)
            return await self._build_engine(settings, model, device, self._sync, index, handover, most_blocks)
        trainer = await asyncio.to_thread(build_trainer, settings, model, device=device)
        frees_memory = settings.engine.sleeps
        self._worker = LocalTrainer(
            trainer, sync=self._sync, timeline=self._timeline, in_threads=True, frees_memory=frees_memory
        )
        self._control.calls.update(self._worker.calls())
        return {"device": device}

    async def _build_engine(
        self, recipe: Recipe, model: str, device: str, sync: WeightSync, index: int, handover: Path, most_blocks: int
    ) -> dict[str, Any]:
        engine: ThreadedEngine | VllmEngine
        if recipe.engine.kind == "vllm":
            from headrace.launch.vllm import Place, open_engine

            written = Path(self._order["log"]).with_suffix(".vllm.log")
            place = Place(self.name, index, device, written, handover)
            opened = await open_engine(recipe, model, place, sync=sync, timeline=self._timeline)
            self._opened = opened
            engine, stop_ids = opened.engine, opened.stop_ids
        else:
            core = await asyncio.to_thread(build_core, recipe, model, name=self.name, device=device, most_blocks=most_blocks)
            engine = ThreadedEngine(core, sync=sync, timeline=self._timeline)
            stop_ids = stop_tokens(core.model.generation_config, load_tokenizer(model))
        worker = self._worker = EngineWorker(engine, timeline=self._timeline)
        self._control.calls.update(worker.calls())
        loop = asyncio.get_running_loop()
        engine.died.add_done_callback(lambda died: loop.call_soon_threadsafe(self._fail_as, died))
        engine.start()
        data = Peer(await self._connect("data"), notices=worker.notices())
        self._reading = asyncio.ensure_future(data.run())
        self._reading.add_done_callback(self._on_data_closed)
        worker.attach(data)
        return {"device": device, "stop_ids": list(stop_ids), "relay": sync.relay}

    def _fail_as(self, died: Future[None]) -> None:
        self._fail(died.exception())

    def _on_data_closed(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and not isinstance(reading.exception(), StreamClosed):
            self._fail(reading.exception())  # a frame that could not be read

    def _fail(self, error: BaseException | None) -> None:
        if self._failure is not None and not self._failure.done() and error is not None:
            self._failure.set_exception(error)


def _is_gone(parent: int) -> bool:
    """Whether the process that started this one has ended: its streams close a moment before that shows."""
    until = time.monotonic() + _ORPHANED_SECONDS
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.02)
    return os.getppid() != parent


def main() -> None:
    """Reads who it is, and runs until it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which drains and saves
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.captureWarnings(True)
    line = sys.stdin.readline()
    if line:  # otherwise the launcher changed its mind
        order = json.loads(line)
        sys.path[:] = order["path"]
        asyncio.run(_run(Process(order)))


async def _run(process: Process) -> None:
    """Ends by `os._exit`: no thread in a long computation may keep a process that nobody waits for."""
    status = 1
    try:
        status = await process.run()
    except BaseException:
        log.exception("%s ended", process.name)
    process.clean_up()
    logging.shutdown()
    with contextlib.suppress(OSError):  # its log may lie on a full disk
        sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
