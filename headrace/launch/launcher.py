"""One command, one run: check, folder, processes, model, session, train, close."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from headrace.envs import PromptEncoder, can_resume
from headrace.imports import import_name
from headrace.launch.build import preflight
from headrace.launch.cluster import ClusterProcesses
from headrace.launch.folder import (
    find_folder,
    locked,
    logged,
    prepare_folder,
    rescue_folder,
    saved_in,
    set_aside,
    write_summary,
)
from headrace.launch.forecast import NUM_CHECKED_PROMPTS, forecast_memory, longest_prompt
from headrace.launch.inline import Inline
from headrace.launch.inputs import UserInputs, fingerprint_inputs, held_out_tasks, open_tasks
from headrace.launch.local import LocalProcesses
from headrace.launch.on_ray import RayProcesses
from headrace.launch.placement import set_threads
from headrace.launch.process import RestartBudget, TrainerLost
from headrace.launch.sft import METRICS
from headrace.launch.start_model import copy_model, model_folder
from headrace.launch.stop import SIGNAL_SECONDS, StopRequest, sigterm_as_interrupt
from headrace.lora import KEPT_BASE
from headrace.model import ModelShape, config_limit, load_config, load_tokenizer
from headrace.observe import Observer, final_report, open_screen
from headrace.run import CallbackError, Callbacks, CheckpointStore, Session, changes_in, replay, summarize
from headrace.settings import ConfigError, to_dict
from headrace.sync import Lineage
from headrace.user_code import then_end_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.config import Recipe
    from headrace.launch.forecast import Forecast
    from headrace.observe import Sink
    from headrace.records import Episode, Plain
    from headrace.run import Change, Checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class RunResult:
    """What `headrace.train` returns."""

    folder: Path
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
    """How a run is started, besides its recipe and inputs."""

    name: str
    recipe_text: str = ""
    run_dir: Path | None = None
    fresh: bool = False
    resume_anyway: bool = False
    """Resume although tasks or model have been edited."""
    quiet: bool = False
    command_started: float = 0.0
    command: str = ""
    """What the user typed, shown in errors so that it can be repeated."""
    stop: StopRequest = field(default_factory=StopRequest)
    callbacks: tuple[Any, ...] = ()
    """The caller's objects, or names of their classes."""
    requests: Sequence[Change] = ()
    """Changes of settings asked for through a handle, which appends to them."""
    listener: Sink | None = None
    """Gets the metrics of every version too."""


def launch(recipe: Recipe, given: UserInputs, how: Launch) -> RunResult:
    """Train a recipe to its end, resuming the same command's unfinished run. If interrupted, save and raise
    `KeyboardInterrupt`, so that a script of several runs stops too."""
    result = outside_event_loop(Launcher(recipe, given.settled(), how).launch, how.stop)
    if result.summary["status"] == "interrupted":
        raise KeyboardInterrupt(f"the run in {result.folder} is saved; the same command resumes it")
    return result


