"""Encodes the difference between two versions of the same weights, without loss: which elements changed, and how.

At RL's learning rates most weights move by less than bfloat16 can represent, so a step changes about one in a hundred. `encode`
writes those, and `apply` brings a copy of the older version to the newer one, bit for bit:

    blob = encode([(base, now)])
    apply(blob, [held])          # held was base, and is now `now`

Weights are split into chunks of `CHUNK` elements. A blob is a header and, for each chunk, its kind (unchanged, changes, or the
whole chunk if that is smaller), the number of changed elements, the length of its content, and the content. The same two
versions always give the same blob. It has no checksums: an engine compares those of the weights it makes with the manifest's.
"""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from headrace.errors import SyncError
from headrace.sync.delta.numbers import Changes, find, find_on_device, read_changes, write_changes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from headrace.sync.delta.numbers import Integers

CHUNK = 1 << 23  # elements. Part of the format.
_CHUNKS_ON_GPU = 8  # decoded before the first of them is written
_MAGIC = b"HRD2"
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
DTYPES = frozenset(_BITS)  # weights of other dtypes always travel whole
_ENTRY = struct.Struct("<BII")
_SAME, _CHANGES, _WHOLE = range(3)  # kinds of chunks


class _Chunk(NamedTuple):
    held: Tensor  # the bits of the weights to change
    kind: int
    num_changed: int
    content: memoryview


def encode(pairs: Sequence[tuple[Tensor, Tensor]], *, threads: int | None = None) -> Tensor:
    """Encode the difference of each pair (base, now) of 1-D tensors, as uint8 on the CPU."""
    with _workers(threads) as workers:
        written = [chunk for base, now in pairs for chunk in _write_flat(_cut(base), _cut(now), workers)]
    return torch.frombuffer(bytearray(b"".join([_MAGIC, *(part for chunk in written for part in chunk)])), dtype=torch.uint8)


@torch.no_grad()
def apply(blob: Tensor, flats: Sequence[Tensor], *, threads: int | None = None) -> None:
    """Bring weights from the base to the newer version, in place. Raises `SyncError` for a blob that cannot be read or is of
    weights in another layout; the weights may then be partly updated, so apply to a copy."""
    try:
        chunks = list(_parse(blob.cpu().contiguous().numpy().data.toreadonly(), flats))
        with _workers(threads) as workers:
            list(workers.map(_apply_on_cpu, [chunk for chunk in chunks if not _is_on_gpu(chunk.held)]))
            on_gpu = (chunk for chunk in chunks if _is_on_gpu(chunk.held))
            while several := list(islice(on_gpu, _CHUNKS_ON_GPU)):
                for chunk, found in zip(several, list(workers.map(_decode, several)), strict=True):
                    _apply_on_device(chunk.held, found)
    except (ValueError, TypeError, LookupError, struct.error, zlib.error) as error:
        raise SyncError(f"a delta cannot be read, or is of weights in another layout: {error}") from error


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _cut(flat: Tensor) -> tuple[Tensor, ...]:
    bits: Tensor = flat.detach().view(_BITS[flat.dtype])
    return tuple(bits[start : start + CHUNK] for start in range(0, max(1, len(bits)), CHUNK))


def _write_flat(base: Sequence[Tensor], now: Sequence[Tensor], workers: ThreadPoolExecutor) -> Iterator[tuple[bytes, bytes]]:
    if _is_on_gpu(now[0]):
        return workers.map(_write_chunk, map(find_on_device, base, now), now)
    return workers.map(lambda old, new: _write_chunk(find(old.numpy(), new.numpy()), new), base, now)


def _write_chunk(changes: Changes, whole: Tensor) -> tuple[bytes, bytes]:
    count = len(changes.positions)
    kind, content = (_CHANGES, write_changes(changes)) if count else (_SAME, b"")
    if count and len(content) >= whole.nbytes:
        kind, content = _WHOLE, whole.cpu().numpy().tobytes()
    return _ENTRY.pack(kind, count, len(content)), content


def _parse(data: memoryview, flats: Sequence[Tensor]) -> Iterator[_Chunk]:
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("these bytes are none, or of another version of the format")
    at = len(_MAGIC)
    for held in (chunk for flat in flats for chunk in _cut(flat)):
        kind, num_changed, length = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size + length
        if num_changed > held.numel() or at > len(data):
            raise ValueError(f"{num_changed} changes of {held.numel()} elements in {length} bytes")
        yield _Chunk(held, kind, num_changed, data[at - length : at])
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")


def _decode(chunk: _Chunk) -> tuple[Integers, Integers] | Integers | None:
    """Return positions and what to add there, or the whole chunk, or None if nothing changed."""
    if chunk.kind == _SAME:
        return None
    size, itemsize = chunk.held.numel(), chunk.held.itemsize
    if chunk.kind == _CHANGES:
        return read_changes(chunk.content, chunk.num_changed, itemsize, size)
    if chunk.kind != _WHOLE or len(chunk.content) != size * itemsize:
        raise ValueError(f"a chunk of kind {chunk.kind} has {len(chunk.content)} bytes for {size} elements")
    return np.frombuffer(chunk.content, f"<i{itemsize}")


def _apply_on_cpu(chunk: _Chunk) -> None:
    found, held = _decode(chunk), chunk.held.numpy()
    if isinstance(found, tuple):
        positions, added = found
        held[positions] = held.take(positions) + added
    elif found is not None:
        held[:] = found


def _apply_on_device(held: Tensor, found: tuple[Integers, Integers] | Integers | None) -> None:
    if isinstance(found, tuple):
        positions, added = (torch.from_numpy(each).to(held.device) for each in found)
        held[positions] += added
    elif found is not None:
        held.copy_(torch.from_numpy(found.copy()))  # torch has no read-only tensors, and the blob is read-only


def _workers(threads: int | None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads or torch.get_num_threads(), "delta")
