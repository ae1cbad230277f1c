"""Checkpoints on disk: which are kept, which are whole, and what happens when a write or a read fails."""

from __future__ import annotations

import asyncio
import builtins
import errno
import io
import os
import shutil
from pathlib import Path

import pytest

from headrace.cli import _token_text
from headrace.run import checkpoint as checkpoints
from headrace.run.checkpoint import CheckpointError, CheckpointStore


class Store:
    """A run's checkpoints, and weights that can fail to be written."""

    def __init__(self, folder: Path, *, keep: int = 1) -> None:
        self.folder, self.rescue = folder / "checkpoints", folder / "rescue"
        self.store = CheckpointStore(self.folder, rescue=self.rescue, keep=keep)
        self.said: list[str] = []
        self.full: Path | None = None
        """A disk that takes nothing more."""

    def save(self, version: int) -> Path:
        async def write(folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(b"weights %d" % version)
            if self.full is not None and self.full in folder.parents:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return asyncio.run(self.store.save(version, write_weights=write, buffered=(), in_flight=(), manifest={}))

    def latest(self) -> int | None:
        found = self.store.latest(warn=self.said.append)
        return None if found is None else found.version

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return Store(tmp_path)


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
    with pytest.raises(OSError, match="No space"):
        run.save(9)
    assert "step-6" in run.names() and run.latest() == 6


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

    monkeypatch.setattr(checkpoints.os, "fsync", synced)
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
