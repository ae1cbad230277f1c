"""A run from its first request to its last checkpoint: legs of the four loops, and what happens between versions."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.observe import bound_by, share
from headrace.run import loops
from headrace.run.checkpoint import CheckpointError, random_state, restore_random_state
from headrace.run.collector import few_collections
from headrace.run.evaluate import Evaluation, make_evaluator
from headrace.run.failures import first_failure
from headrace.run.publishing import publish
from headrace.run.state import Run
from headrace.run.work import PendingGroup

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.buffer import Group
    from headrace.config import Recipe
    from headrace.launch import Forecast
    from headrace.observe import Observer
    from headrace.records import Batch, Episode, Plain
    from headrace.run.checkpoint import Checkpoint, CheckpointStore
    from headrace.run.roles import Roles
    from headrace.run.work import Begun
    from headrace.sync import Lineage


@dataclass
class Progress:
    """Totals that live as long as the run does, across restarts."""

    held_out_before: dict[str, float] | None = None
    """What the evaluation before RL found; None until it was made."""
    held_out_after: dict[str, float] = field(default_factory=dict)
    """What the last one found."""
    trained_tokens: int = 0
    wasted_tokens: int = 0
    lag_sum: float = 0.0
    lag_max: int = 0
    seconds_rl: float = 0.0
    first_step: float = 0.0
    reward_first: float | None = None
    reward_last: float | None = None
    skipped_steps: int = 0


@dataclass
class _Trained:
    """A version whose metrics are still to be written."""

    begun: Begun
    seen: list[dict[str, float]]
    at: float
    """By the clock that `seconds` are counted with."""
    rejected: float
    """Of the rollouts trained or rejected since the version before, the share that was rejected."""
    evaluation: Evaluation | None = None
    is_complete: bool = False
    """Evaluated, where that was due."""


@dataclass
class Session:
    """Owns a `Run` and carries it from where it stands to its last step."""

    recipe: Recipe
    roles: Roles
    lineage: Lineage
    observer: Observer
    store: CheckpointStore
    held_out: dict[str, list[dict[str, Plain]]]
    """Tasks by their source."""
    command_started: float
    identity: str
    """Of the run: the same command has the same."""
    progress: Progress = field(default_factory=Progress)
    samples: tuple[Episode, ...] = ()
    checkpoint_folder: Path | None = None
    forecast: Forecast | None = None
    """The memory it is expected to take."""

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
        self._saved_version = -1
        self._settled = (0, 0)
        """Rollouts trained and rejected when the last version was."""
        self._trainer_peak = 0
        self._is_all_tied = False
        """Whether every group of the last version was."""
        self._unnoted: deque[_Trained] = deque()
        self._last_moment = time.perf_counter()
        self.evaluator = make_evaluator(self.recipe, self.roles)

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Take everything from a checkpoint; what was in flight then goes on from what was drawn of it."""
        run, manifest = self.run, checkpoint.manifest
        await run.trainer.load(checkpoint.folder)
        run.version = run.held_version = self._saved_version = checkpoint.version
        self.checkpoint_folder = checkpoint.folder
        self.progress = Progress(**manifest["progress"])
        run.tasks.restore(manifest["data"])
        run.submitted_groups, run.dropped_groups = manifest["submitted_groups"], manifest["dropped_groups"]
        groups = checkpoint.groups()
        run.buffer.restore(next_number=manifest["buffer"]["next"], skipped=manifest["buffer"]["skipped"], groups=groups)
        run.pending = {f"g{number}": PendingGroup(number, task) for number, task in manifest["in_flight"]}
        size = self.recipe.train.group_size
        run.ledger.restore(
            manifest["ledger"],
            buffered=[id for group in groups for id in group.ids],
            in_flight=[f"{group}/{index}" for group in run.pending for index in range(size)],
        )
        run.take_up(checkpoint.unfinished())
        restore_random_state(manifest["random"])
        self._settled = self._trained_and_rejected()

    async def train(self) -> None:
        """Legs until the last step. In exact mode a leg ends at every checkpoint, with nothing in flight: what follows
        then depends on the checkpoint alone, and a resumed run cannot differ from one that went on."""
        with few_collections():
            await self.roles.refresh()
            self.observer.start()
            self._last_moment = time.perf_counter()
            await self._legs()
        self.progress.seconds_rl += time.perf_counter() - self._last_moment

    async def _legs(self) -> None:
        run, recipe = self.run, self.recipe
        while run.version < recipe.steps and not run.is_stopping:
            if recipe.exact:
                every = recipe.checkpoint.every
                run.leg_end = min(recipe.steps, (run.version // every + 1) * every)
            await self._leg()
            if run.version == run.leg_end or not recipe.exact:
                await self.save()

    async def _leg(self) -> None:
        run = self.run
        try:
            async with asyncio.TaskGroup() as tasks:
                run.attach(tasks)
                services = [run.attached(service()) for service in (*self.roles.services, run.watch)]
                await publish(run)
                await run.published()  # nothing is drawn before the engines hold this life's weights
                if run.version == 0 and self.progress.held_out_before is None:
                    await self._evaluate_first()
                beside = (loops.feed, loops.generate, loops.score)
                background = [run.attached(loop(run)) for loop in beside]
                await run.noted(loops.train(run))
                await run.published()
                await self._write_notes()
                if self.recipe.exact and run.version == run.leg_end:
                    await run.drained()
                await run.flight.end()
                run.cancel_spawned()
                for task in (*services, *background):
                    task.cancel()
        except BaseExceptionGroup as failures:
            failure = first_failure(failures)
            raise failure from failure.__cause__
        finally:
            run.forget_in_flight()

    async def _evaluate_first(self) -> None:
        evaluation = await self._evaluate()
        if evaluation is not None:
            found = self.progress.held_out_before = evaluation.metrics
            self.observer.screen.say(
                f"held-out   {share(found, 'success')} solved at temperature 1, greedy {share(found, 'greedy')}, before RL"
            )

    def _on_trained(self, begun: Begun, seen: list[dict[str, float]]) -> None:
        self.progress.skipped_steps += sum(bool(step.get("skipped", 0.0)) for step in seen)
        self._trainer_peak = max(self._trainer_peak, *(int(step.get("memory_peak", 0.0)) for step in seen))
        before, self._settled = self._settled, self._trained_and_rejected()
        trained, rejected = (now - then for now, then in zip(self._settled, before, strict=True))
        self._unnoted.append(_Trained(begun, seen, time.perf_counter(), rejected / max(trained + rejected, 1)))

    def _trained_and_rejected(self) -> tuple[int, int]:
        counts = self.run.ledger.counts()
        return counts["trained"], counts["rejected"]

    async def _after_version(self) -> None:
        """Called by `train` when a version is trained: evaluate and save where that is due, for which the trainer waits;
        measure and show beside its next step, where it has a process to itself."""
        run, progress, version = self.run, self.progress, self.run.version
        if not progress.first_step:
            progress.first_step = time.perf_counter() - self.command_started
        evaluation = await self._evaluate() if self._is_evaluated(version) else None
        if evaluation is not None:
            self._unnoted[-1].evaluation = evaluation
        self._unnoted[-1].is_complete, self._unnoted[-1].at = True, time.perf_counter()
        if run.trainer.is_here or version == self.recipe.steps:
            await self._write_notes()
        else:
            run.spawn(self._write_notes())
        if self._is_saved(version):
            await self.save()
        run.note_progress()

    def _is_evaluated(self, version: int) -> bool:
        every = self.recipe.evaluate.every
        return version == self.recipe.steps or (every > 0 and version % every == 0)

    def _is_saved(self, version: int) -> bool:
        """In exact mode checkpoints are made between legs."""
        is_due = version == self.recipe.steps or version % self.recipe.checkpoint.every == 0
        return is_due and not self.recipe.exact

    async def _write_notes(self) -> None:
        """Every version trained so far in the metrics and in `progress`, but one that is still being evaluated."""
        if self._unnoted:
            await self.roles.refresh()
        while self._unnoted and self._unnoted[0].is_complete:
            self._note(self._unnoted.popleft())

    def _note(self, trained: _Trained) -> None:
        batches, evaluation = trained.begun.batches, trained.evaluation
        version = trained.begun.version + 1
        metrics = self._measure(trained.begun.groups, batches, trained.seen, trained.at)
        metrics["rejected"] = trained.rejected
        metrics["tied_groups"] = self._tied_groups(trained.begun.groups, version)
        if evaluation is not None:
            metrics |= evaluation.metrics
        keep = self.recipe.observe.keep_rollouts_every
        if keep and (version == self.recipe.steps or version % keep == 0):
            self.observer.keep_rollouts(version, [rollout for batch in batches for rollout in batch.rollouts])
        self.observer.version(version, metrics)

    def _tied_groups(self, groups: list[Group], version: int) -> int:
        """How many; where all are and siblings are compared, there is nothing to learn, which is said once until it changes."""
        count = sum(group.is_tied for group in groups)
        was_tied, self._is_all_tied = self._is_all_tied, count == len(groups)
        if self._is_all_tied and not was_tied and self.recipe.train.fewest_siblings > 1:
            self.observer.screen.say(
                f"version {version}: all {count} groups are tied: within each, every rollout has the same reward, so there is "
                f"nothing to learn; is the reward a constant, or are the tasks far too hard or too easy?"
            )
        return count

    def _measure(self, groups: list[Group], batches: list[Batch], seen: list[dict[str, float]], at: float) -> dict[str, Any]:
        progress, now = self.progress, at
        seconds, self._last_moment = now - self._last_moment, now
        progress.seconds_rl += seconds
        versions = np.concatenate([rollout.versions for batch in batches for rollout in batch.rollouts])
        lags = batches[0].version - versions[versions >= 0]  # all batches are of one version
        rewards = [episode.reward for group in groups for episode in group.episodes if episode.reward is not None]
        tokens, rollouts = len(lags), sum(len(batch.rollouts) for batch in batches)
        progress.trained_tokens += tokens
        progress.lag_sum += float(lags.sum())
        progress.lag_max = max(progress.lag_max, int(lags.max(initial=0)))
        progress.reward_last = float(np.mean(rewards))
        progress.reward_first = progress.reward_last if progress.reward_first is None else progress.reward_first
        names = dict.fromkeys(name for step in seen for name in step)  # a step without a trained token says less
        trainer = {name: float(np.mean([step[name] for step in seen if name in step])) for name in names}
        trainer |= {name: seen[0][name] for name in ("mismatch", "mismatch_max")}  # later steps have moved the weights
        trainer["memory_peak"] = float(self._trainer_peak)
        return {
            "reward": progress.reward_last,
            "reward_std": float(np.std(rewards)),
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "completion_tokens": tokens / rollouts,
            "lag_mean": float(lags.mean()) if len(lags) else 0.0,
            "lag_max": int(lags.max(initial=0)),
            "seconds": seconds,
            "occupancy": self.observer.occupancy,
            "canary": self.run.canary_difference,
            "failed_syncs": self.run.failed_syncs,
            **self._synced(),
            **{f"held/{name}": version for name, version in self.run.roles.versions().items()},
            "engine/memory_peak": self.roles.engine_peak(),
            **{f"train/{name}": value for name, value in trainer.items()},
            **{f"rollouts/{name}": count for name, count in self.run.ledger.counts().items()},
        }

    def _synced(self) -> dict[str, float]:
        """Of the last update the engines took: the bytes that travelled, and what all of the weights would have been."""
        update = self.run.last_sync
        if update is None or "parcel" not in update.place:
            return {}
        return {"sync_bytes": float(str(update.place["parcel"])), "sync_full_bytes": float(update.manifest.total_bytes)}

    def _memory(self) -> dict[str, dict[str, int | None]]:
        """Bytes at the peak, as far as they are known by now; in `inline` mode both are of the one process. What a vLLM server
        takes is its own to say."""
        expected = self.forecast
        trainer, engine = (None, None) if expected is None else (expected.trainer_process, expected.engine_process)
        memory = {"trainer": {"predicted": trainer, "peak": self._trainer_peak}}
        if self.run.recipe.engine.kind == "native":
            memory["engine"] = {"predicted": engine, "peak": self.roles.engine_peak()}
        return memory

    async def _evaluate(self) -> Evaluation | None:
        if not self.held_out:
            return None
        with self.run.trainer_timeline.during("evaluate"):
            await self.run.published()
            # One name whatever the version, for random numbers follow from it; this one keeps those of the first evaluation.
            evaluation = await self.evaluator.run(self.held_out, name="eval0")
        self.run.ledger.evaluation += evaluation.count
        self.samples = evaluation.episodes[:3]
        self.progress.held_out_after = evaluation.metrics
        failed = int(evaluation.metrics["held_out_failed"])
        if failed:
            self.observer.screen.say(
                f"held-out   {failed} of {evaluation.count} rollouts could not be judged; the first: {evaluation.problem}"
            )
        return evaluation

    async def save(self) -> None:
        """A checkpoint of the version just trained; nothing to do if it is saved already."""
        run = self.run
        if run.version == self._saved_version or not run.is_whole:
            return
        await self._write_notes()
        self.progress.wasted_tokens += run.wasted_tokens
        run.wasted_tokens = 0
        unfinished = await run.flight.unfinished(run.pending)  # with the manifest: whatever moves meanwhile is in neither
        manifest = {
            "lineage": self.lineage.id,
            "ancestors": self.lineage.ancestors,
            "config_hash": self.identity,
            "data": run.tasks.state(),
            "submitted_groups": run.submitted_groups,
            "dropped_groups": run.dropped_groups,
            "buffer": run.buffer.state(),
            "in_flight": [[pending.number, pending.task] for pending in run.pending.values()],
            "ledger": run.ledger.state(),
            "progress": dict(vars(self.progress)),
            "random": random_state(),
        }
        try:
            self.checkpoint_folder = await self.store.save(
                run.version,
                write_weights=run.trainer.save,
                groups=run.buffer.groups(),
                unfinished=unfinished,
                manifest=manifest,
            )
        except CheckpointError:
            self._saved_version = run.version  # rescued elsewhere: a second try would fare no better
            raise
        self._saved_version = run.version

    async def save_after_failure(self) -> None:
        """Keep the last version if its weights are whole. In exact mode only a leg's end is a place to resume from: what
        came after it is trained again, bitwise the same."""
        if not self.run.trainer.is_here:
            await self.run.finish_underway()
        if self.run.version and not self.recipe.exact:
            for trained in self._unnoted:
                trained.is_complete = True  # as complete as it will be
            await self.save()

    @property
    def resumes_from(self) -> int:
        """The version the same command goes on from."""
        return max(self._saved_version, 0)

    def summary(self, status: str, *, seconds: dict[str, float]) -> dict[str, Any]:
        """summary.json."""
        progress, run = self.progress, self.run
        before, after = progress.held_out_before or {}, progress.held_out_after
        budget = self.observer.budget()
        role, share = bound_by(budget)
        return {
            "status": status,
            "config_hash": self.identity,
            "steps": self.recipe.steps,
            "version": run.version,
            "success_before": before.get("success"),
            "success_after": after.get("success"),
            "greedy_before": before.get("greedy"),
            "greedy_after": after.get("greedy"),
            "held_out": {"before": before, "after": after},
            "reward_first": progress.reward_first,
            "reward_last": progress.reward_last,
            "seconds": {**seconds, "first_step": progress.first_step, "rl": progress.seconds_rl},
            "tokens": {
                "sampled": progress.trained_tokens + progress.wasted_tokens + run.wasted_tokens + run.waiting_tokens(),
                "trained": progress.trained_tokens,
                "wasted": progress.wasted_tokens + run.wasted_tokens,
            },
            "lag": {"mean": progress.lag_sum / max(progress.trained_tokens, 1), "max": progress.lag_max},
            "skipped_steps": progress.skipped_steps,
            "memory": self._memory(),
            "accounting": run.ledger.counts(),
            "dropped_because": run.ledger.reasons,
            "time_budget": budget,
            "occupancy": self.observer.occupancy,
            "bound_by": role,
            "bound_share": share,
            "checkpoint": None if self.checkpoint_folder is None else str(self.checkpoint_folder),
        }
