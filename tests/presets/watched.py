"""Runs of a preset, and what they did: each submission, each batch, each rollout trained. `run_preset` is a small real run in
one process; `simulate` runs the real loops over an engine and a trainer that only take turns of the event loop."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from helpers import SMALL, length_reward, small_run
from stubbed import make_roles

from headrace.bench.loads import finished
from headrace.bench.stubs import InstantEngine, StubTrainer, drive, make_run
from headrace.buffer import GroupBuffer
from headrace.config import make_recipe
from headrace.engine import InFlight
from headrace.observe import Observer
from headrace.observe.inspect import read_rollouts
from headrace.records import FinishReason
from headrace.run import POLICY
from headrace.run.policy import PolicyState
from headrace.run.state import Run
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from headrace.buffer import Group
    from headrace.launch.launcher import RunResult
    from headrace.records import Batch, Rollout, Sampling
    from headrace.run import StartedBatch
    from headrace.tasks import Task

GROUPS, SIBLINGS = 4, 2
"""Groups of a batch, and rollouts of a group."""
LONG_TAIL: dict[str, Any] = {
    "model": {"context": 128},
    "sampling": {"max_tokens": 96},
    "engine": {"slots": 16},
    "train": {"batch": GROUPS * SIBLINGS, "group_size": SIBLINGS},
    "observe": {"keep_rollouts_every": 1},
    "checkpoint": {"every": 100},
}
"""An untrained model ends a rollout by chance: most are short, a few are long."""


@dataclass(frozen=True)
class Submission:
    """What a policy held just after it submitted a group."""

    version: int
    held_version: int
    submitted: int
    dropped: int
    waiting: int
    """Groups in the buffer."""
    running: int
    """Groups in flight, this one included."""
    in_training: int
    unfinished: int
    """Episodes in flight that have not ended."""
    prompt: str

    @property
    def ahead(self) -> int:
        """Groups submitted and neither dropped nor part of the version that the engines hold."""
        return self.submitted - self.dropped - self.held_version * GROUPS


@dataclass
class Watched:
    """What was seen of a run."""

    submissions: list[Submission] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    """Numbers of the groups that left the buffer together: of a batch, or of a mini-batch if these leave one by one."""
    trained: list[tuple[int, Rollout]] = field(default_factory=list)
    """(the version it was trained at, the rollout) of each."""
    num_steps: int = 0
    """Of the optimizer."""
    counts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    """Rollouts that were not trained, by why."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Of each version of a real run."""

    @property
    def spanning(self) -> list[Rollout]:
        """Those trained that several versions sampled."""
        return [rollout for _, rollout in self.trained if len(versions_of(rollout)) > 1]

    @property
    def lags(self) -> list[int]:
        """Of each rollout's oldest token."""
        return [version - versions_of(rollout)[0] for version, rollout in self.trained]

    @property
    def num_retried(self) -> int:
        """Tasks that were submitted again, in a simulation, which has enough for all."""
        prompts = [each.prompt for each in self.submissions]
        return len(prompts) - len(set(prompts))

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        submit, take = PolicyState.submit, GroupBuffer.take

        def submitting(policy: PolicyState, task: Task, **options: Any) -> Any:
            episodes = submit(policy, task, **options)
            in_flight = policy.in_flight.groups.values()
            self.submissions.append(
                Submission(
                    version=policy.version,
                    held_version=policy.held_version,
                    submitted=policy.submitted_groups,
                    dropped=policy.dropped_groups,
                    waiting=len(policy.buffer),
                    running=len(in_flight),
                    in_training=sum(len(started.groups) for started in policy.started),
                    unfinished=sum(record.ended is None for group in in_flight for record in group.episodes),
                    prompt=task.row["prompt"],
                )
            )
            return episodes

        def taking(buffer: GroupBuffer) -> list[Group]:
            taken = take(buffer)
            self.batches.append([group.number for group in taken])
            return taken

        patch.setattr(PolicyState, "submit", submitting)
        patch.setattr(GroupBuffer, "take", taking)


def versions_of(rollout: Rollout) -> list[int]:
    return sorted(set(rollout.versions[rollout.is_sampled].tolist()))


def has_resumed(rollout: Rollout) -> bool:
    """Whether a call was aborted, and the rollout went on in another."""
    return len(rollout.calls) > 1 and rollout.calls[0].finish_reason is FinishReason.ABORT


