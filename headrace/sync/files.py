"""The transport over a shared filesystem: a safetensors file, renamed to its final name once it is complete.

Any program that reads safetensors can read it: tensors have the model's names and shapes.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from headrace.errors import SyncError
from headrace.sync.memory import BufferedTransport, TorchBuffer
from headrace.sync.transport import read_place

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from headrace.records import Plain
    from headrace.sync.transport import Target, TransportConfig

_POLL_SECONDS = 0.05
_NAME = re.compile(r"[\w.-]+\.safetensors")
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""safetensors' names of torch's dtypes."""


@dataclass(frozen=True)
class Place:
    file: str
    bytes: int


class FilesTransport(BufferedTransport[TorchBuffer]):
    """Both ends use the same folder; the sender removes the files."""

    name = "files"
    uses_folder = True

    def __init__(self, *, folder: Path, prefix: str, deadline: float) -> None:
        super().__init__(TorchBuffer)
        self._folder, self._prefix, self._deadline = folder, prefix, deadline
        self._written: dict[str, Path] = {}

    @classmethod
    def make(cls, config: TransportConfig, *, is_sender: bool, device: str) -> FilesTransport:
        return cls(folder=config.directory, prefix=config.prefix, deadline=config.deadline)

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
        super().free(key)  # the bytes are in the file now
        return {"file": path.name, "bytes": path.stat().st_size}

    def free(self, key: str) -> None:
        super().free(key)
        path = self._written.pop(key, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for key in list(self._written):
            self.free(key)
        super().close()

    def fetch(self, place: Mapping[str, Plain], target: Target, *, receiver: str) -> None:
        there = read_place(Place, place)
        if not _NAME.fullmatch(there.file):
            raise SyncError(f"{there.file!r} is not the name of a file of weights")
        path = self._folder / there.file
        self._wait_for(path, there.bytes, target)
        try:
            with safe_open(path, framework="pt") as file:
                _copy(file, target)
        except (SafetensorError, OSError) as error:
            raise SyncError(f"{path} cannot be read: {error}") from error

    def _wait_for(self, path: Path, num_bytes: int, target: Target) -> None:
        """On a shared filesystem the file may appear some time after the receiver learns of it."""
        until = time.monotonic() + self._deadline
        while (size := _size(path)) != num_bytes:
            if time.monotonic() > until:
                found = "is not there" if size is None else f"has {size} bytes"
                raise SyncError(f"{path} {found} after {self._deadline:g} s (sync.deadline); {num_bytes} bytes were announced")
            target.check()
            time.sleep(_POLL_SECONDS)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _copy(file: Any, target: Target) -> None:  # noqa: ANN401  (the library types none of it)
    names = set(file.keys())
    for name, view in target.views.items():
        if name not in names:
            raise SyncError(f"tensor {name!r} is not in the file")
        tensor = file.get_tensor(name)
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            raise SyncError(f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)} in the file")
        target.check()
        view.copy_(tensor)


def write_safetensors(path: Path, views: Mapping[str, Tensor]) -> None:
    """Write without a copy, unlike the library's own writer. Only this user may read the file, whatever the umask."""
    import torch

    header, start = {}, 0
    for name, view in views.items():
        stop = start + view.numel() * view.element_size()
        dtype = _CODES[str(view.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(view.shape), "data_offsets": [start, stop]}
        start = stop
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for view in views.values():
            if view.numel():
                file.write(view.contiguous().reshape(-1).view(torch.uint8).numpy().data)
