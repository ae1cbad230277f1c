"""What a file that must survive a crash needs: its bytes synced to the disk, and a checksum to recognise them by."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    Fingerprints = dict[str, list[int]]
    """Path within a folder -> [bytes, crc32]."""

_READ = 1 << 22


def seal(folder: Path) -> Fingerprints:
    """Sync every file in a folder to the disk, and return their fingerprints."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[str(path.relative_to(folder))] = fingerprint(path)
        sync(path)
    return files


def fingerprint(path: Path) -> list[int]:
    """[bytes, crc32] of a file."""
    value, size = 0, 0
    with path.open("rb") as file:
        while part := file.read(_READ):
            value, size = zlib.crc32(part, value), size + len(part)
    return [size, value]


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
