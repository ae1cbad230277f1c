"""One command or one call: find or make the run's folder, build or restore, train, report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.observe import Observer
from headrace.observe.report import final_report
from headrace.observe.screen import open_screen
from headrace.orchestrate.build import UserInputs, build_roles, held_out_tasks, open_tasks, reward_functions, set_threads
from headrace.orchestrate.checkpoint import CheckpointStore
from headrace.orchestrate.folder import cache_folder, find_folder, prepare_folder, read_summary, write_summary
from headrace.orchestrate.session import Session
from headrace.orchestrate.warmup import model_folder
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.observe.screen import Screen
    from headrace.types import Episode


@dataclass(frozen=True)
class RunResult:
    """What `headrace.train` returns."""

    folder: Path
    summary: dict[str, Any]
    samples: tuple[Episode, ...]
    """A few held-out episodes of the last evaluation."""

    @property
    def checkpoint(self) -> str | None:
        """The last checkpoint: a Hugging Face folder."""
        path = self.summary.get("checkpoint")
        return None if path is None else str(path)


@dataclass(frozen=True)
class Launch:
    """How a run was asked for, beside its recipe."""

    name: str
    recipe_text: str = ""
    run_dir: Path | None = None
    fresh: bool = False
    quiet: bool = False
    command_started: float = 0.0


def launch(recipe: Recipe, given: UserInputs, how: Launch) -> RunResult:
    """Train a recipe to its end, resuming the same command's unfinished run."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _launch(recipe, given, how)
    with ThreadPoolExecutor(max_workers=1) as elsewhere:  # inside a notebook: its event loop is not ours to block in
        return elsewhere.submit(_launch, recipe, given, how).result()


def _launch(recipe: Recipe, given: UserInputs, how: Launch) -> RunResult:
    started = how.command_started or time.perf_counter()
    screen = open_screen(steps=recipe.steps, quiet=how.quiet)
    set_threads(recipe)
    reward_functions(recipe, given)
    open_tasks(recipe, given)
    held_out = held_out_tasks(recipe, given)
    folder = find_folder(how.name, recipe, run_dir=how.run_dir, fresh=how.fresh)
    prepare_folder(folder, recipe, recipe_text=how.recipe_text)
    screen.say(f"run        {folder}")
    setup_seconds = time.perf_counter() - started
    path = model_folder(recipe, given, say=screen.say)
    seconds = {"setup": setup_seconds, "warmup": time.perf_counter() - started - setup_seconds}
    with _log_file(folder):
        return asyncio.run(_run(recipe, given, folder, path, held_out, screen, started, seconds))


async def _run(
    recipe: Recipe,
    given: UserInputs,
    folder: Path,
    model_path: str,
    held_out: list[Any],
    screen: Screen,
    started: float,
    seconds: dict[str, float],
) -> RunResult:
    rescue = cache_folder() / "rescue" / f"{folder.name}-{recipe.hash}"
    store = CheckpointStore(folder / "checkpoints", rescue=rescue, keep=recipe.checkpoint.keep)
    checkpoint = store.latest(warn=screen.say)
    _seed_everything(recipe.seed)
    lineage = Lineage.new()
    if checkpoint is not None:
        manifest = checkpoint.manifest
        lineage = Lineage(manifest["lineage"], manifest["ancestors"]).after_restart(checkpoint.version)
    observer = Observer(folder, screen=screen, sinks=recipe.observe.sinks, trace=recipe.observe.trace)
    building = time.perf_counter()
    roles = build_roles(recipe, model_path, given, observer=observer, lineage=lineage)
    seconds["setup"] += time.perf_counter() - building
    session = Session(
        recipe=recipe,
        roles=roles,
        lineage=lineage,
        observer=observer,
        store=store,
        held_out=held_out,
        command_started=started,
    )
    if checkpoint is not None:
        await session.restore(checkpoint)
        screen.say(
            f"resumed    version {checkpoint.version} of {recipe.steps} from {checkpoint.folder}: weights, optimizer, "
            f"{len(session.run.buffer)} groups waiting, {len(session.run.pending)} to submit again, "
            f"task {session.run.tasks.position}"
        )
    return await _train(session, folder, screen, seconds)


async def _train(session: Session, folder: Path, screen: Screen, seconds: dict[str, float]) -> RunResult:
    write_summary(folder, session.summary("running", seconds=seconds))
    status = "failed"
    try:
        with _stop_on_signal(session, screen):
            await session.train()
        status = "finished" if session.run.version >= session.recipe.steps else "interrupted"
        if status == "finished":
            session.run.ledger.close()
            session.store.clear_rescued()
    except Exception as error:
        await _save_what_is_trained(session, screen)
        error.add_note(f"run folder: {folder}; the same command goes on from version {session.run.version}")
        raise
    finally:
        summary = session.summary(status, seconds=seconds)
        with contextlib.suppress(OSError):
            write_summary(folder, summary)
        session.observer.close()
    result = RunResult(folder=folder, summary=summary, samples=session.samples)
    screen.say(final_report(summary, session.run.ledger.equation(), _sample_texts(session), folder=folder))
    return result


async def _save_what_is_trained(session: Session, screen: Screen) -> None:
    """After a failure in a loop the weights of the last version are whole; keep them. A second failure is only told."""
    if session.run.version == 0:
        return
    try:
        await session.save()
    except Exception as error:  # noqa: BLE001  (the first failure is the one to raise)
        screen.say(f"and version {session.run.version} could not be saved: {error}")


def _sample_texts(session: Session) -> list[tuple[str, str, float | None]]:
    decode = session.roles.encoder.tokenizer.decode
    return [
        (
            str(decode(rollout.token_ids[rollout.source == 0].tolist())),
            str(decode(rollout.completion_ids)),
            episode.reward,
        )
        for episode in session.samples
        for rollout in episode.rollouts[:1]
    ]


@contextlib.contextmanager
def _stop_on_signal(session: Session, screen: Screen) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run after the version being trained and saves; the second ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        screen.say("stopping after this version; once more to stop at once")
        session.run.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _log_file(folder: Path) -> Iterator[None]:
    """Python warnings and log records of this process also go to logs/launcher.log."""
    import logging

    handler = logging.FileHandler(folder / "logs" / "launcher.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    except BaseException:
        logging.getLogger("headrace").exception("the run stopped (process %d)", os.getpid())
        raise
    finally:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)
        handler.close()


def _seed_everything(seed: int) -> None:
    """Generators that a user's functions may draw from; ours take their seeds by name."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


__all__ = ["Launch", "RunResult", "launch", "read_summary"]
