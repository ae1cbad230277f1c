"""What happens between versions: checkpoints are written beside training, in order, and none is lost when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from stubbed import make_roles

from headrace.bench.stubs import InstantEngine, StubTrainer
from headrace.config import make_recipe
from headrace.durable import seal
from headrace.observe import Observer
from headrace.run import MANIFEST, Change, Checkpoint, CheckpointStore, Session, summarize
from headrace.run.checkpoint import CheckpointError
from headrace.sync import Lineage
from headrace.trainer.remote import Answer

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.durable import Fingerprints
    from headrace.records import Batch
    from headrace.trainer import Published

STEPS, EVERY = 8, 2


class Trainer(StubTrainer):
    """As in another process: calls start at once and run in order. A save takes until `later` more steps were asked for."""

    def __init__(self, lineage: Lineage, *, later: int) -> None:
        super().__init__(lineage, is_inline=False)
        self.later = later
        self.full: Path | None = None
        """A disk that takes nothing more."""
        self.asked: list[tuple[str, int]] = []
        """Folder and steps so far of each save."""
        self.stepped = asyncio.Event()

    def step(self, batch: Batch, *, learning_rate: float) -> Answer[dict[str, float]]:  # type: ignore[override]
        self.num_steps += batch.is_last
        self.stepped.set()
        return Answer(self._step())

    async def _step(self) -> dict[str, float]:
        await asyncio.sleep(0.001)
        return {"loss": 0.0, "mismatch": 0.0, "mismatch_max": 0.0}

    def publish(self, version: int, **arguments: Any) -> Answer[Published]:  # type: ignore[override]
        return Answer(super().publish(version, **arguments))

    def save(self, folder: Path) -> Answer[Fingerprints]:  # type: ignore[override]
        self.asked.append((folder.name, self.num_steps))
        return Answer(self._save(folder, until=min(self.num_steps + self.later, STEPS)))

    async def _save(self, folder: Path, *, until: int) -> Fingerprints:
        while self.num_steps < until:
            self.stepped.clear()
            await asyncio.wait_for(self.stepped.wait(), 10)  # that long only if training waits for this
        if self.full is not None and self.full in folder.parents:
            self.later = 0  # the run ends, and no step will follow
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def write() -> Fingerprints:
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_text(f"after {until} steps")
            return seal(folder)

        return await asyncio.to_thread(write)


def make_session(folder: Path, *, later: int, **settings: Any) -> tuple[Session, Trainer]:
    recipe = make_recipe(
        {
            "steps": STEPS,
            "sampling": {"max_tokens": 4},
            "engine": {"slots": 8},
            "staleness": {"max_lag": 2},
            "train": {"batch": 8, "group_size": 4},
            "sync": {"canary_limit": 1e9},
            "checkpoint": {"every": EVERY},
            "observe": {"keep_rollouts_every": 2},
            **settings,
        }
    )
    lineage = Lineage.new()
    trainer = Trainer(lineage, later=later)
    prompts = [str(number) for number in range(7)]
    roles = make_roles(recipe, InstantEngine(tokens=3), trainer, reward=length, prompts=prompts)
    store = CheckpointStore(folder / "checkpoints", rescue=folder / "rescue", keep=10, in_threads=True)
    session = Session(
        recipe=recipe,
        roles=roles,
        lineage=lineage,
        observer=Observer(folder),
        store=store,
        held_out={},
        command_started=time.perf_counter(),
        identity="test",
    )
    return session, trainer


def length(completion: str, log_metric: Any, **_: object) -> float:
    log_metric("sevens", 7)
    return float(len(completion))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


async def test_training_goes_on_while_checkpoints_are_written_in_order(tmp_path: Path) -> None:
    session, trainer = make_session(tmp_path, later=EVERY)
    await asyncio.wait_for(session.train(), 30)
    assert trainer.asked == [(f".step-{version}.tmp", version) for version in (2, 4, 6, 8)], "after exactly its own steps"
    assert names(tmp_path / "checkpoints") == [f"step-{version}" for version in (2, 4, 6, 8)]
    found = session.store.latest(warn=print)
    assert found is not None and found.version == session.resumes_from == STEPS
    assert found.manifest["progress"]["trained_tokens"] == STEPS * 8 * 3
    assert names(tmp_path / "rollouts") == [f"step-{version}.wire" for version in (2, 4, 6, 8)]
    summary = summarize(session, "finished", seconds={})
    assert summary["checkpoint"] == str(tmp_path / "checkpoints" / "step-8")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {row["logged/sevens"] for row in rows if "logged/sevens" in row} == {7.0}


def test_a_checkpoint_shows_the_moment_when_it_was_begun(tmp_path: Path) -> None:
    """Although it is written when training has moved on: its books close, with what waited and was in flight then."""

    async def main() -> None:
        session, _ = make_session(tmp_path, later=EVERY)
        await asyncio.wait_for(session.train(), 30)
        session.observer.close()

    asyncio.run(main())
    for version in (2, 4, 6):
        folder = tmp_path / "checkpoints" / f"step-{version}"
        session, _ = make_session(tmp_path, later=0)
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["progress"]["logged"] |= {"eights": [8.0, 1]}  # by rewards since the version, for the metrics of the next
        asyncio.run(session.restore(Checkpoint(folder, manifest)))
        session.progress.log({"eights": [16.0, 2], "nines": [9.0, 1]})
        assert session.progress.logged["eights"] == [24.0, 3] and session.progress.logged["nines"] == [9.0, 1]
        session.policy.ledger.check()
        counts = session.policy.ledger.counts()
        assert counts["trained"] == version * 8 and counts["buffered"] + counts["in_flight"] > 0
        session.observer.close()


def change_during(session: Session, trainer: Trainer, step: int, **change: Any) -> None:
    """As an evaluation's callback does, which runs beside training: when the next batch is waited for, or sent."""
    numbers = itertools.count(1)

    async def _step() -> dict[str, float]:
        if next(numbers) == step:
            await asyncio.sleep(0.05)
            session._change(Change(by="test", **change))
        return {"loss": 0.0, "mismatch": 0.0, "mismatch_max": 0.0}

    trainer._step = _step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("max_lag", "groups", "asked", "steps"), [(0.5, 2, 3, 3), (0.5, 2, 1, 3), (0.5, 4, 3, 4), (2, 2, 3, 4)]
)
async def test_a_run_shortened_during_a_step_ends_after_what_is_begun(tmp_path: Path, max_lag, groups, asked, steps) -> None:
    """Of the next batch nothing is there when it is waited for, or a part, or all of it is sent already."""
    more: dict[str, Any] = {"train": {"batch": 4 * groups, "group_size": 4, "stream_parts": groups // 2}}
    session, trainer = make_session(tmp_path, later=0, checkpoint={"every": 100}, staleness={"max_lag": max_lag}, **more)
    change_during(session, trainer, 3 if groups == 2 else 5, key="steps", value=asked)
    await asyncio.wait_for(session.train(), 5)
    assert (session.policy.version, session.recipe.steps, session.changes[0].value) == (steps, steps, steps)
    assert session.resumes_from == steps


async def test_a_checkpoint_wanted_only_when_the_next_batch_is_with_the_trainer_is_not_written(tmp_path: Path) -> None:
    """It would have the weights after that batch."""
    session, trainer = make_session(tmp_path, later=0, checkpoint={"every": 100})
    change_during(session, trainer, 3, key="checkpoint.every", value=3)
    await asyncio.wait_for(session.train(), 30)
    assert trainer.asked == [(".step-6.tmp", 6), (".step-8.tmp", 8)]


async def test_a_checkpoint_that_fails_beside_training_ends_the_run_and_the_newest_version_is_rescued(tmp_path: Path) -> None:
    session, trainer = make_session(tmp_path, later=1)
    trainer.full = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        await asyncio.wait_for(session.train(), 30)
    await session.save_after_failure()  # as the launcher does, whatever failed: there is nothing left to save
    message = str(caught.value)
    version = session.policy.version
    assert 2 < version < STEPS and version == trainer.num_steps == session.resumes_from
    assert f"Nothing is lost: it is in {tmp_path / 'rescue' / f'step-{version}'}" in message
    assert names(tmp_path / "rescue") == [f"step-{version}"] and names(tmp_path / "checkpoints") == []
    found = session.store.latest(warn=print)
    assert found is not None and (found.folder / "model.safetensors").read_text() == f"after {version} steps"


async def test_a_disk_that_works_again_gets_the_newest_version_and_the_run_still_says_what_failed(tmp_path: Path) -> None:
    session, trainer = make_session(tmp_path, later=1)
    trainer.full = tmp_path / "checkpoints"
    really = trainer._save

    async def once(folder: Path, **until: Any) -> Fingerprints:
        try:
            return await really(folder, **until)
        finally:
            trainer.full = None

    trainer._save = once  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"version 2 could not be written.*Earlier ones are untouched"):
        await asyncio.wait_for(session.train(), 30)
    assert names(tmp_path / "checkpoints") == [f"step-{session.policy.version}"] and session.resumes_from > 2
    assert not names(tmp_path / "rescue")


async def test_a_failure_of_any_kind_to_write_an_earlier_version_does_not_keep_the_newest_from_the_disk(tmp_path: Path) -> None:
    session, trainer = make_session(tmp_path, later=1)
    really = trainer._save

    async def once(folder: Path, **until: Any) -> Fingerprints:
        await really(folder, **until)
        trainer._save, trainer.later = really, 0  # type: ignore[method-assign]
        raise RuntimeError("the trainer has no memory left")

    trainer._save = once  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory left"):
        await asyncio.wait_for(session.train(), 30)
    await session.save_after_failure()  # as the launcher does
    version = session.policy.version
    assert 2 < version < STEPS and version == session.resumes_from
    assert names(tmp_path / "checkpoints") == [f"step-{version}"] and not names(tmp_path / "rescue")


async def test_a_disk_slower_than_the_deadline_is_no_stall(tmp_path: Path, monkeypatch) -> None:
    """While version 2 is written, the clock of the deadline moves on by 30 times the deadline; training waits at version 4."""
    deadline, now = 0.02, 0.0
    monkeypatch.setattr("headrace.run.state.time", SimpleNamespace(monotonic=lambda: now))
    session, trainer = make_session(tmp_path, later=EVERY, deadline=deadline)
    really = trainer._save

    async def slowly(folder: Path, **until: Any) -> Fingerprints:
        nonlocal now
        trainer._save = really  # type: ignore[method-assign]
        written = await really(folder, **until)
        for _ in range(40):
            now += 0.75 * deadline
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    while session.run.progressed_at < now:  # noqa: ASYNC110  (it raises no event)
                        await asyncio.sleep(0.001)
        return written

    trainer._save = slowly  # type: ignore[method-assign]
    await asyncio.wait_for(session.train(), 30)
    assert session.policy.version == STEPS
    assert names(tmp_path / "checkpoints") == [f"step-{version}" for version in (2, 4, 6, 8)]
