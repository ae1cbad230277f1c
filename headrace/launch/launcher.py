"""One command or one call: find or make the run's folder, build or restore, train, report."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.envs import PromptEncoder
from headrace.launch.build import build_roles, preflight, set_threads
from headrace.launch.folder import FolderLock, cache_folder, find_folder, prepare_folder, write_summary
from headrace.launch.forecast import LOOKED_AT, forecast_here, free_here, longest_prompt, most_kv_blocks
from headrace.launch.inputs import UserInputs, held_out_tasks, open_tasks, run_identity
from headrace.launch.local import LocalProcesses
from headrace.launch.processes import Processes
from headrace.launch.stop import StopRequest, ended_by_signals
from headrace.launch.warmup import model_folder
from headrace.model import ModelShape, config_limit, load_config, load_tokenizer
from headrace.observe import Observer, final_report, open_screen
from headrace.run import CheckpointStore, Session
from headrace.settings import ConfigError, to_dict
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.launch.forecast import Forecast
    from headrace.observe import Screen
    from headrace.records import Episode, Plain
    from headrace.run import Roles


@dataclass(frozen=True)
class RunResult:
    """What `headrace.trainer` returns."""

    folder: Path
    """The run's folder."""
    summary: dict[str, Any]
    """summary.json: status, success before and after, seconds, tokens, lag, accounting, time budget, bound_by …"""
    samples: tuple[Episode, ...]
    """A few held-out episodes of the last evaluation."""

    @property
    def checkpoint(self) -> str | None:
        """The last checkpoint: a Hugging Face folder."""
        path = self.summary.get("checkpoint")
        return None if path is None else str(path)

    def __repr__(self) -> str:
        done = f"version {self.summary['version']} of {self.summary['steps']}"
        return f"RunResult({self.summary['status']}, {done}, folder={str(self.folder)!r})"


@dataclass(frozen=True)
class Launch:
    """How a run was asked for, beside its recipe."""

    name: str
    recipe_text: str = ""
    run_dir: Path | None = None
    fresh: bool = False
    quiet: bool = False
    command_started: float = 0.0
    command: str = ""
    """What the user typed, to be typed again."""
    stop: StopRequest = field(default_factory=StopRequest)


def launch(recipe: Recipe, given: UserInputs, how: Launch) -> RunResult:
    """Train a recipe to its end, resuming the same command's unfinished run. Interrupted, it saves and then raises
    `KeyboardInterrupt`, so that a script of several runs stops too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        result = _launch(recipe, given.settled(), how)
    else:
        result = _launch_beside(recipe, given.settled(), how)
    if result.summary["status"] == "interrupted":
        raise KeyboardInterrupt(f"the run in {result.folder} is saved; the same command goes on")
    return result


def _launch_beside(recipe: Recipe, given: UserInputs, how: Launch) -> RunResult:
    """Inside somebody's event loop, as in a notebook: the run gets a thread with one of its own, and interrupts are passed on.
    Whatever the loop's owner does with signals waits until the run has ended."""
    with ended_by_signals(), ThreadPoolExecutor(max_workers=1) as elsewhere:
        future = elsewhere.submit(_launch, recipe, given, how)
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                if how.stop.is_made:
                    how.stop.insist()
                    raise
                how.stop.make()


def _launch(recipe: Recipe, given: UserInputs, how: Launch) -> RunResult:
    started = how.command_started or time.perf_counter()
    screen = open_screen(steps=recipe.steps, quiet=how.quiet)
    set_threads(recipe)
    preflight(recipe, given)
    identity = run_identity(recipe, given)
    folder = find_folder(how.name, recipe, identity=identity, run_dir=how.run_dir, fresh=how.fresh)
    with _locked(folder), _logged(folder), ended_by_signals(), Processes(recipe, logs=folder / "logs") as processes:
        prepare_folder(folder, recipe, recipe_text=how.recipe_text)
        local = LocalProcesses.spawn(processes) if not recipe.is_inline else None
        screen.say(f"run        {folder}")
        seconds = {"setup": time.perf_counter() - started}
        with model_folder(recipe, given, say=screen.say) as path:
            seconds["warmup"] = time.perf_counter() - started - seconds["setup"]
            _seed_everything(recipe.seed)
            return asyncio.run(_Run(recipe, given, how, folder, identity, screen, started, seconds, local).train(path))


