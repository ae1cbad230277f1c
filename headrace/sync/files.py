"""The transport over any filesystem that both ends share: a safetensors file, renamed when it is whole, and a notice.

Whoever else reads safetensors can read it: the tensors have the names and shapes of the model's.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import SyncError
from headrace.sync.buffers import Rooms
from headrace.sync.memory import MemoryRoom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target

_LOOK_SECONDS = 0.05
_NAME = re.compile(r"[\w.-]+\.safetensors")
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class FilesTransport:
    """Both ends are made with the same folder; the sender removes what is freed."""

    name = "files"
    keeps_rooms = False
    """What is posted lies in its file, and its room is used again."""

    def __init__(self, *, folder: Path, prefix: str, deadline: float) -> None:
        self._folder, self._prefix, self._deadline = folder, prefix, deadline
        self._rooms = Rooms(lambda num_bytes: MemoryRoom(num_bytes, torch.device("cpu")))
        self._written: dict[str, Path] = {}

    # The sender's end

    def room(self, key: str, num_bytes: int) -> Tensor:
        return self._rooms.take(key, num_bytes).tensor[:num_bytes]

    def post(self, key: str, views: Mapping[str, Tensor]) -> dict[str, Plain]:
        path = self._folder / f"{self._prefix}-{key}.safetensors"
        temporary = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(temporary, views)
            temporary.rename(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise SyncError(f"{path} cannot be written: {error.strerror}") from error
        self._written[key] = path
        self._rooms.free(key)
        return {"file": path.name, "bytes": path.stat().st_size}

    def push(self, key: str, receivers: Sequence[str]) -> None:
        """Receivers come for it."""

    def free(self, key: str) -> None:
        self._rooms.free(key)
        path = self._written.pop(key, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for key in list(self._written):
            self.free(key)
        self._rooms.close()

    # The receiver's end

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        name = str(place.get("file"))
        if not _NAME.fullmatch(name):
            raise SyncError(f"{name!r} is not the name of a file of weights")
        path = self._folder / name
        self._await(path, place.get("bytes"), target)
        try:
            with safe_open(path, framework="pt") as file:
                _copy(file, target)
        except (SafetensorError, OSError) as error:
            raise SyncError(f"{path} cannot be read: {error}") from error

    def _await(self, path: Path, num_bytes: Plain, target: Target) -> None:
        """A shared filesystem may show the file a while after the notice came."""
        until, size = time.monotonic() + self._deadline, None
        while size != num_bytes:
            try:
                size = path.stat().st_size
            except OSError:
                size = None
            if size != num_bytes:
                if time.monotonic() > until:
                    found = "is not there" if size is None else f"has {size} bytes"
                    raise SyncError(
                        f"{path} {found} after {self._deadline:g} s (sync.deadline); {num_bytes} bytes were announced"
                    )
                target.check()
                time.sleep(_LOOK_SECONDS)


def _copy(file: Any, target: Target) -> None:  # noqa: ANN401  (the library types none of it)
    there = set(file.keys())
    for name, view in target.views.items():
        if name not in there:
            raise SyncError(f"tensor {name!r} is not in the file")
        tensor = file.get_tensor(name)
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            raise SyncError(f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)} in the file")
        target.check()
        view.copy_(tensor)


def write_safetensors(path: Path, views: Mapping[str, Tensor]) -> None:
    """Straight from where they lie, which may be one memory: the library's own writer copies each tensor first. Whatever the
    umask is, only this user may read it."""
    header, start = {}, 0
    for name, view in views.items():
        stop = start + view.numel() * view.element_size()
        header[name] = {"dtype": _CODES[view.dtype], "shape": list(view.shape), "data_offsets": [start, stop]}
        start = stop
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for view in views.values():
            if view.numel():
                file.write(view.contiguous().reshape(-1).view(torch.uint8).numpy().data)
