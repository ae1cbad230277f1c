"""Checkpoints: a Hugging Face folder plus a manifest and the groups not trained yet.

Each is written under a temporary name, synced and renamed, so a folder named `step-N` is always complete. The trainer writes
the weights and returns their checksums; a thread adds the rest while the run goes on. If the disk is full, the checkpoint goes
to the cache folder instead and the run stops; the same command finds it there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import shutil
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError

from headrace.buffer import Facts, Group, JournalError
from headrace.durable import fingerprint, sync
from headrace.records import frames, pack_episodes, pack_rollouts, unpack_episodes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
    from pathlib import Path

    from headrace.durable import Fingerprints

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
BUFFER = "buffer.wire"
PARTIAL = "partial.wire"
FORMAT = 1
_NAME = re.compile(r"step-\d+")
"""Folders with other names, such as `step-100-best`, are the user's."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says what is safe and what to do."""

    is_rescued = False
    """It was written to the rescue folder."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def version(self) -> int:
        return int(self.manifest["version"])

    def buffered(self) -> Iterator[Group]:
        """One at a time: they may be more than fit into memory. One that could not be read when this was written has no
        episodes."""
        for entry in self._read(BUFFER):
            if "lost" in entry:
                yield Group(entry["number"], (), told=Facts([], {}, *entry["lost"]))
            else:
                yield Group(**(entry | {"episodes": tuple(unpack_episodes(entry["episodes"]))}))

    def in_flight(self) -> list[dict[str, Any]]:
        """Entries of `InFlightTable`."""
        return list(self._read(PARTIAL))

    def _read(self, name: str) -> Iterator[dict[str, Any]]:
        with (self.folder / name).open("rb") as file:
            try:
                yield from frames.read_frames(file)
            except frames.WireError as error:
                raise CheckpointError(
                    f"{self.folder / name} cannot be read: {error}. Finish the run with the version of Headrace that wrote it, "
                    f"or start another from its weights: --model.path={self.folder}"
                ) from error


class CheckpointStore:
    """The checkpoints of one run. `in_threads`: write in threads, to keep the event loop free."""

    def __init__(self, folder: Path, *, rescue: Path, keep: int, in_threads: bool = False) -> None:
        self._folder, self._rescue, self._keep = folder, rescue, keep
        self._in_threads = in_threads

    def save(
        self,
        version: int,
        *,
        write_weights: Callable[[Path], Awaitable[Fingerprints]],
        buffered: Iterable[Group],
        in_flight: Iterable[dict[str, Any]],
        manifest: dict[str, Any],
        beside: bool = False,
    ) -> Coroutine[Any, Any, Path]:
        """Ask for the weights now; the coroutine then writes `step-{version}` and removes the oldest beyond `keep`.
        `in_flight`: entries of `InFlightTable`. `beside`: the trainer goes on meanwhile, so that it cannot be asked for these
        weights again if the disk is full."""
        contents = {BUFFER: [group.saved() for group in buffered], PARTIAL: list(in_flight)}
        manifest = {"format": FORMAT, "version": version, **manifest}

        def write(parent: Path) -> Coroutine[Any, Any, Path]:
            target = parent / f"step-{version}"
            return self._write(target, write_weights(_temporary(target)), contents, manifest)

        return self._save(version, write(self._folder), None if beside else write)

    async def _save(
        self, version: int, writing: Awaitable[Path], write_again: Callable[[Path], Awaitable[Path]] | None
    ) -> Path:
        try:
            written = await writing
        except (OSError, SafetensorError) as error:
            problem = f"checkpoint of version {version} could not be written to {self._folder}: {error}."
            if write_again is None:
                raise CheckpointError(f"{problem} Earlier ones are untouched.") from error
            try:
                rescued = await write_again(self._rescue)
            except (OSError, SafetensorError) as second:
                raise CheckpointError(
                    f"{problem} Nor to {self._rescue}: {second}. Earlier ones are untouched. Make room, or set HEADRACE_CACHE "
                    f"to a folder on another disk, and give the same command."
                ) from error
            failure = CheckpointError(
                f"{problem} Nothing is lost: it is in {rescued}, and earlier ones are untouched. Make room and give the same "
                f"command to go on from it."
            )
            failure.is_rescued = True
            raise failure from error
        await self._run(self._remove_oldest, written)
        return written

    async def _write(
        self, target: Path, weights: Awaitable[Fingerprints], contents: dict[str, list[Any]], manifest: dict[str, Any]
    ) -> Path:
        temporary = _temporary(target)
        try:
            files = await weights
            await self._run(_complete, temporary, target, contents, files, manifest)
        except Exception:  # if cancelled, a thread may still be writing there: the next start removes it
            await self._run(shutil.rmtree, temporary, True)
            raise
        return target

    async def _run(self, function: Callable[..., object], *arguments: object) -> None:
        if self._in_threads:
            await asyncio.to_thread(function, *arguments)
        else:
            function(*arguments)

    def _remove_oldest(self, written: Path) -> None:
        others = [path for path in reversed(checkpoints_in(self._folder)) if path != written]
        for folder in others[self._keep - 1 :]:  # never the one just written, even if its number is not the highest
            shutil.rmtree(folder, ignore_errors=True)

    def latest(self, *, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest intact checkpoint in the run's or the rescue folder. One with a file that is missing or differs from
        the manifest is renamed. A failed read may be temporary, so it raises instead of using an older checkpoint."""
        for leftover in (path for parent in (self._folder, self._rescue) for path in parent.glob(".step-*.tmp")):
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


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")


def _complete(
    temporary: Path, target: Path, contents: dict[str, list[Any]], files: Fingerprints, manifest: dict[str, Any]
) -> None:
    """Write the rest beside the weights, which are on the disk, then give the folder its name."""
    written = {name: _write_frames(temporary / name, entries) for name, entries in contents.items()}
    (temporary / MANIFEST).write_text(json.dumps({**manifest, "files": files | written}))
    sync(temporary / MANIFEST)
    for folder in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
        sync(folder)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    sync(target.parent)


def _write_frames(path: Path, entries: Iterable[dict[str, Any]]) -> list[int]:
    """A frame for each entry, of which one piece is in memory at a time; returns the file's fingerprint."""
    size = checksum = 0
    with path.open("wb") as file:
        for entry in entries:
            for piece in frames.make_frame(_packed(entry)).pieces:
                file.write(piece)
                size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    sync(path)
    return [size, checksum]


def _packed(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with its episodes and rollouts as columns. Those that wait in the journal are read now; of a group that cannot
    be read, its number is left, and what it held."""
    fields = dict(entry)
    facts, episodes = fields.pop("facts", None), fields["episodes"]
    try:
        fields["episodes"] = pack_episodes(episodes() if callable(episodes) else episodes)
    except JournalError as error:
        log.warning("group %d is left out of the checkpoint: %s", entry["number"], error)
        return {"number": entry["number"], "lost": facts}
    if "rollouts" in fields:
        fields["rollouts"] = pack_rollouts(fields["rollouts"]())
    return fields


def checkpoints_in(*parents: Path) -> list[Path]:
    """Oldest first, unchecked."""
    found = [path for parent in parents for path in parent.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def random_state() -> dict[str, Any]:
    """State of the global generators that a user's reward or loss may use."""
    import torch  # not at the top: who lists checkpoints need not wait for it

    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    import torch

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
    for name, expected in files.items():
        if fingerprint(folder / name) != expected:
            raise ValueError(f"{name} has changed")
    return manifest