def _settings(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"preset": name, "steps": 10, **changes}
    for key, value in LONG_TAIL.items():
        settings[key] = {**value, **changes.get(key, {})}
    return settings


def run_preset(
    name: str, folder: Path, patch: pytest.MonkeyPatch, *, watched: Watched | None = None, **changes: Any
) -> Watched:
    """Train a few versions for real, in one process, with the preset's settings and `changes`."""
    watched = watched or Watched()
    with patch.context() as patched:
        watched.watch(patched)
        result: RunResult = small_run(folder, **{"held_out": None, **_settings(name, changes)})
    summary = result.summary
    watched.counts, watched.reasons = summary["accounting"], summary["dropped_because"]
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    watched.metrics = [row for row in rows if "train/loss" in row]
    watched.trained = [
        (step - 1, rollout) for step in range(1, summary["version"] + 1) for rollout in read_rollouts(folder, step)[1]
    ]
    assert summary["status"] == "finished" and summary["lag"]["max"] == max(watched.lags)
    return watched


class TailEngine(InstantEngine):
    """Samples a token of every rollout in each turn of the event loop. Most rollouts are short, a few are long. `last_only`:
    only the last token of each is trained."""

    def __init__(self, *, longest: int, last_only: bool) -> None:
        super().__init__()
        self._last_only = last_only
        self._random, self._longest = np.random.default_rng(0), longest
        self._started: dict[str, tuple[Rollout, list[int]]] = {}

    async def generate(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        count = int(min(1 + self._random.lognormal(2.0, 1.2), self._longest))
        versions: list[int] = []
        self._started[rollout.id] = (rollout, versions)
        try:
            while len(versions) < count:
                await asyncio.sleep(0)
                versions.append(self._version)
        finally:
            del self._started[rollout.id]
        token_ids = np.full(count, 10 + count % 7)
        done = finished(rollout, token_ids, version=versions, lineage=self._lineage, sampling=sampling)
        return done.replace(loss_mask=np.arange(len(done)) == len(done) - 1) if self._last_only else done

    async def in_flight(self) -> list[InFlight]:
        def known(rollout: Rollout, versions: list[int]) -> InFlight:
            first = versions[0] if versions else -1
            return InFlight.of(rollout, num_sampled=len(versions), first=first, partial=lambda: rollout)

        return [known(*started) for started in self._started.values()]


class TurnsTrainer(StubTrainer):
    """A step takes some turns of the event loop."""

    def __init__(self, lineage: Lineage, *, turns: int) -> None:
        super().__init__(lineage)
        self._turns = turns

    async def step(self, batch: Batch, *, learning_rate: float) -> dict[str, float]:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        return await super().step(batch, learning_rate=learning_rate)


def simulate(
    name: str,
    patch: pytest.MonkeyPatch,
    *,
    reward: Callable[..., float] = length_reward,
    step_turns: int = 10,
    last_only: bool = False,
    **changes: Any,
) -> Watched:
    """Run the loops with the preset's settings and `changes`, without a model."""
    changes = {"sync": {"canary_limit": 1e9}, "steps": 30, "orchestrate": "inline", **changes}  # a stub has no logprobs
    recipe = make_recipe({**SMALL, **_settings(name, changes)})
    watched, lineage = Watched(), Lineage.new()
    trainer = TurnsTrainer(lineage, turns=step_turns)
    prompts = [str(number) for number in range(2000)]
    engine = TailEngine(longest=recipe.sampling.max_tokens, last_only=last_only)
    roles = make_roles(recipe, engine, trainer, reward=reward, prompts=prompts)

    async def after_version(policy: PolicyState) -> None: ...

    def on_trained(policy: PolicyState, started: StartedBatch) -> None:
        watched.trained += [(started.version, rollout) for rollout in started.rollouts]

    async def on_end() -> None: ...

    async def main() -> None:
        given = (recipe, roles, lineage, Observer())
        run = make_run(Run, *given, versions=recipe.steps, after_version=after_version, on_trained=on_trained)
        await asyncio.wait_for(drive(run, on_end=on_end), 60)
        ledger = run.policies[POLICY].ledger
        ledger.check()
        watched.counts, watched.reasons, watched.num_steps = ledger.counts(), dict(ledger.reasons), trainer.num_steps

    with patch.context() as patched:
        watched.watch(patched)
        asyncio.run(main())
    return watched