@dataclass(frozen=True)
class _Run:
    """One launch, once its folder is its own."""

    recipe: Recipe
    given: UserInputs
    how: Launch
    folder: Path
    identity: str
    screen: Screen
    started: float
    seconds: dict[str, float]
    local: LocalProcesses | None
    """None: everything in this process."""

    async def train(self, model_path: str) -> RunResult:
        with self.how.stop.cancels_this_task():
            return await self._train(model_path)

    async def _train(self, model_path: str) -> RunResult:
        async with self._session(model_path) as session:
            write_summary(self.folder, session.summary("running", seconds=self.seconds))
            status = "failed"
            try:
                with self.how.stop.heard_by(lambda: self._stop(session)):
                    await session.train()
                status = "finished" if session.policy.version >= self.recipe.steps else "interrupted"
                if status == "finished":
                    session.policy.ledger.close()
                    session.store.clear_rescued()
            except Exception as error:
                await self._save_after(session)
                command = f": {self.how.command}" if self.how.command else ""
                error.add_note(f"the same command goes on from version {session.resumes_from}{command}")
                error.add_note(f"run folder {self.folder}, log {self.folder / 'logs' / 'launcher.log'}")
                raise
            finally:
                summary = await self._close(session, status)
        self.screen.say(final_report(summary, session.policy.ledger.equation(), _sample_texts(session), folder=self.folder))
        return RunResult(folder=self.folder, summary=summary, samples=session.samples)

    async def _close(self, session: Session, status: str) -> dict[str, Any]:
        """The last look at every process, and the summary."""
        if status != "failed":
            await session.roles.refresh()
        summary = session.summary(status, seconds=self.seconds)
        with contextlib.suppress(OSError):  # a full disk; the checkpoint is elsewhere by now
            write_summary(self.folder, summary)
        session.observer.close()
        return summary

    @contextlib.asynccontextmanager
    async def _session(self, model_path: str) -> AsyncIterator[Session]:
        """A session, and the end of its processes. Interrupted, nobody is waited for: they are killed outside."""
        with contextlib.ExitStack() as watched:
            try:
                yield await self._make_session(model_path, watched)
            except Exception:
                await self._end_processes(watched)
                raise
            await self._end_processes(watched)

    async def _end_processes(self, watched: contextlib.ExitStack) -> None:
        watched.close()  # nobody is to be started again
        if self.local is not None:
            await self.local.processes.end()

    async def _make_session(self, model_path: str, watched: contextlib.ExitStack) -> Session:
        recipe, began = self.recipe, time.perf_counter()
        place = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:12]
        rescue = cache_folder() / "rescue" / f"{self.folder.name}-{place}"
        store = CheckpointStore(self.folder / "checkpoints", rescue=rescue, keep=recipe.checkpoint.keep)
        if self.how.fresh:
            store.clear_rescued()
        checkpoint = store.latest(warn=self.screen.say)
        lineage = Lineage.new()
        if checkpoint is not None:
            manifest = checkpoint.manifest
            if manifest["config_hash"] != self.identity:
                raise ConfigError(f"{checkpoint.folder} belongs to another run; give another --run-dir")
            lineage = Lineage(manifest["lineage"], manifest["ancestors"]).after_restart(checkpoint.version)
        observer = Observer(
            self.folder,
            screen=self.screen,
            sinks=recipe.observe.sinks,
            trace=recipe.observe.trace,
            restored=None if checkpoint is None else checkpoint.version,
            config=to_dict(recipe),
            elsewhere=() if self.local is None else ("engine", "trainer"),
        )
        held_out = held_out_tasks(recipe, self.given)
        forecast, most_blocks = self._forecast(model_path, held_out)  # before anybody takes of the memory
        roles = await self._make_roles(model_path, observer, lineage, watched, most_blocks=most_blocks)
        session = Session(
            recipe=recipe,
            roles=roles,
            lineage=lineage,
            observer=observer,
            store=store,
            held_out=held_out,
            command_started=self.started,
            identity=self.identity,
            forecast=forecast,
        )
        if checkpoint is not None:
            await session.restore(checkpoint)
            self.screen.say(
                f"resumed    version {checkpoint.version} of {recipe.steps} from {checkpoint.folder}: weights, optimizer, "
                f"{len(session.policy.buffer)} groups waiting, {len(session.policy.in_flight)} in flight with "
                f"{session.policy.in_flight.num_partials} partial rollouts, task {roles.tasks.position}"
            )
        self.seconds["setup"] += time.perf_counter() - began
        return session

    async def _make_roles(
        self, model_path: str, observer: Observer, lineage: Lineage, watched: contextlib.ExitStack, *, most_blocks: int
    ) -> Roles:
        if self.local is None:
            return build_roles(self.recipe, model_path, self.given, observer=observer, lineage=lineage, most_blocks=most_blocks)
        roles, close = await self.local.start(
            model_path, self.given, observer=observer, lineage=lineage, say=self.screen.say, most_blocks=most_blocks
        )
        watched.callback(close)
        return roles

    def _forecast(self, model_path: str, held_out: dict[str, list[dict[str, Plain]]]) -> tuple[Forecast, int]:
        """What the run will take, and the KV blocks that an engine can use at once (0: as many as its slots can). Rollouts of
        an environment of the user's may have any number of turns, and episodes any number of rollouts."""
        recipe, tasks, encoder = self.recipe, open_tasks(self.recipe, self.given), PromptEncoder(load_tokenizer(model_path))
        config = load_config(model_path)
        context = config_limit(config, recipe.model.context)
        longest = longest_prompt((tasks.next() for _ in range(LOOKED_AT)), encoder, held_out=held_out)
        most_blocks = 0
        if self.given.environment is None:
            count = sum(map(len, held_out.values()))
            most_blocks = most_kv_blocks(recipe, context=context, longest_prompt=longest, num_held_out=count)
        shape, free = ModelShape.of(config), free_here(recipe)
        expected = forecast_here(recipe, shape, context=context, longest_prompt=longest, free=free, most_blocks=most_blocks)
        return expected, most_blocks

    def _stop(self, session: Session) -> None:
        self.screen.say("stopping after this version; once more to stop at once")
        session.run.stop()

    async def _save_after(self, session: Session) -> None:
        """After a failure: what is trained is kept if it is whole. A second failure is only told."""
        if session.roles.trainer.is_lost:
            return
        try:
            await session.save_after_failure()
        except Exception as error:  # noqa: BLE001  (the first failure is the one to raise)
            self.screen.say(f"and version {session.policy.version} could not be saved: {error}")


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
def _locked(folder: Path) -> Iterator[None]:
    lock = FolderLock(folder)
    if not lock.acquire():
        raise ConfigError(f"{folder} is in use by another process; give another --run-dir")
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Python warnings and log records of this process also go to logs/launcher.log."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
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
