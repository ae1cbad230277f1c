"""What an engine or trainer process runs: `python -m headrace.launch.child`.

It imports what it needs, waits for its `Order` (the first line on stdin, where heartbeats follow), and answers the launcher's
calls until the control stream closes or the heartbeats stop. It receives settings and names, never code. Its output goes to the
role's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace import leftovers
from headrace.config import make_recipe
from headrace.engine import EnginePlace, EngineWorker, engine_kind
from headrace.helper_process import print_whole_lines
from headrace.launch.build import build_trainer
from headrace.launch.heartbeat import watch_launcher
from headrace.launch.placement import Order, lends
from headrace.observe import ProcessTimeline
from headrace.rpc import Peer, Stream, StreamClosed, connect, describe_error
from headrace.sync import Lineage, Mailbox, WeightSync, make_transport
from headrace.trainer import LocalTrainer, Ranks

if TYPE_CHECKING:
    from headrace.config import Recipe
    from headrace.trainer import DeviceTrainer

log = logging.getLogger("headrace.child")
_ORPHANED_SECONDS = 2.0
_LAST_WORDS_SECONDS = 5.0
_END_SECONDS = 30.0
_POLL_SECONDS = 0.1
_SAVED = ".saved-by-"
"""With a rank's number, the name of the mark that it has saved its share."""
_RANKS_SHARE = 0.8
"""Of the deadline, in which ranks find out that another hangs: before the launcher ends a run in which nothing moves."""


class LauncherSilent(RuntimeError):
    """No heartbeat for too long: the launcher is stopped, or its host is gone."""


