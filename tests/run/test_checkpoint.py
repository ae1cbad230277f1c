"""Checkpoints on disk: which are kept, which are whole, and what happens when a write or a read fails."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import errno
import faulthandler
import io
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from helpers import length_reward
from stubbed import make_roles

from headrace.bench.stubs import InstantEngine, StubTrainer, answer
from headrace.buffer import Group
from headrace.cli import _token_text
from headrace.config import make_recipe
from headrace.durable import seal
from headrace.envs import PromptEncoder, SingleTurn
from headrace.launch.inputs import UserInputs, open_tasks
from headrace.model import build_tokenizer
from headrace.observe import Observer, Signal
from headrace.records import Episode, frames
from headrace.run import POLICY, PolicyState, Roles, make_canary
from headrace.run.checkpoint import CheckpointError, CheckpointStore
from headrace.score import RewardFunction, RewardScorer
from headrace.score.watchdog import Watchdog
from headrace.sync import Lineage

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from headrace.durable import Fingerprints


class Store:
    """A run's checkpoints, and weights that can fail to be written."""

    def __init__(self, folder: Path, *, keep: int = 1, in_threads: bool = True) -> None:
        self.folder, self.rescue = folder / "checkpoints", folder / "rescue"
        self.store = CheckpointStore(self.folder, rescue=self.rescue, keep=keep, in_threads=in_threads)
        self.said: list[str] = []
        self.full: Path | None = None
        """A disk that takes nothing more."""

    def save(self, version: int) -> Path:
        return asyncio.run(self.saving(version))

    def saving(self, version: int, **more: Any) -> Coroutine[Any, Any, Path]:
        def write(folder: Path) -> Fingerprints:
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(b"weights %d" % version)
            if self.full is not None and self.full in folder.parents:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return seal(folder)

        given: dict[str, Any] = {"buffered": (), "in_flight": (), "manifest": {}, **more}
        return self.store.save(version, write_weights=lambda folder: asyncio.to_thread(write, folder), **given)

    def latest(self) -> int | None:
        found = self.store.latest(warn=self.said.append)
        return None if found is None else found.version

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture(params=[True, False], ids=["in threads", "inline"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    return Store(tmp_path, in_threads=request.param)


def test_a_rescued_checkpoint_prunes_none(run: Store) -> None:
    """With `keep = 1` the only good one would go, and nothing but the cache folder would be left."""
    run.save(3)
    run.full = run.folder
    with pytest.raises(CheckpointError, match="earlier ones are untouched"):
        run.save(6)
    assert run.names() == {"step-3"} and run.latest() == 6
    run.full = None
    run.save(9)
    assert run.names() == {"step-9"} and run.latest() == 9


def test_folders_of_other_names_are_the_users(run: Store) -> None:
    for name in ("step-100-best", "step-", "step-x", "my-step-7"):
        (run.folder / name).mkdir(parents=True)
    (run.folder / "step-8").write_text("a note")
    assert run.latest() is None and _token_text(run.folder.parent) is str
    run.save(3)
    run.save(6)
    assert run.latest() == 6 and not run.said
    assert run.names() == {"step-100-best", "step-", "step-x", "my-step-7", "step-8", "step-6"}


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
def test_a_read_that_fails_is_no_damage(run: Store, monkeypatch, file: str) -> None:
    run.save(3)
    really = io.open

    def failing(path, *arguments, **options):
        if isinstance(path, Path) and path.name == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return really(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", failing)
        patch.setattr(builtins, "open", failing)
        with pytest.raises(CheckpointError, match=rf"step-3 cannot be read: .*Input/output.*{file}.*the same command again"):
            run.latest()
    assert run.names() == {"step-3"} and not run.said
    assert run.latest() == 3


@pytest.mark.parametrize("fault", ["changed", "missing", "no manifest", "no json", "no files", "another format"])
def test_damage_is_set_aside_and_an_older_one_taken(tmp_path: Path, fault: str) -> None:
    run = Store(tmp_path, keep=2)
    run.save(3)
    folder = run.save(6)
    manifest = folder / "manifest.json"
    if fault == "changed":
        (folder / "model.safetensors").write_bytes(b"weights 7")
    elif fault == "missing":
        (folder / "model.safetensors").unlink()
    elif fault == "no manifest":
        manifest.unlink()
    else:
        texts = {"no json": "{", "no files": '{"format": 1}', "another format": '{"format": 9, "files": {}}'}
        manifest.write_text(texts[fault])
    assert run.latest() == 3
    assert len(run.said) == 1 and "step-6 is damaged" in run.said[0]
    assert {name.rpartition("-")[0] for name in run.names()} == {"step", "damaged-step-6"}


def test_the_old_one_goes_only_when_the_new_one_is_whole(run: Store, monkeypatch) -> None:
    """Nothing is removed while the new one is written, synced and renamed."""
    run.save(3)
    there: list[bool] = []
    really = Path.rename

    def rename(self: Path, target: Path) -> Path:
        there.append((run.folder / "step-3" / "model.safetensors").exists())
        return really(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    run.save(6)
    assert there == [True] and run.names() == {"step-6"}
    run.full = run.folder
    monkeypatch.setattr(run.store, "_rescue", run.folder / "also-full")
    with pytest.raises(CheckpointError, match="No space"):
        run.save(9)
    assert "step-6" in run.names() and run.latest() == 6


def test_if_neither_disk_has_room_both_are_named_and_nothing_is_said_to_be_rescued(run: Store) -> None:
    run.save(3)
    run.full = run.folder.parent
    with pytest.raises(CheckpointError, match="No space") as caught:
        run.save(6)
    said = str(caught.value)
    assert f"could not be written to {run.folder}: " in said and f"Nor to {run.rescue}: " in said and "HEADRACE_CACHE" in said
    assert not caught.value.is_rescued and run.latest() == 3
    run.full = run.folder
    with pytest.raises(CheckpointError, match="No space") as caught:
        run.save(6)
    assert caught.value.is_rescued and run.latest() == 6


def test_every_file_and_folder_is_synced_before_the_rename_and_its_parent_after(run: Store, monkeypatch) -> None:
    """A rename that reaches the disk before the bytes do makes an empty file of the right name."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"to {target}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    target = run.save(3)
    temporary = run.folder / ".step-3.tmp"
    files = {str(temporary / path.relative_to(target)) for path in target.rglob("*")}
    assert str(temporary / "model.safetensors") in files
    assert set(done[:-2]) == files | {str(temporary)} and done[-2:] == [f"to {target}", str(run.folder)]


def test_half_a_checkpoint_is_none(run: Store) -> None:
    whole = run.save(3)
    shutil.copytree(whole, run.folder / ".step-6.tmp")
    assert run.latest() == 3 and run.names() == {"step-3"}


def test_the_weights_are_asked_for_at_once(run: Store) -> None:
    """The next step is sent to the trainer right after, and must not come first."""
    asked: list[Path] = []

    def write(folder: Path) -> Coroutine[Any, Any, Fingerprints]:
        asked.append(folder)
        folder.mkdir(parents=True)
        return asyncio.to_thread(seal, folder)

    saving = run.store.save(3, write_weights=write, buffered=(), in_flight=(), manifest={})
    assert asked == [run.folder / ".step-3.tmp"]
    assert asyncio.run(saving) == run.folder / "step-3"


def test_the_event_loop_runs_and_the_watchdog_is_quiet_while_the_disk_is_slow(tmp_path: Path, monkeypatch) -> None:
    """Every sync takes until the watchdog has been reset twice; on the event loop, that would be forever."""
    resets: list[float] = []
    fsync, reset = os.fsync, threading.Condition()

    def set_timer(seconds: float, **_: object) -> None:
        with reset:
            resets.append(seconds)
            reset.notify_all()

    def slow(descriptor: int) -> None:
        before = len(resets)
        with reset:
            assert reset.wait_for(lambda: len(resets) >= before + 2, timeout=60), "the event loop is blocked"
        fsync(descriptor)

    async def main() -> Path:
        with Watchdog(io.StringIO(), timeout=60, margin=0.003).watching():  # a reward is being called
            return await run.saving(3)

    run = Store(tmp_path)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", set_timer)
    monkeypatch.setattr(os, "fsync", slow)
    assert asyncio.run(main()) == run.folder / "step-3" and len(resets) > 8


def test_what_is_waiting_is_written_frame_by_frame_and_as_it_was(run: Store, monkeypatch) -> None:
    rollouts = [answer(number).replace(group="g", episode=str(number)) for number in range(5)]
    episodes = [Episode(id=rollout.episode, group="g", task={}, rollouts=(rollout,)) for rollout in rollouts[:4]]
    groups = [Group(number, (episodes[number],), source="mine", index=7 + number) for number in range(3)]
    entries = [{"number": 3, "episodes": [episodes[3]], "rollouts": lambda: rollouts[4:]}]
    encoded: list[int] = []
    really = frames.make_frame

    def make_frame(value: Any) -> frames.Frame:
        encoded.append(value["number"])
        return really(value)

    monkeypatch.setattr(frames, "make_frame", make_frame)
    saving = run.saving(3, buffered=groups, in_flight=entries)
    groups.clear()
    entries.clear()
    assert not encoded, "nothing is encoded on the event loop"
    asyncio.run(saving)
    assert encoded == [0, 1, 2, 3]
    found = run.store.latest(warn=run.said.append)
    assert found is not None
    assert [(group.number, group.source, group.index) for group in found.buffered()] == [
        (0, "mine", 7), (1, "mine", 8), (2, "mine", 9),
    ]  # fmt: skip
    assert found.in_flight()[0]["number"] == 3


def test_rollouts_in_a_format_of_another_version_are_refused_with_the_way_on(run: Store, monkeypatch) -> None:
    rollout = answer(0).replace(group="g", episode="0")
    episode = Episode(id="0", group="g", task={}, rollouts=(rollout,))
    with monkeypatch.context() as patch:
        patch.setattr(frames, "SCHEMA", frames.SCHEMA - 1)
        entries = [{"number": 1, "episodes": [episode], "rollouts": list}]
        folder = asyncio.run(run.saving(3, buffered=[Group(number=0, episodes=(episode,))], in_flight=entries))
    found = run.store.latest(warn=run.said.append)
    assert found is not None and not run.said
    why = rf"has schema {frames.SCHEMA - 1}.*the version of Headrace that wrote it"
    for read in (found.buffered, found.in_flight):
        with pytest.raises(CheckpointError, match=why) as caught:
            list(read())
        assert str(caught.value).endswith(f"--model.path={folder}")
    assert run.names() == {"step-3"}


@pytest.mark.parametrize("order", ["submission", "completion"])
def test_after_a_resume_what_waits_in_order_waits_for_older_groups_in_flight(order: str) -> None:
    settings = {"buffer": {"order": order}, "staleness.max_lag": 1, "train": {"batch": 4, "group_size": 2}, "steps": 9}
    recipe = make_recipe({"orchestrate": "inline", **settings})
    lineage, encoder = Lineage.new(), PromptEncoder(build_tokenizer())
    roles = Roles(
        engine=InstantEngine(tokens=1),
        trainers={POLICY: StubTrainer(lineage)},
        scorer=RewardScorer([(RewardFunction(length_reward), 1.0)], decode=encoder.decode, settings=recipe.reward),
        environment=SingleTurn(),
        encoder=encoder,
        tasks=open_tasks(recipe, UserInputs(tasks=[{"prompt": str(number)} for number in range(20)])),
        canary=make_canary(encoder.encode("canary")),
        stop_ids=(1,),
        services=(),
    )
    policy = PolicyState(POLICY, recipe, roles, lineage=lineage, observer=Observer(), room=Signal())
    younger = [Group(number, (Episode(id=f"g{number}/0", group=f"g{number}", task={}),)) for number in (1, 2)]
    manifest = policy.state() | {"submitted_groups": 3, "in_flight": [[0, *dataclasses.astuple(roles.tasks.next())]]}
    saved = SimpleNamespace(manifest=manifest, folder=Path(), version=0, buffered=lambda: iter(younger), in_flight=list)
    asyncio.run(policy.restore(saved))  # type: ignore[arg-type]
    assert policy.buffer.ready.is_set() == (order == "completion")


@pytest.mark.parametrize("held", [2, 3])
def test_after_a_resume_the_trainer_waits_for_what_was_submitted_too_long_ago(held: int) -> None:
    """At version 3 with a lag of 1, what was submitted at version 2 has to be in the next batch."""
    settings = {"staleness": {"max_lag": 1, "rejected": "wait"}, "train": {"batch": 4, "group_size": 2}, "steps": 9}
    recipe = make_recipe({"orchestrate": "inline", **settings})
    lineage = Lineage.new()
    roles = make_roles(recipe, InstantEngine(tokens=1), StubTrainer(lineage), reward=length_reward, prompts=["0", "1"])

    def policy() -> PolicyState:
        return PolicyState(POLICY, recipe, roles, lineage=lineage, observer=Observer(), room=Signal())

    before, after = policy(), policy()
    before.version = before.held_version = held
    before.submit(roles.tasks.next())
    younger = [Group(number, (Episode(id=f"g{number}/0", group=f"g{number}", task={}),)) for number in (1, 2)]
    saved = SimpleNamespace(manifest=before.state(), folder=Path(), version=3, buffered=lambda: iter(younger), in_flight=list)
    asyncio.run(after.restore(saved))  # type: ignore[arg-type]
    assert after.buffer.ready.is_set() == (held == 3)
