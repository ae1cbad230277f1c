"""When a run evaluates: beside training where it may, one at a time, and again what a stop or a failure has lost."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from helpers import small_run

from headrace.config import make_recipe
from headrace.envs import SingleTurn
from headrace.observe import Observer, read_metrics
from headrace.observe.screen import Screen
from headrace.records import Episode, Rollout, Scored
from headrace.run.held_out import HeldOutEvaluations
from headrace.run.metrics import Progress
from headrace.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path


class Said(Screen):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class World:
    """A session of fakes: evaluations run, but end only when they are told to."""

    def __init__(self, *, version: int = 0, progress: Progress | None = None, **settings: Any) -> None:
        self.may_end, self.at_engine, self.most_at_engine = asyncio.Event(), 0, 0
        every = {"evaluate.every": 2, "steps": 8, "engine.slots": 8, "evaluate.greedy": False}
        self.said = Said()
        self.policy = SimpleNamespace(version=version, publication=None, ledger=SimpleNamespace(evaluation=0))
        roles = SimpleNamespace(
            engine=self, encoder=SimpleNamespace(), environment=self, scorer=self, stop_ids=(), refresh=self.nothing
        )
        roles.num_engines = lambda recipe: recipe.engine.num_engines
        self.session: Any = SimpleNamespace(
            recipe=make_recipe(every | settings),
            held_out={"tasks": [{"prompt": str(number)} for number in range(6)]},
            progress=progress or Progress(),
            policy=self.policy,
            roles=roles,
            observer=Observer(screen=self.said),
            run=SimpleNamespace(spawn=self.spawn, note_progress=lambda: None),
            last_moment=0.0,
            samples=(),
            call=self.nothing,
        )
        self.held_out = HeldOutEvaluations(self.session)

    async def nothing(self, *_: object, **__: object) -> None: ...

    def spawn(self, function: Callable[..., Awaitable[None]], *args: Any, **kwargs: Any) -> asyncio.Future[None]:
        return asyncio.ensure_future(function(*args, **kwargs))

    async def run(self, task: dict[str, Any], client: Any) -> Episode:
        await client.generate(Rollout.from_prompt([1], id=client.episode))
        return Episode(id=client.episode, group=client.episode, task=task)

    async def generate(self, rollout: Rollout, sampling: Any) -> Rollout:
        self.at_engine += 1
        self.most_at_engine = max(self.most_at_engine, self.at_engine)
        await self.may_end.wait()
        self.at_engine -= 1
        return rollout

    async def score(self, episodes: Sequence[Episode], *, is_training: bool) -> list[Episode]:
        assert not is_training
        return [episode.replace(outcome=Scored(1.0)) for episode in episodes]

    async def trained(self, version: int) -> None:
        self.policy.version = version
        await self.held_out.after_version(version)

    @property
    def evaluated(self) -> list[str]:
        return [line.rpartition(", ")[2] for line in self.said.lines if line.startswith("held-out")]


async def soon() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_training_goes_on_while_a_share_of_the_slots_evaluates_one_version_at_a_time() -> None:
    world = World()
    await world.trained(2)
    await soon()
    assert world.session.progress.evaluating == 2 and world.at_engine == world.most_at_engine == 2, "a quarter of 8 slots"
    for version in range(3, 8):
        await world.trained(version)
    skipped = [line for line in world.said.lines if "is not evaluated" in line]
    assert len(skipped) == 1 and skipped[0].startswith("version 4 is not evaluated: that of version 2 is not done yet")
    await world.trained(8)
    assert world.session.progress.evaluating == 8, "a checkpoint written now says so"
    last = asyncio.ensure_future(world.held_out.after_loops())
    await soon()
    assert world.most_at_engine == 6, "at the end it gets all slots"
    world.may_end.set()
    await last
    assert world.evaluated == ["version 2", "version 8"] and world.session.progress.evaluating is None
    assert world.policy.ledger.evaluation == 12


WAITS = [
    {"evaluate.beside": False},
    {"orchestrate": "inline"},
    {"exact": True, "staleness.max_lag": 1},
    {"staleness.max_lag": 0, "engine.sleep": "cache"},
]


@pytest.mark.parametrize("settings", WAITS, ids=str)
async def test_the_trainer_waits_where_evaluation_must_not_run_beside_it(settings: dict[str, Any]) -> None:
    world = World(**settings)
    assert [version for version in range(1, 9) if world.held_out.is_waited_for(version)] == [2, 4, 6, 8]
    waiting = asyncio.ensure_future(world.trained(2))
    await soon()
    assert not waiting.done() and world.at_engine == 6
    world.may_end.set()
    await waiting
    assert world.evaluated == ["version 2"]


@pytest.mark.parametrize("version", [0, 5, 8])
async def test_a_resumed_run_makes_again_what_was_lost(version: int) -> None:
    before = {"success": 0.5, "success_low": 0.4, "success_high": 0.6} if version else None
    world = World(version=version, progress=Progress(held_out_before=before, evaluating=version and 4 + version // 2))
    world.may_end.set()
    await world.held_out.before_loops()
    await world.held_out.after_loops()
    await soon()
    assert world.evaluated == [f"version {version}" if version else "before RL"]
    assert world.session.progress.evaluating is None
    assert (world.session.progress.seconds_evaluating > 0) == (version in (0, 8)), "before and after RL"


# In runs


class Breaks(SingleTurn):
    """The n-th evaluation fails, once."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0

    async def run(self, task: dict[str, Any], client: Any) -> Episode:
        if client.episode == "eval/tasks/0/0":
            self.seen += 1
            if self.seen == self.number:
                raise ConfigError("the evaluation broke")
        return await super().run(task, client)


