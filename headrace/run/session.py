"""A run from its first request to its last checkpoint: the legs, and what happens between versions."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headrace.run.callbacks import Callbacks, CallbackState
from headrace.run.changes import Change, changed, value_of
from headrace.run.checkpoint import CheckpointError, random_state, restore_random_state
from headrace.run.held_out import HeldOutEvaluations
from headrace.run.loops import leg, run_loops
from headrace.run.metrics import Progress, rollout_rows, settled_shares, trainer_metrics
from headrace.run.policy_groups import POLICY
from headrace.run.state import Run
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from headrace.buffer import Group
    from headrace.config import Recipe
    from headrace.launch import Forecast
    from headrace.observe import Observer
    from headrace.records import Episode, Plain
    from headrace.run.batches import StartedBatch
    from headrace.run.checkpoint import Checkpoint, CheckpointStore
    from headrace.run.policy import PolicyState
    from headrace.run.state import Roles
    from headrace.sync import Lineage


@dataclass
class Session:
    """A run of one policy, with everything around its loops: evaluation, checkpoints, metrics, the summary."""

    recipe: Recipe
    roles: Roles
    lineage: Lineage
    observer: Observer
    store: CheckpointStore
    held_out: dict[str, list[dict[str, Plain]]]
    """Held-out tasks by source."""
    command_started: float
    identity: str
    """Hash of everything that decides the run's result; the same command gives the same hash."""
    forecast: Forecast | None = None
    callbacks: Callbacks = field(default_factory=lambda: Callbacks((), in_thread=False, deadline=1.0))
    changes: list[Change] = field(default_factory=list)
    """Settings changed so far, which `recipe` has."""
    requests: Sequence[Change] = ()
    """Changes asked for through a handle; another thread appends to them."""
    progress: Progress = field(default_factory=Progress)
    samples: tuple[Episode, ...] = ()
    """A few episodes of the last evaluation, for display."""
    checkpoint_folder: Path | None = None

    def __post_init__(self) -> None:
        self.run = Run(
            self.recipe,
            self.roles,
            lineage=self.lineage,
            observer=self.observer,
            on_trained=self._on_trained,
            after_version=self._after_version,
            on_taken=lambda version, groups: self.call("on_rollouts", tuple(groups), version=version),
            rests_at=lambda version: self._is_saved(version) or self._evaluations.is_waited_for(version),
        )
        self.policy = self.run.policies[POLICY]
        self.observer.screen.steps = self.recipe.steps
        self._saved_version = -1
        self._saving: asyncio.Task[None] | None = None
        """The last checkpoint, being written or on disk."""
        self._counts = self.policy.ledger.counts()
        """The ledger's, when a version was last trained."""
        self.trainer_peak = 0
        self._is_all_tied = self._has_reached_max_draws = False
        self._evaluations = HeldOutEvaluations(self)
        self._unwritten: deque[StartedBatch] = deque()
        self._last_row: dict[str, Any] = {}
        self._num_heard = 0
        self.stopped_by = ""
        """The callback or handle that ended the run early."""
        self.last_moment = time.perf_counter()
        """Until when RL's time is counted."""

    # Legs

    async def train(self) -> None:
        """Train to the last step. In exact mode a leg ends at every checkpoint with nothing in flight: what follows depends
        on the checkpoint alone, so a resumed run equals an uninterrupted one."""
        with fewer_gc_pauses():
            await self.call("on_start")
            await self.roles.refresh()
            self.observer.start()
            self.last_moment = time.perf_counter()
            try:
                await self._train_legs()
            except CheckpointError:
                await self.save_after_failure()  # raises its own if the newest version had to go to the rescue folder
                raise
        self.progress.seconds_rl += time.perf_counter() - self.last_moment

    async def _train_legs(self) -> None:
        run, policy, progress, is_exact = self.run, self.policy, self.progress, self.recipe.exact
        while policy.version < self.recipe.steps or progress.evaluating is not None:
            if run.is_stopping or self.stopped_by:
                break
            if is_exact:
                every = self.recipe.checkpoint.every
                run.leg_end = min(self.recipe.steps, (policy.version // every + 1) * every)
                policy.renew_gate()
            async with leg(run):
                await self._evaluations.before_loops()
                await run_loops(run)
                await policy.published()
                await self._write_metrics()
                if is_exact and policy.version == run.leg_end:
                    await run.drained()
                await self._evaluations.after_loops()
            if policy.version == run.leg_end or not is_exact:
                await self.save()

    def _on_trained(self, policy: PolicyState, started: StartedBatch) -> None:
        before, self._counts = self._counts, policy.ledger.counts()
        started.settled = settled_shares(before, self._counts)
        started.settled |= policy.staleness_metrics()
        if self.run.lending is not None:
            started.settled |= self.run.lending.trained()
        if policy.pace is not None and (news := policy.pace.controller.news()):
            self.observer.screen.say(f"max_lag    {news}")
        self.progress.skipped_steps += sum(bool(step.get("skipped", 0.0)) for step in started.seen)
        self.trainer_peak = max(self.trainer_peak, *(int(step.get("memory_peak", 0.0)) for step in started.seen))
        self._unwritten.append(started)

    async def _after_version(self, policy: PolicyState) -> None:
        """Called by the `train` loop after each version. If the trainer has its own process, evaluations are made and metrics
        and checkpoints written during its next steps."""
        started, version = self._unwritten[-1], policy.version
        is_saved = self._is_saved(version)  # as it stood when training was held for it, or not
        if not self.progress.first_step:
            self.progress.first_step = time.perf_counter() - self.command_started
        await self._evaluations.after_version(version)
        self._count(started)
        if policy.trainer.is_inline or version == self.recipe.steps or self.callbacks.have("on_step"):
            await self._write_metrics()
        else:
            self.run.spawn(self._write_metrics)
        self._hear_requests()
        await self.call("on_step")
        if is_saved:
            if policy.trainer.is_inline:
                await self.save()
            else:
                await self._saved_before()  # one after the other
                await self._start_saving(beside=True)
                self.run.spawn(self.saved)  # if it fails, so does the run
        self.run.note_progress()

    def _count(self, started: StartedBatch) -> None:
        """Add a version to the totals, which are saved in checkpoints."""
        now = time.perf_counter()
        self.progress.log(self.roles.scorer.take_logged())
        success_at = self.recipe.evaluate.success_at
        started.metrics = self.progress.count(started, seconds=now - self.last_moment, success_at=success_at)
        self.last_moment = now

    def _is_saved(self, version: int) -> bool:
        """In exact mode checkpoints are written between legs; the last one always is, after the last evaluation."""
        return version % self.recipe.checkpoint.every == 0 and version < self.recipe.steps and not self.recipe.exact

    # Callbacks

    async def call(self, hook: str, *arguments: object, version: int | None = None, status: str = "running") -> None:
        """Call every callback that has this method, then do what it asked for. If one raises, so does this."""
        if not self.callbacks.is_due(hook):
            return
        for name, method in self.callbacks.methods(hook):
            state = CallbackState(
                version=self.policy.version if version is None else version,
                recipe=self.recipe,
                folder=self.observer.folder,
                metrics=dict(self._last_row),
                status=status,
                decode=self._decode,
                name=name,
            )
            self.run.note_progress()
            seconds = await self.callbacks.call(name, method, state, *arguments)
            self.run.note_progress()
            if seconds:
                self.observer.screen.say(f"slow       {name} took {seconds:.1f} s, and the next version waits for it")
            for key, value in state.changes:
                self._change(Change(key=key, value=value, by=name))
            if state.is_stopping:
                self.stop(name)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.roles.encoder.tokenizer.decode(list(token_ids)))

    def stop(self, by: str) -> None:
        """End the run after the batch in training, which is given up if parts of it are missing and no step of it is made; in
        exact mode at the end of the leg, the only place to save it."""
        if not self.stopped_by:
            self.stopped_by = by
            self.observer.event(self.policy.version, {"event": "stop", "by": by})
            if not self.recipe.exact:
                self.run.stop()

    def _change(self, change: Change) -> None:
        """Training may have gone on beside the evaluation that shortens the run: what is begun is trained."""
        least = min(self.policy.version + max(1, len(self.policy.started)), self.recipe.steps)
        recipe = changed(self.recipe, change.key, change.value, version=0)
        if recipe.steps < least:
            return self._change(replace(change, value=least))
        if recipe != self.recipe:
            change = replace(change, was=value_of(self.recipe, change.key), version=self.policy.version)
            self.recipe = recipe
            self.changes.append(change)
            self.run.use(recipe)
            self.observer.screen.steps = recipe.steps
            self.observer.event(change.version, {"event": "change", **asdict(change)})
            self.observer.screen.say(f"changed    {change}")

    def _hear_requests(self) -> None:
        """Make the changes that a handle asked for; one that cannot be made by now is said, and the run goes on."""
        requests, made = self.requests[self._num_heard :], {change.at for change in self.changes}
        self._num_heard += len(requests)
        for change in requests:
            try:
                if change.at not in made:  # by a session whose trainer was lost after its checkpoint
                    self._change(change)
            except ConfigError as error:
                self.observer.screen.say(f"unchanged  {error}")

    # Metrics

    async def _write_metrics(self) -> None:
        """Write the metrics of all trained versions, except one that the trainer waits to have evaluated."""
        if self._unwritten:
            await self.roles.refresh()
        while self._unwritten and self._unwritten[0].metrics is not None:
            started = self._unwritten.popleft()
            version, keep = started.version + 1, self.recipe.observe.keep_rollouts_every
            self._write_version(version, started)
            if keep and (version == self.recipe.steps or version % keep == 0):
                if self.policy.trainer.is_inline:
                    self._show_rollouts(version, started)
                else:
                    await asyncio.to_thread(self._show_rollouts, version, started)

    def _show_rollouts(self, version: int, started: StartedBatch) -> None:
        observe = self.recipe.observe
        self.observer.keep_rollouts(version, started.rollouts)
        tabled, printed = observe.table_rows if observe.sinks else 0, observe.print_rollouts
        rows = rollout_rows(started, limit=max(tabled, printed), decode=self._decode)
        self.observer.show_rollouts(version, rows, num_tabled=tabled, num_printed=printed)

    def _write_version(self, version: int, started: StartedBatch) -> None:
        assert started.metrics is not None
        held = self.roles.versions()
        metrics = {
            **started.metrics,
            **started.filter_metrics(self.recipe.filter),
            **started.settled,
            "occupancy": self.observer.occupancy,
            "retried": self.policy.num_retried,
            **self.policy.sync_metrics,
            **({} if self.policy.trainer.is_inline else {"engines": len(held)}),
            **{f"held/{name}": newest for name, newest in held.items()},
            **{f"engine/turns_{name}": count for name, count in self.roles.turns().items()},
            **{f"pushed/{name}": count for name, count in getattr(self.roles.environment, "push_counts", {}).items()},
            "engine/memory_peak": self.roles.engine_peak(),
            **trainer_metrics(started.seen, memory_peak=self.trainer_peak),
            **{f"rollouts/{name}": count for name, count in self.policy.ledger.counts().items()},
        }
        self._warn_if_tied(version, started.groups)
        if metrics.get("groups_unwanted") and not self._has_reached_max_draws:
            self._has_reached_max_draws, draws = True, self.recipe.filter.max_draws
            self.observer.screen.say(
                f"version {version}: {metrics['groups_unwanted']} of {len(started.groups)} groups fill the batch although the "
                f"filter does not want them: filter.max_draws = {draws}. Said once; metrics count them as groups_unwanted"
            )
        self._last_row = self.observer.version(version, metrics)

    def _warn_if_tied(self, version: int, groups: list[Group]) -> None:
        """Warn once when all groups become tied: if siblings are compared, there is nothing to learn."""
        was_tied, self._is_all_tied = self._is_all_tied, all(group.is_tied for group in groups)
        if self._is_all_tied and not was_tied and self.recipe.train.fewest_siblings > 1:
            self.observer.screen.say(
                f"version {version}: all {len(groups)} groups are tied: within each, every rollout has the same reward, so "
                f"this batch teaches nothing. If the reward is high, the tasks are solved. If it is low, is the reward a "
                f"constant, or are the tasks far too hard?"
            )

    # Checkpoints

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint."""
        manifest = checkpoint.manifest
        self.progress = Progress(**manifest["progress"])
        self.policy.wasted_tokens = self.progress.wasted_tokens
        self.roles.tasks.restore(manifest["data"])  # before groups of the journal are reported to it
        await self.policy.restore(checkpoint)
        restore_random_state(manifest["random"])
        self._saved_version, self.checkpoint_folder = checkpoint.version, checkpoint.folder
        self._counts = self.policy.ledger.counts()

    async def save(self) -> None:
        """Write a checkpoint of the newest version, unless it is already saved, and wait until it is on disk. The trainer has
        nothing to do meanwhile, so that it can save again, to the rescue folder."""
        with contextlib.suppress(Exception):  # of an earlier version, which this one replaces; the run has ended if it must
            await self.saved()
        if await self._start_saving(beside=False):
            await self.saved()

    async def _start_saving(self, *, beside: bool) -> bool:
        """Take all that a checkpoint of the newest version needs, and return whether there is one to write; a task then writes
        it. `beside`: while training goes on. The trainer copies its weights before any step sent later; if it has one already,
        because training was not held for this version when it began, there is none."""
        policy = self.policy
        if policy.version == self._saved_version or not policy.has_whole_version or policy.started:
            return False
        self.progress.wasted_tokens = policy.wasted_tokens
        self.progress.log(self.roles.scorer.take_logged())
        in_flight = await policy.in_flight.entries()  # no await until all is taken: it must show the same moment
        manifest = {
            **policy.state(),
            "config_hash": self.identity,
            "data": self.roles.tasks.state(),
            "progress": dict(vars(self.progress)),
            "random": random_state(),
            "changes": [asdict(change) for change in self.changes],
        }
        mark = policy.buffer.journal.mark() if policy.buffer.journal else 0
        shown = contextlib.ExitStack()  # from before the trainer is asked: in the trace its part lies inside this
        shown.enter_context(self.observer.timeline("trainer").beside(f"checkpoint {policy.version}"))
        writing = asyncio.ensure_future(
            self.store.save(
                policy.version,
                write_weights=policy.trainer.save,
                buffered=policy.buffer.groups(),
                in_flight=in_flight,
                manifest=manifest,
                beside=beside,
            )
        )
        self._saving = asyncio.ensure_future(self._finish_saving(policy.version, writing, shown, mark))
        self._saving.add_done_callback(lambda saving: saving.cancelled() or saving.exception())  # `saved` may never be called
        return True

    async def _finish_saving(self, version: int, writing: asyncio.Task[Path], shown: contextlib.ExitStack, mark: int) -> None:
        with shown:
            await self._write_metrics()  # a resumed run has the metrics of every version up to its checkpoint
            try:
                self.checkpoint_folder = await writing
            except CheckpointError as error:
                if error.is_rescued:
                    self._saved_version = version  # a second attempt would fail too
                raise
        self._saved_version = version
        if journal := self.policy.buffer.journal:
            await asyncio.to_thread(journal.forget, mark)
            self.run.room.set()
        await self.call("on_checkpoint", self.checkpoint_folder, version=version)

    async def _saved_before(self) -> None:
        """Like `saved`, while training waits: a slow disk is no stall."""
        while self._saving is not None and not self._saving.done():
            await asyncio.wait({self._saving}, timeout=min(1.0, self.recipe.deadline / 4))
            self.run.note_progress()
        await self.saved()

    async def saved(self) -> None:
        """Wait until the checkpoint being written is on disk. Cancelling the wait does not cancel the writing."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def save_after_failure(self) -> None:
        """Save the last version if the trainer still has exactly its weights. An exact run resumes only from the end of a leg,
        and trains what came after again, bitwise the same."""
        if not self.policy.trainer.is_inline:
            await self.run.finish_started(self.policy)
        if self.policy.version and not self.recipe.exact:
            for started in self._unwritten:
                if started.metrics is None:  # no evaluation will follow
                    self._count(started)
            await self.save()

    @property
    def resumes_from(self) -> int:
        """The version the same command resumes from."""
        return max(self._saved_version, 0)


@contextlib.contextmanager
def fewer_gc_pauses() -> Iterator[None]:
    """Collect garbage less often inside the block, and skip objects made before it. A run holds dozens of objects, almost none
    of them cyclic, for each of thousands of rollouts in flight: by default, traversing them and the libraries' million objects
    takes a fifth of the launcher's time. A program that has frozen its objects itself keeps them frozen."""
    before, is_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if not is_frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(1_000_000, *before[1:])  # new objects between two collections of the youngest; the default is 700
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not is_frozen:
            gc.unfreeze()
