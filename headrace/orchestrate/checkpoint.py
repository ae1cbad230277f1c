"""Checkpoints: a Hugging Face folder plus one manifest, written aside, synced and renamed.

A folder named `step-N` is complete by construction; a crash at any moment leaves the one before it. When the disk is
full the checkpoint is written to the cache folder instead, the run stops, and the same command finds it there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError

from headrace import wire
from headrace.buffer import Group
from headrace.orchestrate.unfinished import UnfinishedGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

MANIFEST = "manifest.json"
BUFFER = "buffer.wire"
PARTIAL = "partial.wire"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what is safe and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def version(self) -> int:
        return int(self.manifest["version"])

    def groups(self) -> list[Group]:
        """The groups that waited in the buffer."""
        with (self.folder / BUFFER).open("rb") as file:
            return [Group(number=entry["number"], episodes=tuple(entry["episodes"])) for entry in wire.read_frames(file)]

    def unfinished(self) -> list[UnfinishedGroup]:
        """The groups that were in flight; none in a checkpoint from before they were kept."""
        path = self.folder / PARTIAL
        if not path.exists():
            return []
        with path.open("rb") as file:
            return [UnfinishedGroup.of(entry) for entry in wire.read_frames(file)]


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, rescue: Path, keep: int) -> None:
        self._folder, self._rescue, self._keep = folder, rescue, keep

    async def save(
        self,
        version: int,
        *,
        write_weights: Callable[[Path], Awaitable[None]],
        groups: Iterable[Group],
        manifest: dict[str, Any],
        unfinished: Iterable[UnfinishedGroup] = (),
    ) -> Path:
        """Write `step-{version}`; the old ones past `keep` go only once it is safely there."""
        waiting = {
            BUFFER: [{"number": group.number, "episodes": list(group.episodes)} for group in groups],
            PARTIAL: [group.entry() for group in unfinished],
        }
        manifest = {"format": FORMAT, "version": version, **manifest}
        try:
            return await self._write(self._folder, version, write_weights, waiting, manifest)
        except (OSError, SafetensorError) as error:
            rescued = await self._write(self._rescue, version, write_weights, waiting, manifest)
            raise CheckpointError(
                f"checkpoint of version {version} could not be written to {self._folder}: {error}. Nothing is lost: it is in "
                f"{rescued}, and earlier ones are untouched. Make room and give the same command to go on from it."
            ) from error

    async def _write(
        self,
        parent: Path,
        version: int,
        write_weights: Callable[[Path], Awaitable[None]],
        waiting: dict[str, list[dict[str, Any]]],
        manifest: dict[str, Any],
    ) -> Path:
        target, temporary = parent / f"step-{version}", parent / f".step-{version}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            await write_weights(temporary)
            for name, entries in waiting.items():
                (temporary / name).write_bytes(b"".join(wire.encode(entry) for entry in entries))
            files = {str(path.relative_to(temporary)): _fingerprint(path) for path in _files(temporary)}
            (temporary / MANIFEST).write_text(json.dumps({**manifest, "files": files}, indent=1))
            for path in [*temporary.rglob("*"), temporary]:
                _sync(path)
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
            _sync(parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune(target)
        return target

    def latest(self, *, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole, in the run's folder or rescued; damaged ones are set aside."""
        for leftover in self._folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        folders = [path for parent in (self._folder, self._rescue) for path in parent.glob("step-*")]
        for folder in sorted(folders, key=_number, reverse=True):
            problem = _problem(folder)
            if problem is None:
                return Checkpoint(folder, json.loads((folder / MANIFEST).read_text()))
            warn(f"checkpoint {folder} is damaged ({problem}); looking for an older one")
            folder.rename(folder.with_name(f"damaged-{folder.name}-{time.time_ns()}"))
        return None

    def clear_rescued(self) -> None:
        """The run finished in its own folder."""
        shutil.rmtree(self._rescue, ignore_errors=True)

    def _prune(self, written: Path) -> None:
        """Keep the newest, the one just written among them."""
        others = sorted((path for path in self._folder.glob("step-*") if path != written), key=_number, reverse=True)
        for folder in others[self._keep - 1 :]:
            shutil.rmtree(folder, ignore_errors=True)


def random_state() -> dict[str, Any]:
    """Of the generators a user's reward or loss may draw from."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


def _problem(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        for name, fingerprint in manifest["files"].items():
            if _fingerprint(folder / name) != fingerprint:
                return f"{name} has changed"
    except (OSError, KeyError, ValueError, TypeError) as error:
        return str(error)
    return None


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _fingerprint(path: Path) -> list[int]:
    """(bytes, crc32)."""
    value, size = 0, 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            value, size = zlib.crc32(part, value), size + len(part)
    return [size, value]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