@pytest.mark.parametrize(("number", "version"), [(2, 2), (3, 4)])
def test_an_evaluation_that_failed_is_made_when_the_run_is_resumed(tmp_path: Path, number: int, version: int) -> None:
    settings: dict[str, Any] = {"steps": 4, "evaluate": {"every": 2}, "environment": Breaks(number)}
    with pytest.raises(ConfigError, match="the evaluation broke"):
        small_run(tmp_path / "run", **settings)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["version"] for row in rows if "success" in row] == ([2] if version == 4 else []) and len(rows) == version
    run = small_run(tmp_path / "run", **settings)
    rows = read_metrics(run.folder / "metrics.jsonl")
    assert [row["version"] for row in rows if "success" in row] == [2, 4] and len(rows) == 4
    assert run.summary["accounting"]["evaluation"] == 3 * 8 and run.summary["status"] == "finished"
    assert run.summary["seconds"]["evaluate"] > 0 and run.summary["success_after"] is not None


class Slow(SingleTurn):
    """After the first, an evaluation ends only when two more batches have been sampled, which needs newer versions. The second
    of the first run is interrupted instead."""

    def __init__(self) -> None:
        self.trained, self.evaluations, self.is_interrupted = 0, 0, False

    async def run(self, task: dict[str, Any], client: Any) -> Episode:
        if not client.episode.startswith("eval"):
            episode = await super().run(task, client)
            self.trained += 1
            return episode
        self.evaluations += client.episode == "eval/tasks/0/0"
        if self.evaluations == 1:
            return await super().run(task, client)
        if not self.is_interrupted:
            self.is_interrupted = True
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        started = self.trained
        while self.trained < started + 3 * 16 and self.evaluations < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await super().run(task, client)


@pytest.mark.long
def test_processes_evaluate_beside_training_and_again_after_an_interrupt(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"environment": Slow(), "orchestrate": "local", "steps": 12, "evaluate": {"every": 3}}
    with pytest.raises(KeyboardInterrupt):
        small_run(tmp_path / "run", **settings)
    run = small_run(tmp_path / "run", **settings)
    found = {row["version"]: row for row in read_metrics(run.folder / "metrics.jsonl") if "success" in row}
    again = min(found)
    assert 3 <= again < 12 and 12 in found, "the interrupted one was made again, of the version resumed from"
    assert found[again]["held_out_version_min"] >= again
    assert found[again]["held_out_version_max"] > again, "the trainer did not wait for it"
    assert found[12]["held_out_version_min"] == found[12]["held_out_version_max"] == 12
    assert run.summary["time_budget"]["trainer"]["evaluate"] == 0
    assert run.summary["accounting"]["evaluation"] == 8 * (1 + len(found)) and run.summary["accounting"]["in_flight"] == 0
    assert run.summary["accounting"]["submitted"] == sum(
        run.summary["accounting"][state] for state in ("trained", "rejected", "failed", "filtered", "unused")
    )
