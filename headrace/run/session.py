"""A run from its first request to its last checkpoint: the legs, and what happens between versions."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.observe import bound_by, share
from headrace.run.checkpoint import CheckpointError, random_state, restore_random_state
from headrace.run.evaluate import Evaluator
from headrace.run.in_flight import num_sampled
from headrace.run.loops import leg, run_loops
from headrace.run.metrics import Progress, trainer_metrics
from headrace.run.policy import POLICY
from headrace.run.state import Run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.config import Recipe
    from headrace.launch import Forecast
    from headrace.observe import Observer
    from headrace.records import Episode, Plain
    from headrace.run.batches import StartedBatch
    from headrace.run.checkpoint import Checkpoint, CheckpointStore
    from headrace.run.evaluate import Evaluation
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
            rests_at=lambda version: self._is_evaluated(version) or self._is_saved(version),
        )
        self.policy = self.run.policies[POLICY]
        self._saved_version = -1
        self._saving: asyncio.Task[None] | None = None
        """The last checkpoint, being written or on disk."""
        self._counts = self.policy.ledger.counts()
        """The ledger's, when a version was last trained."""
        self._trainer_peak = 0
        self._is_all_tied = False
        self._unwritten: deque[StartedBatch] = deque()
        self._last_moment = time.perf_counter()

    # Legs

    async def train(self) -> None:
        """Train to the last step. In exact mode a leg ends at every checkpoint with nothing in flight: what follows depends
        on the checkpoint alone, so a resumed run equals an uninterrupted one."""
        with fewer_gc_pauses():
            await self.roles.refresh()
            self.observer.start()
            self._last_moment = time.perf_counter()
            try:
                await self._train_legs()
            except CheckpointError:
                await self.save_after_failure()  # raises its own if the newest version had to go to the rescue folder
                raise
        self.progress.seconds_rl += time.perf_counter() - self._last_moment

    async def _train_legs(self) -> None:
        run, policy, recipe = self.run, self.policy, self.recipe
        while policy.version < recipe.steps and not run.is_stopping:
            if recipe.exact:
                every = recipe.checkpoint.every
                run.leg_end = min(recipe.steps, (policy.version // every + 1) * every)
            async with leg(run):
                if policy.version == 0 and self.progress.held_out_before is None:
                    await self._evaluate()
                await run_loops(run)
                await policy.published()
                await self._write_metrics()
                if recipe.exact and policy.version == run.leg_end:
                    await run.drained()
            if policy.version == run.leg_end or not recipe.exact:
                await self.save()

    def _on_trained(self, policy: PolicyState, started: StartedBatch) -> None:
        before, self._counts = self._counts, policy.ledger.counts()
        trained, rejected = (self._counts[state] - before[state] for state in ("trained", "rejected"))
        started.rejected = rejected / max(trained + rejected, 1)
        self.progress.skipped_steps += sum(bool(step.get("skipped", 0.0)) for step in started.seen)
        self._trainer_peak = max(self._trainer_peak, *(int(step.get("memory_peak", 0.0)) for step in started.seen))
        self._unwritten.append(started)

    async def _after_version(self, policy: PolicyState) -> None:
        """Called by the `train` loop after each version. The trainer waits for an evaluation; if it has its own process,
        metrics and checkpoints are written during its next steps."""
        started, version = self._unwritten[-1], policy.version
        if not self.progress.first_step:
            self.progress.first_step = time.perf_counter() - self.command_started
        if self._is_evaluated(version):
            started.evaluation = await self._evaluate()
        self._count(started)
        if policy.trainer.is_inline or version == self.recipe.steps:
            await self._write_metrics()
        else:
            self.run.spawn(self._write_metrics)
        if self._is_saved(version):
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
        started.metrics = self.progress.count(started, seconds=now - self._last_moment)
        self._last_moment = now

    def _is_evaluated(self, version: int) -> bool:
        every = self.recipe.evaluate.every
        return version == self.recipe.steps or (every > 0 and version % every == 0)

    def _is_saved(self, version: int) -> bool:
        """In exact mode checkpoints are written between legs."""
        is_due = version == self.recipe.steps or version % self.recipe.checkpoint.every == 0
        return is_due and not self.recipe.exact

    # Evaluation

    async def _evaluate(self) -> Evaluation | None:
        if not self.held_out:
            return None
        with self.observer.timeline("trainer").during("evaluate"):
            await self.policy.published()
            # One name for all versions, because seeds derive from it: every evaluation uses the same random numbers.
            evaluation = await Evaluator(self.recipe, self.roles).run(self.held_out, name="eval0")
        self.policy.ledger.evaluation += evaluation.count
        self.samples = evaluation.episodes[:3]
        found = self.progress.held_out_after = evaluation.metrics
        if self.policy.version == 0:
            self.progress.held_out_before = found
            solved, greedy = share(found, "success"), share(found, "greedy")
            self.observer.screen.say(f"held-out   {solved} solved at temperature 1, greedy {greedy}, before RL")
        failed = int(evaluation.metrics["held_out_failed"])
        if failed:
            self.observer.screen.say(
                f"held-out   {failed} of {evaluation.count} rollouts could not be judged; the first: {evaluation.problem}"
            )
        return evaluation

    # Metrics

    async def _write_metrics(self) -> None:
        """Write the metrics of all trained versions, except one still being evaluated."""
        if self._unwritten:
            await self.roles.refresh()
        while self._unwritten and self._unwritten[0].metrics is not None:
            started = self._unwritten.popleft()
            version, keep = started.version + 1, self.recipe.observe.keep_rollouts_every
            self._write_version(version, started)
            if keep and (version == self.recipe.steps or version % keep == 0):
                rollouts = [rollout for batch in started.batches for rollout in batch.rollouts]
                if self.policy.trainer.is_inline:
                    self.observer.keep_rollouts(version, rollouts)
                else:
                    await asyncio.to_thread(self.observer.keep_rollouts, version, rollouts)

    def _write_version(self, version: int, started: StartedBatch) -> None:
        assert started.metrics is not None
        held = self.roles.versions()
        metrics = {
            **started.metrics,
            "rejected": started.rejected,
            "occupancy": self.observer.occupancy,
            **self.policy.sync_metrics,
            **({} if self.policy.trainer.is_inline else {"engines": len(held)}),
            **{f"held/{name}": newest for name, newest in held.items()},
            "engine/memory_peak": self.roles.engine_peak(),
            **trainer_metrics(started.seen, memory_peak=self._trainer_peak),
            **{f"rollouts/{name}": count for name, count in self.policy.ledger.counts().items()},
            **({} if started.evaluation is None else started.evaluation.metrics),
        }
        self._warn_if_tied(version, int(metrics["tied_groups"]), len(started.groups))
        self.observer.version(version, metrics)

    def _warn_if_tied(self, version: int, tied: int, groups: int) -> None:
        """Warn once when all groups become tied: if siblings are compared, there is nothing to learn."""
        was_tied, self._is_all_tied = self._is_all_tied, tied == groups
        if self._is_all_tied and not was_tied and self.recipe.train.fewest_siblings > 1:
            self.observer.screen.say(
                f"version {version}: all {tied} groups are tied: within each, every rollout has the same reward, so there is "
                f"nothing to learn; is the reward a constant, or are the tasks far too hard or too easy?"
            )

    def summary(self, status: str, *, seconds: dict[str, float]) -> dict[str, Any]:
        """The contents of summary.json. `memory` has peak bytes so far; in `inline` mode both are of the one process. An
        engine that reports no peak is left out."""
        progress, policy, forecast, budget = self.progress, self.policy, self.forecast, self.observer.budget()
        memory = {"trainer": {"predicted": forecast and forecast.trainer_process, "peak": self._trainer_peak}}
        if engine_peak := self.roles.engine_peak():
            memory["engine"] = {"predicted": forecast and forecast.engine_process, "peak": engine_peak}
        before, after = progress.held_out_before or {}, progress.held_out_after
        untrained = policy.wasted_tokens + sum(num_sampled(group.episodes) for group in policy.buffer.groups())
        role, share_of_time = bound_by(budget)
        return {
            "status": status,
            "config_hash": self.identity,
            "steps": self.recipe.steps,
            "version": policy.version,
            "success_before": before.get("success"),
            "success_after": after.get("success"),
            "greedy_before": before.get("greedy"),
            "greedy_after": after.get("greedy"),
            "held_out": {"before": before, "after": after},
            "reward_first": progress.reward_first,
            "reward_last": progress.reward_last,
            "seconds": {**seconds, "first_step": progress.first_step, "rl": progress.seconds_rl},
            "tokens": {
                "sampled": progress.trained_tokens + untrained,
                "trained": progress.trained_tokens,
                "wasted": policy.wasted_tokens,
            },
            "lag": {"mean": progress.lag_sum / max(progress.trained_tokens, 1), "max": progress.lag_max},
            "skipped_steps": progress.skipped_steps,
            "accounting": policy.ledger.counts(),
            "dropped_because": dict(policy.ledger.reasons),
            "time_budget": budget,
            "occupancy": self.observer.occupancy,
            "bound_by": role,
            "bound_share": share_of_time,
            "memory": memory,
            **self.roles.losses(),
            "checkpoint": None if self.checkpoint_folder is None else str(self.checkpoint_folder),
        }

    # Checkpoints

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint."""
        manifest = checkpoint.manifest
        self.progress = Progress(**manifest["progress"])
        self.policy.wasted_tokens = self.progress.wasted_tokens
        await self.policy.restore(checkpoint)
        self.roles.tasks.restore(manifest["data"])
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
        it. `beside`: while training goes on. The trainer copies its weights before any step sent later."""
        policy = self.policy
        if policy.version == self._saved_version or not policy.has_whole_version:
            return False
        self.progress.wasted_tokens = policy.wasted_tokens
        in_flight = await policy.in_flight.entries()  # no await until all is taken: it must show the same moment
        manifest = {
            **policy.state(),
            "config_hash": self.identity,
            "data": self.roles.tasks.state(),
            "progress": dict(vars(self.progress)),
            "random": random_state(),
        }
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
        self._saving = asyncio.ensure_future(self._finish_saving(policy.version, writing, shown))
        self._saving.add_done_callback(lambda saving: saving.cancelled() or saving.exception())  # `saved` may never be called
        return True

    async def _finish_saving(self, version: int, writing: asyncio.Task[Path], shown: contextlib.ExitStack) -> None:
        with shown:
            await self._write_metrics()  # a resumed run has the metrics of every version up to its checkpoint
            try:
                self.checkpoint_folder = await writing
            except CheckpointError as error:
                if error.is_rescued:
                    self._saved_version = version  # a second attempt would fail too
                raise
        self._saved_version = version

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
    takes a fifth of the launcher's time."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, *before[1:])  # new objects between two collections of the youngest generation; the default is 700
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
