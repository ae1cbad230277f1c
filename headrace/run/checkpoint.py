"""Checkpoints: a Hugging Face folder plus a manifest and the groups not trained yet.

Each is written under a temporary name, synced and renamed, so a folder named `step-N` is always complete. If the disk is full,
the checkpoint goes to the cache folder instead and the run stops; the same command finds it there.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError

from headrace.buffer import Group
from headrace.records import frames, pack_episodes, unpack_episodes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

MANIFEST = "manifest.json"
BUFFER = "buffer.wire"
PARTIAL = "partial.wire"
FORMAT = 1
_NAME = re.compile(r"step-\d+")
"""Folders with other names, such as `step-100-best`, are the user's."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what is safe and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def version(self) -> int:
        return int(self.manifest["version"])

    def buffered(self) -> list[Group]:
        groups = self._read(BUFFER)
        return [Group(number=entry["number"], episodes=tuple(unpack_episodes(entry["episodes"]))) for entry in groups]

    def in_flight(self) -> list[dict[str, Any]]:
        """Entries of `InFlightTable`; none in old checkpoints, which did not keep them."""
        return self._read(PARTIAL) if (self.folder / PARTIAL).exists() else []

    def _read(self, name: str) -> list[dict[str, Any]]:
        with (self.folder / name).open("rb") as file:
            return list(frames.read_frames(file))


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, rescue: Path, keep: int) -> None:
        self._folder, self._rescue, self._keep = folder, rescue, keep

    async def save(
        self,
        version: int,
        *,
        write_weights: Callable[[Path], Awaitable[None]],
        buffered: Iterable[Group],
        in_flight: Iterable[dict[str, Any]],
        manifest: dict[str, Any],
    ) -> Path:
        """Write `step-{version}`, then remove the oldest beyond `keep`. `in_flight`: entries of `InFlightTable`."""
        waiting = ({"number": group.number, "episodes": pack_episodes(group.episodes)} for group in buffered)
        contents = {
            BUFFER: b"".join(map(frames.encode, waiting)),
            PARTIAL: b"".join(map(frames.encode, in_flight)),
        }
        manifest = {"format": FORMAT, "version": version, **manifest}
        try:
            written = await _write(self._folder / f"step-{version}", write_weights, contents, manifest)
        except (OSError, SafetensorError) as error:
            rescued = await _write(self._rescue / f"step-{version}", write_weights, contents, manifest)
            raise CheckpointError(
                f"checkpoint of version {version} could not be written to {self._folder}: {error}. Nothing is lost: it is in "
                f"{rescued}, and earlier ones are untouched. Make room and give the same command to go on from it."
            ) from error
        others = [path for path in reversed(checkpoints_in(self._folder)) if path != written]
        for folder in others[self._keep - 1 :]:  # never the one just written, even if its number is not the highest
            shutil.rmtree(folder, ignore_errors=True)
        return written

    def latest(self, *, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest intact checkpoint in the run's or the rescue folder. One with a file that is missing or differs from
        the manifest is renamed. A failed read may be temporary, so it raises instead of using an older checkpoint."""
        for leftover in self._folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        for folder in reversed(checkpoints_in(self._folder, self._rescue)):
            try:
                return Checkpoint(folder, _checked_manifest(folder))
            except (ValueError, FileNotFoundError) as problem:
                warn(f"checkpoint {folder} is damaged ({problem}); looking for an older one")
                folder.rename(folder.with_name(f"damaged-{folder.name}-{time.time_ns()}"))
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {folder} cannot be read: {error}. It may be whole, and nothing was changed. Give the same "
                    f"command again; to go on from an older one, move this folder away first."
                ) from error
        return None

    def clear_rescued(self) -> None:
        """Called when the run has finished in its own folder."""
        shutil.rmtree(self._rescue, ignore_errors=True)


async def _write(
    target: Path,
    write_weights: Callable[[Path], Awaitable[None]],
    contents: dict[str, bytes],
    manifest: dict[str, Any],
) -> Path:
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        await write_weights(temporary)
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
        written = sorted(path for path in temporary.rglob("*") if path.is_file())
        files = {str(path.relative_to(temporary)): _fingerprint(path) for path in written}
        (temporary / MANIFEST).write_text(json.dumps({**manifest, "files": files}, indent=1))
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def checkpoints_in(*parents: Path) -> list[Path]:
    """Oldest first, unchecked."""
    found = [path for parent in parents for path in parent.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def random_state() -> dict[str, Any]:
    """State of the global generators that a user's reward or loss may use."""
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


def _checked_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, after checking every file against it; raises `ValueError` if one differs."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        format_, files = manifest["format"], dict(manifest["files"])
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error
    if format_ != FORMAT:
        raise ValueError(f"its format is {format_}, this version reads {FORMAT}")
    for name, fingerprint in files.items():
        if _fingerprint(folder / name) != fingerprint:
            raise ValueError(f"{name} has changed")
    return manifest


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