def outside_event_loop(call: Callable[[], T], stop: StopRequest) -> T:
    """For a caller inside an event loop, such as a notebook, `call` gets a thread, in which it can start its own event loop,
    and interrupts are passed on to it as stop requests. The caller's own signal handlers are restored when it has ended."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with stop.made_by_signals(), ThreadPoolExecutor(max_workers=1) as thread:
        future = thread.submit(call)
        while not future.done():
            wait([future], timeout=SIGNAL_SECONDS)
        try:
            return future.result()
        except asyncio.CancelledError as error:  # which only a stop request does
            raise KeyboardInterrupt from error


class Launcher:
    """Starts one run, and trains it to its end."""

    def __init__(self, recipe: Recipe, given: UserInputs, how: Launch) -> None:
        self.recipe, self.given, self.how = recipe, given, how
        self.started = how.command_started or time.perf_counter()
        self.screen = open_screen(steps=recipe.steps, quiet=how.quiet)
        self.seconds: dict[str, float] = {}
        """How long setup and SFT (`warmup`) took."""
        self._restarts = RestartBudget("train.restarts", recipe.train.restarts, window=math.inf)
        """Of the trainer from the same checkpoint."""
        named = (import_name(each, setting="callbacks") if isinstance(each, str) else each for each in how.callbacks)
        self.callbacks = Callbacks(tuple(named), in_thread=not recipe.is_inline, deadline=recipe.deadline)

    def launch(self) -> RunResult:
        recipe, how = self.recipe, self.how
        set_threads(recipe)
        about_inputs = preflight(recipe, self.given)
        inputs = fingerprint_inputs(recipe, self.given)
        notes = [*self._choose_folder(inputs), *about_inputs]
        with contextlib.closing(self.callbacks), locked(self.folder), logged(self.folder), sigterm_as_interrupt():
            prepare_folder(self.folder, recipe, recipe_text=how.recipe_text, inputs=inputs)
            with orchestration_of(recipe)(recipe, self.folder) as orchestration:
                if isinstance(orchestration, ClusterProcesses):
                    orchestration.stop = how.stop
                self.screen.say("\n".join([f"run        {self.folder}", *notes]))
                self.seconds["setup"] = time.perf_counter() - self.started
                with model_folder(recipe, self.given, say=self.screen.say, stop=how.stop, keep=self._kept_base()) as path:
                    self.seconds["warmup"] = time.perf_counter() - self.started - self.seconds["setup"]
                    if not recipe.steps:
                        return self._only_sft(Path(path))
                    self._seed()
                    return asyncio.run(then_end_tasks(self._run(path, orchestration)))

    def _choose_folder(self, inputs: dict[str, list[str]]) -> list[str]:
        """Find or make up the run's folder, and return what to tell the user about it. A folder keeps the identity that its
        checkpoints have."""
        recipe, how, notes = self.recipe, self.how, list[str]()
        if how.fresh and how.run_dir is not None and (how.run_dir / "checkpoints").exists():
            for key, (name, *_) in inputs.items():
                if name and (place := Path(name).resolve()).exists() and place.is_relative_to(how.run_dir.resolve()):
                    raise ConfigError(f"{key} = {name!r} is in {how.run_dir}, which --fresh moves; give another --run-dir")
            notes.append(f"moved      the run before is now in {set_aside(how.run_dir)}")
        self.folder, found, told = find_folder(how.name, recipe, inputs=inputs, run_dir=how.run_dir, fresh=how.fresh)
        notes += told
        self.identity = recipe.hash
        if how.fresh:
            shutil.rmtree(rescue_folder(self.folder), ignore_errors=True)  # of a run that was removed from here
        if found is not None:
            self.identity = found.summary.get("config_hash", recipe.hash)
            saved = saved_in(self.folder)
            version = int(saved[-1].name.removeprefix("step-")) if saved else 0
            now = replay(recipe, changes_in(saved[-1])) if saved else recipe
            notes += found.check(now, version=version, resume_anyway=how.resume_anyway)
        return notes

    def _kept_base(self) -> Path | None:
        """Where the run keeps the model that its adapters belong to, should that be made here; only its checkpoints need it."""
        if not self.recipe.lora.is_on or not self.recipe.steps:
            return None
        base = self.folder / KEPT_BASE
        if not saved_in(self.folder):
            shutil.rmtree(base, ignore_errors=True)
        return base

    def _only_sft(self, made: Path) -> RunResult:
        """The result of a run without RL: the fine-tuned model, copied out of the cache."""
        target = self.folder / "model"
        copy_model(made, target)
        metrics = json.loads((target / METRICS).read_text())
        summary = {"status": "finished", "config_hash": self.identity, "steps": 0, "version": 0, "sft": metrics}
        summary |= {"seconds": self.seconds, "checkpoint": str(target)}
        write_summary(self.folder, summary)
        self.screen.say(f"finished   SFT in {self.seconds['warmup']:.1f} s; the model is in {target}")
        return RunResult(folder=self.folder, summary=summary, samples=())

    async def _run(self, model_path: str, orchestration: Inline | LocalProcesses) -> RunResult:
        """Open a session, resumed from the last checkpoint if there is one, and train; if the trainer's process is lost, open
        another over the same engines. A second stop request cancels it."""
        with self.how.stop.cancels(asyncio.current_task(), at=2):
            began = time.perf_counter()
            store, checkpoint, lineage = self._find_checkpoint()
            observer = self._observe(checkpoint, orchestration)
            held_out = held_out_tasks(self.recipe, self.given)
            expected = self._forecast(model_path, held_out)  # before anything takes memory
            async with orchestration.roles(
                model_path, self.given, observer=observer, lineage=lineage, most_blocks=expected.most_blocks
            ) as roles:
                has_trainer = True
                while True:
                    try:
                        if not has_trainer:
                            assert isinstance(orchestration, LocalProcesses)
                            roles = await orchestration.restart_trainer(observer=observer, lineage=lineage)
                            self._seed()
                        changes = [] if checkpoint is None else changes_in(checkpoint.folder)
                        session = Session(
                            recipe=replay(self.recipe, changes),
                            roles=roles,
                            lineage=lineage,
                            observer=observer,
                            store=store,
                            held_out=held_out,
                            command_started=self.started,
                            identity=self.identity,
                            forecast=expected,
                            callbacks=self.callbacks,
                            changes=changes,
                            requests=self.how.requests,
                        )
                        if checkpoint is not None:
                            await self._restore(session, checkpoint)
                        self.seconds["setup"] += time.perf_counter() - began
                        summary = await self._train(session)
                        break
                    except TrainerLost as lost:
                        has_trainer, began, before = False, time.perf_counter(), checkpoint
                        observer.close()
                        store, checkpoint, lineage = await asyncio.to_thread(self._find_checkpoint)
                        try:
                            await self._before_restart(lost, before, checkpoint)
                        except Exception:
                            await self._end_after_failure(session)
                            raise
                        observer = self._observe(checkpoint, orchestration)
        self.screen.say(final_report(summary, session.policy.ledger.equation(), _sample_texts(session), folder=self.folder))
        return RunResult(folder=self.folder, summary=summary, samples=session.samples)

    def _observe(self, checkpoint: Checkpoint | None, orchestration: Inline | LocalProcesses) -> Observer:
        return Observer(
            self.folder,
            screen=self.screen,
            sinks=self.recipe.observe.sinks,
            trace=self.recipe.observe.trace,
            max_gb=self.recipe.observe.max_gb,
            restored=None if checkpoint is None else checkpoint.version,
            config=to_dict(self.recipe),
            elsewhere=orchestration.reporting_roles,
            listener=self.how.listener,
        )

    def _seed(self) -> None:
        """For users' functions; Headrace derives its own seeds from names."""
        random.seed(self.recipe.seed)
        np.random.seed(self.recipe.seed % 2**32)
        torch.manual_seed(self.recipe.seed)

    async def _before_restart(self, lost: TrainerLost, before: Checkpoint | None, now: Checkpoint | None) -> None:
        """Raise if the trainer's restarts are spent, which a newer checkpoint gives back, or the user has asked to stop."""
        start = 0 if now is None else now.version
        self._add_way_on(lost, start)
        if self.how.stop.num_made:
            raise lost
        if start > (0 if before is None else before.version):
            self._restarts.refill()
        seconds = self._restarts.spend(lost)
        counted = f"{self._restarts.num_spent} of {self._restarts.most}"
        self.screen.say(f"{lost}\n  it is started again from version {start} ({counted}) in {seconds:.0f} s")
        await asyncio.sleep(seconds)

    def _find_checkpoint(self) -> tuple[CheckpointStore, Checkpoint | None, Lineage]:
        """The store, its newest checkpoint, and the lineage of the weights trained from now on."""
        store = CheckpointStore(
            self.folder / "checkpoints",
            rescue=rescue_folder(self.folder),
            keep=self.recipe.checkpoint.keep,
            in_threads=not self.recipe.is_inline,
        )
        checkpoint = store.latest(warn=self.screen.say)
        if checkpoint is None:
            return store, None, Lineage.new()
        manifest = checkpoint.manifest
        if manifest["config_hash"] != self.identity:
            raise ConfigError(
                f"{checkpoint.folder} belongs to another run that was in {self.folder}, with other settings; --fresh moves "
                f"it away, or give another --run-dir"
            )
        return store, checkpoint, Lineage(manifest["lineage"], manifest["ancestors"]).after_restart(checkpoint.version)

    def _forecast(self, model_path: str, held_out: dict[str, list[dict[str, Plain]]]) -> Forecast:
        tasks, encoder = open_tasks(self.recipe, self.given), PromptEncoder(load_tokenizer(model_path, self.recipe.model))
        rows = (tasks.next().row for _ in range(NUM_CHECKED_PROMPTS))
        config = load_config(model_path)
        return forecast_memory(
            self.recipe,
            ModelShape.of(config),
            context=config_limit(config, self.recipe.model.context),
            longest_prompt=longest_prompt(rows, encoder, held_out=held_out),
            num_held_out=sum(map(len, held_out.values())),
            is_single_turn=self.given.is_single_turn(self.recipe),
        )

    async def _restore(self, session: Session, checkpoint: Checkpoint) -> None:
        await session.restore(checkpoint)
        policy = session.policy
        self.screen.say(
            f"resumed    version {checkpoint.version} of {self.recipe.steps} from {checkpoint.folder}: weights, optimizer, "
            f"{len(policy.buffer)} groups waiting, {len(policy.in_flight)} in flight with {policy.in_flight.num_partials} "
            f"partial rollouts, task {session.roles.tasks.position}{policy.recovered.describe()}"
        )
        environment = session.roles.environment
        if len(policy.in_flight) and not self.given.is_single_turn(self.recipe) and not can_resume(environment):
            name = getattr(environment, "name", "")
            self.screen.say(f"anew       episodes in flight begin again: environment {name!r} does not say `can_resume = True`")

    async def _train(self, session: Session) -> dict[str, Any]:
        """Train to the last step or until a stop request. The summary is written however it ends."""
        write_summary(self.folder, summarize(session, "running", seconds=self.seconds))
        status = "failed"

        def stop() -> None:
            self.screen.say("stopping after this version; once more to stop at once")
            if self.how.stop.by:
                session.stop(self.how.stop.by)
            else:
                session.run.stop()

        try:
            with self.how.stop.heard_by(stop):
                await session.train()
            is_finished = session.policy.version >= session.recipe.steps
            status = "finished" if is_finished else "stopped" if session.stopped_by else "interrupted"
            if status == "finished":
                session.policy.ledger.close()
                session.store.clear_rescued()
            await session.roles.refresh()
            await session.call("on_end", status=status)
        except Exception as error:
            status = "failed"
            if session.roles.trainer.is_lost:
                with contextlib.suppress(Exception):  # the trainer may have been lost before it had written its weights
                    await session.saved()
            else:
                try:
                    await session.save_after_failure()
                except Exception as second:  # noqa: BLE001  (the first failure is raised)
                    self.screen.say(f"and version {session.policy.version} could not be saved: {second}")
            if not isinstance(error, TrainerLost):
                self._add_way_on(error, session.resumes_from)
                await self._end_after_failure(session)
            raise
        finally:
            summary = summarize(session, status, seconds=self.seconds)
            with contextlib.suppress(OSError):  # a full disk; the checkpoint is already in the rescue folder
                write_summary(self.folder, summary)
            session.observer.close()
            if journal := session.policy.buffer.journal:
                await asyncio.to_thread(journal.end, is_over=status == "finished")
        return summary

    async def _end_after_failure(self, session: Session) -> None:
        try:
            await session.call("on_end", status="failed")
        except CallbackError as second:
            self.screen.say(f"and {second}")  # the first failure is raised

    def _add_way_on(self, error: Exception, version: int) -> None:
        command = f": {self.how.command}" if self.how.command else ""
        error.add_note(f"the same command resumes from version {version}{command}")
        error.add_note(f"run folder {self.folder}, log {self.folder / 'logs' / 'launcher.log'}")


def orchestration_of(recipe: Recipe) -> type[Inline | LocalProcesses]:
    if recipe.is_inline or not recipe.steps:
        return Inline
    if recipe.is_on_ray:
        return RayProcesses
    return ClusterProcesses if recipe.cluster.listen else LocalProcesses


def _sample_texts(session: Session) -> list[tuple[str, str, float | None]]:
    """(prompt, completion, reward) of each sample, for the final report."""
    decode = session.roles.encoder.tokenizer.decode
    return [
        (str(decode(rollout.token_ids[rollout.source == 0].tolist())), str(decode(rollout.completion_ids)), episode.reward)
        for episode in session.samples
        for rollout in episode.rollouts[:1]
    ]
