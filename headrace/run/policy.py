"""The state of one policy: its version, its trainer and the batches in training, and what a checkpoint has of it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from typing import TYPE_CHECKING, Any

from headrace.buffer import Group, JournalError
from headrace.run.batches import (
    StartedBatch,
    StepParts,
    TermWeights,
    adapt_weights,
    batch_to_score,
    columns_first,
    make_batches,
    part_sizes,
    term_metrics,
    with_column,
)
from headrace.run.in_flight import GroupInFlight
from headrace.run.metrics import SkippedSteps
from headrace.run.policy_groups import PolicyGroups
from headrace.tasks import Task
from headrace.trainer import learning_rate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from headrace.config import Recipe
    from headrace.observe import Observer, Signal
    from headrace.run.checkpoint import Checkpoint
    from headrace.run.state import Roles
    from headrace.sync import Lineage

log = logging.getLogger(__name__)


class PolicyState(PolicyGroups):
    """Everything a run keeps per policy. The loops decide when it changes."""

    def __init__(self, name: str, recipe: Recipe, roles: Roles, *, lineage: Lineage, observer: Observer, room: Signal) -> None:
        super().__init__(name, recipe, roles, lineage=lineage, observer=observer, room=room)
        self.trainer = roles.trainers[name]
        self._reward_weights = roles.scorer.weights
        rollouts = tuple(rollout.replace(policy=name) for rollout in roles.canary.rollouts)
        self.canary = dataclasses.replace(roles.canary, rollouts=rollouts)
        self.publication: asyncio.Task[None] | None = None
        """The delivery of the newest version to the engines."""
        self.sync_metrics: dict[str, float] = {"canary": 0.0, "failed_syncs": 0}
        """Of the last update: mean |Δ logprob| between engine and trainer, bytes sent, bytes of all the weights. `failed_syncs`
        counts updates that an engine rejected and that were sent again."""
        self.term_weights = TermWeights(recipe.train.kl, recipe.train.entropy)
        """Of KL and entropy bonus, before the next version."""
        self.has_whole_version = True
        """The trainer's weights are exactly `version`, not between two versions."""
        is_elsewhere = not self.trainer.is_inline
        self.skipped = SkippedSteps(limit=recipe.train.max_skipped, observer=observer, in_thread=is_elsewhere)
        self._sizes = part_sizes(self.buffer.batch, recipe)
        self._parts_per_step = max(1, len(self._sizes) // recipe.train.mini_batches)
        self.buffer.want(self._sizes[0])

    # Training

    async def start_batch(
        self, version: int, recipe: Recipe, *, on_taken: Callable[[int, Sequence[Group]], Awaitable[None]]
    ) -> StartedBatch | None:
        """Take a batch from the buffer, or its next part, and send its steps to the trainer; all calls are sent when this
        returns. None if parts are left, or a group could not be read back from the disk. `recipe`: the settings when the batch
        was due; `on_taken` is called before the trainer gets anything."""
        trainer = self.trainer
        started = self.unfinished or StartedBatch(version, [], steps_before=trainer.num_steps, left=list(self._sizes))
        left = list(started.left)
        groups = await self._load(started, self._take(started), left=left)
        if not groups:
            return None
        await on_taken(version, groups)
        weights = next((ahead.following for ahead in reversed(self.started) if ahead.following), self.term_weights)
        for name in columns_first(groups, recipe):  # each step's forward pass computes the others
            batch = batch_to_score(groups, recipe, version=version)
            self._note_sent()
            groups = with_column(groups, name, await trainer.forward(batch, column=name))
        used, started.following = adapt_weights(groups, recipe, weights)
        started.scored += groups
        how: dict[str, Any] = {"weights": used, "reward_weights": self._reward_weights, "ends_version": not started.left}
        if len(self._sizes) > 1:
            how |= {"step": started.step, "ends_step": not self._left_of_step(started)}
        batches = make_batches(groups, recipe, version=version, **how)
        rate = learning_rate(recipe.train, version=version, steps=recipe.steps)
        started.batches += batches
        self._note_sent()
        started.steps += [trainer.step(batch, learning_rate=rate) for batch in batches]
        self._room.set()  # a version with a step made must become whole, even if a stop came meanwhile
        if started.left:
            return None
        started.term_metrics = term_metrics(started.scored, used, recipe, version=version)
        if not trainer.is_inline:
            started.publishing = trainer.publish(version + 1, canary=self.canary)
        return started

    def _note_sent(self) -> None:
        if self.pace is not None:
            self.pace.batch_sent()

    def _left_of_step(self, started: StartedBatch) -> list[int]:
        """The sizes of the parts that the optimizer step still lacks; none if one has just become whole."""
        return started.left[: len(started.left) % self._parts_per_step]

    def _take(self, started: StartedBatch) -> list[Group]:
        """All parts of a step that are there, at least one."""
        sizes = self._left_of_step(started)
        if not sizes:  # of the next step
            sizes = started.left[: self._parts_per_step]
            started.step = StepParts(sum(sizes))
        totals = itertools.accumulate(sizes)
        there = [size for size, total in zip(sizes, totals, strict=True) if total <= self.buffer.num_available]
        self.buffer.want(sum(there))
        taken = self.buffer.take()
        if not started.groups:
            self.started.append(started)  # what the next batch waits for may depend on it
        started.groups += taken
        started.is_waiting = False
        del started.left[: len(there)]
        if not started.left:
            started.filtered, self.filtered = self.filtered, []
        self.buffer.want((started.left or self._sizes)[0])
        self._room.set()
        return taken

    async def _load(self, started: StartedBatch, taken: list[Group], *, left: list[int]) -> list[Group]:
        """Read what waited on disk of the groups just taken. If some cannot be read, it counts as failed, the others go back to
        where they were, and the result is empty; the parts that are then to come were `left` before."""
        if all(group.stored is None for group in taken):
            return taken
        found = self.buffer.load(taken) if self.trainer.is_inline else await asyncio.to_thread(self.buffer.load, taken)
        for group in taken:  # not in the thread: if this task is cancelled, they are put back as they were
            group.leave_disk()
        loaded, before = [group for group in found if isinstance(group, Group)], started.groups[: -len(taken)]
        if len(loaded) == len(taken):
            started.groups = before + loaded
            return loaded
        started.groups, started.left = before, left
        if not before:
            self.started.remove(started)
        self.filtered, started.filtered = started.filtered + self.filtered, []
        self.buffer.want(left[0])
        self.buffer.put_back(loaded)
        for group, problem in zip(taken, found, strict=True):
            if isinstance(problem, JournalError):
                log.warning("group %d is lost: %s", group.number, problem)
                self._lose(group)
        return []

    def settle_trained(self, started: StartedBatch) -> None:
        """The next version is trained."""
        self.version += 1
        self.term_weights = started.following or self.term_weights
        self._dropped_in_a_row = 0
        self.started.remove(started)
        for group in started.groups:
            self.lengths.trained(group.number)
            self.retries.forget(group.number)
        self.ledger.settle("trained", sum(group.num_episodes for group in started.groups))
        self.ledger.check()
        taken = sum(len(following.groups) for following in self.started)
        if self.pace is not None and self.pace.trained(
            num_complete=(self.buffer.num_available + taken) // self._units, is_busy=bool(self.started)
        ):
            self.renew_gate()
        self._tasks.hand_over()  # calls a user's sampler, which may raise

    def return_groups(self, failure: BaseException | None = None) -> None:
        """Put the groups in training back into the buffer in order, so that a checkpoint written now is complete. If something
        else than a step failed, a version whose steps are all sent to another process stays: `Run.finish_started` waits for
        them."""
        is_elsewhere = failure is not None and not any(started.has_failed for started in self.started)
        kept = [started for started in self.started if is_elsewhere and started.publishing is not None]
        returned = [started for started in self.started if started not in kept]
        for started in reversed(returned):
            started.drop_steps()
            self.buffer.put_back(started.groups)
            self.filtered = started.filtered + self.filtered
        if returned:
            self.has_whole_version = self.trainer.num_steps == returned[0].steps_before
        self.started = kept

    async def published(self) -> None:
        """Wait until every engine holds the newest version."""
        if self.publication is not None:
            await self.publication
            self.publication = None

    # Checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "lineage": self.lineage.id,
            "ancestors": self.lineage.ancestors,
            "submitted_groups": self.submitted_groups,
            "dropped_groups": self._num_dropped,
            "in_flight": [[group.number, *dataclasses.astuple(group.task)] for group in self.in_flight.groups.values()],
            "held_at_submission": {str(group.number): group.held_version for group in self.in_flight.groups.values()},
            "retries": self.retries.state(),
            "siblings": {
                str(group.number): [[record.index for record in group.episodes], group.rewards]
                for group in self.in_flight.groups.values()
                if len(group.episodes) < self.recipe.train.group_size
            },
            "filtered": list(self.filtered),
            "ledger": self.ledger.state(),
            "term_weights": list(self.term_weights),
            "lag_controller": None if self.pace is None else self.pace.controller.state(),
        }

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint, including what was in flight."""
        manifest = checkpoint.manifest
        await self.trainer.load(checkpoint.folder)
        self.version = self.held_version = checkpoint.version
        self.term_weights = TermWeights(*manifest["term_weights"])
        self.submitted_groups, self._num_dropped = manifest["submitted_groups"], manifest["dropped_groups"]
        self.filtered = manifest["filtered"]
        self.retries.restore(manifest["retries"])
        self.ledger.restore(manifest["ledger"])
        await self.recovered.find()
        waiting = list[GroupInFlight]()
        held = manifest.get("held_at_submission", {})
        for number, *task in manifest["in_flight"]:  # before what is buffered, which may have to wait for it
            indexes, rewards = manifest.get("siblings", {}).get(str(number), (None, []))
            waiting.append(self._add_group(number, Task(*task), indexes=indexes))
            waiting[-1].rewards, waiting[-1].held_version = rewards, held.get(str(number), 0)
        for group in checkpoint.buffered():
            if not group.episodes:
                self._lose(group)
                continue
            if self.recipe.staleness.retries:
                self.retries.keep(group.number, Task(group.episodes[0].task, group.source, group.index))
            self.buffer.put(group, place=self.recovered.place(group))
        self._keep_recovered()
        for of_checkpoint in waiting:
            await self.read_ahead(of_checkpoint.number)
            self._take_recovered(of_checkpoint)
        self.wasted_tokens += self.in_flight.restore(
            checkpoint.in_flight(), version=self.version, lineage=self.lineage, rejection=self.rejection
        )
        if self.pace is not None and manifest["lag_controller"]:
            self.pace.controller.restore(manifest["lag_controller"])
            self.renew_gate()

    def _keep_recovered(self) -> None:
        """Of what the journal has, keep what this run has still to submit or has in flight, and may train."""
        due = {self.in_flight.number(record) for record in self.in_flight.episodes()}
        first, rejection = self.submitted_groups * self._units, self.rejection

        def is_wanted(group: Group) -> bool:
            is_due = group.number >= first or group.number in due
            return is_due and rejection.reason(group, version=self.version, lineage=self.lineage) is None

        self.recovered.keep(is_wanted)