class RoleWorker:
    """One engine or trainer process, from its first connection to its end."""

    def __init__(self, order: Order, pipe: int) -> None:
        self._order = order
        self._timeline = ProcessTimeline(order.role)
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._worker: EngineWorker | LocalTrainer | None = None
        self._reading: asyncio.Task[None] | None = None
        self._on_end = contextlib.ExitStack()
        self._is_told_to_end = self._is_launcher_silent = False
        self._num_ranks = 1
        self._is_far = order.address.startswith("tls:")
        """On another host than the launcher's."""
        self._meeting = Mailbox(patience=order.deadline, share=self._post)
        """Where ranks of several hosts find each other; the launcher passes on what each of them says."""
        self._launcher_ended = watch_launcher(pipe, order.silence, self._on_silence)

    async def run(self) -> int:
        """Work until the launcher is gone or something fails; return the exit status."""
        self._control = Peer(
            await self._connect("control"),
            calls={"ping": self._ping, "build": self._build},
            notices={
                "end": lambda _: setattr(self, "_is_told_to_end", True),
                "post": lambda told: self._meeting.put(told["key"], bytes.fromhex(told["value"])),
            },
        )
        serving = asyncio.ensure_future(self._control.run())
        await asyncio.wait({serving, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and not isinstance(error := serving.exception(), StreamClosed) and not self._failure.done():
            self._failure.set_exception(error or RuntimeError("the launcher's stream has ended"))
        if not self._failure.done() and not self._is_launcher_silent:
            log.info("the launcher is done; ending")
            return 0
        await asyncio.wait({self._failure})
        error = self._failure.exception()
        assert error is not None
        log.error("%s failed", self._order.name, exc_info=error)
        with contextlib.suppress(StreamClosed, TimeoutError):
            self._control.notify("failed", describe_error(error))
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._control.stream.drain()
            await asyncio.sleep(0.1)  # let the frame leave before the process ends
        return 1

    def clean_up(self) -> None:
        """Remove shared memory and sockets; if the launcher has ended also the others', which may have been killed too."""
        self._on_end.close()
        order = self._order
        if self._is_launcher_silent or (not self._is_told_to_end and self._launcher_ended.wait(_ORPHANED_SECONDS)):
            leftovers.remove(Path(order.placement.shared_folder), order.transport.prefix)
            kind, _, path = order.address.partition(":")
            if kind == "unix":
                leftovers.remove(Path(path).parent.parent, order.transport.prefix)

    # When the launcher is gone

    def _on_silence(self) -> None:
        """Called by the heartbeat thread. Ends the process even if its event loop hangs, unless a training step progresses."""
        self._is_launcher_silent = True
        asyncio.run_coroutine_threadsafe(self._end_without_launcher(), self._loop)
        num_passes = -1
        while isinstance(self._worker, LocalTrainer) and num_passes < self._worker.num_passes:
            num_passes = self._worker.num_passes
            time.sleep(self._order.deadline)
        time.sleep(_END_SECONDS)
        log.error("%s does not end by itself and is killed", self._order.name)
        self.clean_up()
        os._exit(1)

    async def _end_without_launcher(self) -> None:
        words = f"heard nothing from the launcher for {self._order.silence:g} s"
        try:
            if isinstance(self._worker, LocalTrainer) and self._worker.num_steps and not self._is_far:
                words += await self._rescue(self._worker)
        except Exception as error:  # noqa: BLE001  (it ends either way, and reports why nothing is saved)
            words += f"; what was trained could not be saved: {error}"
        self._fail(LauncherSilent(words))

    async def _rescue(self, trainer: LocalTrainer) -> str:
        """Save weights and optimizer once the current step is done; return a message with the folder. It is for the user: only
        the launcher could write a checkpoint to resume from."""
        order = self._order
        checkpoints = Path(order.placement.run_folder) / "checkpoints"
        temporary = checkpoints / f".step-rescued-{order.incarnation}.tmp"  # of all ranks, which may be at different versions
        mark = temporary / f"{_SAVED}{order.index}"
        temporary.mkdir(parents=True, exist_ok=True)
        mark.unlink(missing_ok=True)  # an earlier rescue in vain may have left it
        await trainer.abandon()  # so that no step waits for engines to load an update
        await trainer.save(temporary)
        mark.touch()
        if order.index:
            return "; its share of weights and optimizer is saved, and rank 0 names the folder"
        await asyncio.to_thread(_wait_for_ranks, temporary, self._num_ranks)
        folder = checkpoints / f"rescued-{trainer.version}"
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        return f"; weights and optimizer as trained since version {trainer.version} was published are saved in {folder}"

    # Calls

    async def _connect(self, channel: str) -> Stream:
        name, token, incarnation = self._order.name, self._order.transport.token, self._order.incarnation
        return await connect(self._order.address, token=token, name=name, channel=channel, incarnation=incarnation)

    async def _ping(self) -> dict[str, Any]:
        state = {} if self._worker is None else await self._worker.state()
        return {"state": state, "report": self._timeline.report()}

    async def _build(
        self, recipe: dict[str, Any], model: str, lineage: dict[str, Any], most_blocks: int, meeting: str
    ) -> dict[str, Any]:
        """Load the model and start the role; the answer tells the launcher what it needs to know. The ranks of a trainer find
        each other at `meeting`."""
        settings, order, placement = make_recipe(recipe), self._order, self._order.placement
        torch.set_num_threads(placement.threads)
        transport = make_transport(order.transport, is_sender=order.role == "trainer", device=placement.receives_on)
        more: dict[str, Any] = {"payload": settings.sync.payload, "adapter": settings.lora.to_plain(), "name": order.name}
        sync = WeightSync(Lineage(**lineage), transport, **more)
        self._on_end.callback(sync.close)
        here = placement.model or model
        log.info("%s on %s, model %s, process %d", order.name, placement.device, here, os.getpid())
        if order.role == "engine":
            return await self._build_engine(settings, here, sync, most_blocks)
        trainer = await asyncio.to_thread(self._build_trainer, settings, here, meeting)
        if trainer.model.name_or_path == here:  # an adapter's checkpoint says which model it belongs to
            trainer.model.name_or_path = model
        self._worker = LocalTrainer(
            trainer, sync=sync, timeline=self._timeline, in_threads=True, frees_memory=settings.engine.sleeps or lends(settings)
        )
        self._control.calls.update(self._worker.calls())
        return {}

    def _build_trainer(self, recipe: Recipe, model: str, meeting: str) -> DeviceTrainer:
        order, parallel = self._order, recipe.train.parallel
        device, ranks, self._num_ranks = order.placement.device, None, parallel.ranks
        if parallel.is_on:
            timeout = _RANKS_SHARE * order.deadline
            far: dict[str, Any] = {"meeting": self._meeting, "host": order.placement.address} if self._is_far else {}
            ranks = Ranks.join(parallel, rank=order.index, address=meeting, device=device, timeout=timeout, **far)
            self._on_end.callback(ranks.close)
        return build_trainer(recipe, model, device=device, ranks=ranks, places=order.placement.frozen)

    async def _build_engine(self, recipe: Recipe, model: str, sync: WeightSync, most_blocks: int) -> dict[str, Any]:
        order, placement = self._order, self._order.placement
        place = EnginePlace(
            name=order.name,
            index=order.index,
            device=placement.device,
            receives_on=placement.receives_on,
            log=Path(placement.log).with_suffix(f".{recipe.engine.kind}.log"),
            folder=order.transport.handover(order.name),
            prefix=order.transport.prefix,
            most_blocks=most_blocks,
            is_far=self._is_far,
        )
        opened = await engine_kind(recipe.engine).open(recipe, model, place, sync=sync, timeline=self._timeline)
        self._on_end.callback(opened.close)
        engine, worker = opened.engine, EngineWorker(opened.engine, timeline=self._timeline)
        self._worker = worker
        self._control.calls.update(worker.calls())
        worker.failed.add_done_callback(lambda failed: self._fail(failed.exception()))
        engine.died.add_done_callback(lambda died: self._loop.call_soon_threadsafe(self._fail, died.exception()))
        engine.start()
        data = Peer(await self._connect("data"), notices=worker.notices())
        self._reading = asyncio.ensure_future(data.run())
        self._reading.add_done_callback(self._on_data_closed)
        worker.attach(data)
        return {"stop_ids": list(opened.stop_ids), "relay": sync.relay}

    def _on_data_closed(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and not isinstance(reading.exception(), StreamClosed):
            self._fail(reading.exception())  # an unreadable frame

    def _post(self, key: str, value: bytes) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._control.notify, "post", {"key": key, "value": value.hex()})

    def _fail(self, error: BaseException | None) -> None:
        if not self._failure.done() and error is not None:
            self._failure.set_exception(error)


def _wait_for_ranks(folder: Path, count: int) -> None:
    """Until all ranks of the trainer have saved their share; `_on_silence` ends a wait in vain."""
    while len(marks := list(folder.glob(f"{_SAVED}*"))) < count:
        time.sleep(_POLL_SECONDS)
    for mark in marks:
        mark.unlink()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which drains and saves
    faulthandler.enable()
    print_whole_lines()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.captureWarnings(True)
    with open(os.dup(0), "rb", buffering=0) as pipe, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # only this process reads the heartbeats
        line = pipe.readline()
        if line:  # empty if the launcher ended before sending the order
            order = Order.read(line)
            sys.path += [entry for entry in order.import_path if entry not in sys.path]
            asyncio.run(_run(order, pipe.fileno()))


async def _run(order: Order, pipe: int) -> None:
    """Ends with `os._exit`, so that no thread in a long computation keeps the process alive."""
    worker, status = RoleWorker(order, pipe), 1
    try:
        status = await worker.run()
    except BaseException:
        log.exception("%s ended", order.name)
    worker.clean_up()
    logging.shutdown()
    with contextlib.suppress(OSError):  # the disk of the log may be full
        sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
