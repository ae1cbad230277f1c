"""Encodes the difference between two versions of the same weights, without loss: which elements changed, and how.

At RL's learning rates most weights move by less than bfloat16 can represent, so a step changes about one in a hundred. `encode`
writes those, and `apply` brings a copy of the older version to the newer one, bit for bit:

    blob = encode([(base, now)])
    apply(blob, [held])          # held was base, and is now `now`

Weights are split into chunks of `CHUNK` elements. A blob is a header, a directory, and the contents of the chunks. For each
chunk the directory has its kind (unchanged, changes, or the whole chunk if that is smaller), the number of changed elements,
the length of its content, and two checksums: of the content, and of the changed elements' new bits, which rejects a blob made
from another base. The same two versions always give the same blob.
"""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.errors import SyncError
from headrace.sync.delta.numbers import Changes, Reader, find, find_on_device, read_changes, write_changes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from headrace.sync.delta.numbers import Integers

CHUNK = 1 << 23  # elements. Part of the format.
_CHUNKS_ON_GPU = 8  # compared in one launch, and all decoded before the first is written
_MAGIC = b"HRD1"
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
DTYPES = frozenset(_BITS)  # weights of other dtypes always travel whole
_CODES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
_HEAD = struct.Struct("<4sI")
_FLAT = struct.Struct("<BQ")
_ENTRY = struct.Struct("<BIIII")
_CHECKSUM = struct.Struct("<I")
_SAME, _CHANGES, _WHOLE = range(3)  # kinds of chunks


@dataclass(frozen=True)
class _Chunk:
    """A directory entry with its content. `start` and `size` count elements of flat tensor number `flat`; `checksum` is of the
    content, `now_checksum` of the changed elements' new bits."""

    flat: int
    start: int
    size: int
    kind: int
    num_changed: int
    checksum: int
    now_checksum: int
    content: memoryview


@dataclass(frozen=True)
class Stats:
    """A blob's statistics: `full_bytes` is the size of the weights, `num_bytes` that of the blob."""

    num_elements: int
    num_changed: int
    full_bytes: int
    num_bytes: int


def encode(pairs: Sequence[tuple[Tensor, Tensor]], *, threads: int | None = None) -> Tensor:
    """Encode the difference of each pair (base, now) of 1-D tensors, as uint8 on the CPU."""
    head = [_HEAD.pack(_MAGIC, len(pairs))]
    for base, now in pairs:
        _check_flat(base)
        _check_flat(now)
        if (base.dtype, base.shape, base.device) != (now.dtype, now.shape, now.device):
            raise SyncError("a delta is between two versions of the same weights: of one dtype, shape and device")
        head.append(_FLAT.pack(_CODES[base.dtype], base.numel()))
    with _workers(threads) as workers:
        written = [chunk for base, now in pairs for chunk in _write_flat(base, now, workers)]
    head += [entry for entry, _ in written]
    head.append(_CHECKSUM.pack(zlib.crc32(b"".join(head))))
    return torch.frombuffer(bytearray(b"".join(head + [content for _, content in written])), dtype=torch.uint8)


@torch.no_grad()
def apply(blob: Tensor, flats: Sequence[Tensor], *, threads: int | None = None) -> None:
    """Bring weights from the base to the newer version, in place. Raises `SyncError` for a blob that is damaged or was made
    from other weights. The weights may then be partly updated, so apply to a copy."""
    layout, chunks = _parse(blob)
    for flat in flats:
        _check_flat(flat)
    held = [(_CODES[flat.dtype], flat.numel()) for flat in flats]
    if layout != held:
        raise SyncError("a delta is of weights in another layout than those held: versions differ in dtypes or sizes")
    bits = [flat.detach().view(_BITS[flat.dtype]) for flat in flats]
    with _workers(threads) as workers:
        on_cpu = [chunk for chunk in chunks if not _is_on_gpu(bits[chunk.flat])]
        list(workers.map(lambda chunk: _apply_on_cpu(chunk, bits[chunk.flat].numpy()), on_cpu))
        on_gpu = (chunk for chunk in chunks if _is_on_gpu(bits[chunk.flat]))
        while several := list(islice(on_gpu, _CHUNKS_ON_GPU)):
            decoded = list(workers.map(lambda chunk: _decode(chunk, bits[chunk.flat].itemsize), several))
            for chunk, found in zip(several, decoded, strict=True):
                _apply_on_device(chunk, found, bits[chunk.flat])


def stats(blob: Tensor) -> Stats:
    """Read statistics from the directory alone."""
    layout, chunks = _parse(blob)
    sizes = {code: dtype.itemsize for dtype, code in _CODES.items()}
    return Stats(
        num_elements=sum(size for _, size in layout),
        num_changed=sum(chunk.num_changed for chunk in chunks),
        full_bytes=sum(size * sizes[code] for code, size in layout),
        num_bytes=blob.numel(),
    )


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _check_flat(flat: Tensor) -> None:
    if flat.ndim != 1 or flat.dtype not in _BITS or not flat.is_contiguous():
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _BITS)
        raise SyncError(f"a delta is of contiguous tensors in one dimension, of {known}; not {flat.dtype} {list(flat.shape)}")


def _write_flat(base: Tensor, now: Tensor, workers: ThreadPoolExecutor) -> Iterator[tuple[bytes, bytes]]:
    old, new = base.detach().view(_BITS[base.dtype]), now.detach().view(_BITS[now.dtype])
    if not _is_on_gpu(new):
        pieces = zip(_cut(old.numpy()), _cut(new.numpy()), strict=True)
        yield from workers.map(lambda pair: _write_chunk(find(*pair), torch.from_numpy(pair[1])), pieces)
        return
    for start in range(0, new.numel(), _CHUNKS_ON_GPU * CHUNK):
        span = slice(start, start + _CHUNKS_ON_GPU * CHUNK)
        found = _split(find_on_device(old[span], new[span]), new[span].numel())
        yield from workers.map(lambda pair: _write_chunk(*pair), zip(found, new[span].split(CHUNK), strict=True))


def _cut(bits: Integers) -> list[Integers]:
    return [bits[start : start + CHUNK] for start in range(0, len(bits), CHUNK)]


def _split(changes: Changes, size: int) -> list[Changes]:
    starts = np.arange(0, size, CHUNK)
    bounds = [*np.searchsorted(changes.positions, starts), len(changes.positions)]
    return [
        Changes(changes.positions[low:high] - start, changes.base[low:high], changes.now[low:high])
        for start, low, high in zip(starts, bounds, bounds[1:], strict=False)
    ]


def _write_chunk(changes: Changes, whole: Tensor) -> tuple[bytes, bytes]:
    count = len(changes.positions)
    if not count:
        return _ENTRY.pack(_SAME, 0, 0, 0, 0), b""
    kind, content = _CHANGES, write_changes(changes)
    if len(content) >= whole.nbytes:
        kind, content = _WHOLE, whole.cpu().numpy().tobytes()
    return _ENTRY.pack(kind, count, len(content), zlib.crc32(content), zlib.crc32(changes.now.data)), content


def _parse(blob: Tensor) -> tuple[list[tuple[int, int]], list[_Chunk]]:
    """Return the layout (dtype code, elements) of each flat tensor, and the chunks. Every length is checked against the blob's
    size before memory is allocated for it."""
    if blob.dtype != torch.uint8 or blob.ndim != 1:
        raise SyncError(f"a delta is bytes in one dimension, not {blob.dtype} {list(blob.shape)}")
    data = blob.detach().cpu().contiguous().numpy().data.toreadonly()
    reader = Reader(data)
    magic, num_flats = _HEAD.unpack(reader.take(_HEAD.size))
    if magic != _MAGIC:
        raise SyncError("these bytes are not a delta, or one of another version of the format")
    flats = reader.take(num_flats * _FLAT.size)
    layout: list[tuple[int, int]] = list(_FLAT.iter_unpack(flats))
    num_chunks = sum(-(-size // CHUNK) for _, size in layout)
    entries = reader.take(num_chunks * _ENTRY.size)
    (checksum,) = _CHECKSUM.unpack(reader.take(_CHECKSUM.size))
    if checksum != zlib.crc32(data[: _HEAD.size + len(flats) + len(entries)]):
        raise SyncError("a delta arrived damaged: its directory does not have the checksum it was sent with")
    if any(code not in _CODES.values() for code, _ in layout):
        raise SyncError("a delta is of a dtype this version does not know")
    places = ((flat, start) for flat, (_, size) in enumerate(layout) for start in range(0, size, CHUNK))
    chunks = []
    for (flat, start), entry in zip(places, _ENTRY.iter_unpack(entries), strict=True):
        kind, num_changed, length, checksum, now_checksum = entry
        size = min(CHUNK, layout[flat][1] - start)
        chunks.append(_Chunk(flat, start, size, kind, num_changed, checksum, now_checksum, reader.take(length)))
    reader.close()
    return layout, chunks


def _decode(chunk: _Chunk, itemsize: int) -> tuple[Integers, Integers] | Integers | None:
    """Return positions and what to add there, or the whole chunk, or None if nothing changed."""
    if chunk.checksum != zlib.crc32(chunk.content):
        raise SyncError("a delta arrived damaged: a chunk does not have the checksum it was sent with")
    if chunk.kind == _SAME and not chunk.content and not chunk.num_changed:
        return None
    if chunk.kind == _CHANGES:
        return read_changes(chunk.content, chunk.num_changed, itemsize, chunk.size)
    if chunk.kind == _WHOLE and len(chunk.content) == chunk.size * itemsize:
        return np.frombuffer(chunk.content, f"<i{itemsize}")
    raise SyncError(f"a delta has a chunk of kind {chunk.kind} with {len(chunk.content)} bytes for {chunk.size} elements")


def _apply_on_cpu(chunk: _Chunk, bits: Integers) -> None:
    found, held = _decode(chunk, bits.itemsize), bits[chunk.start : chunk.start + chunk.size]
    if isinstance(found, tuple):
        positions, added = found
        added += held.take(positions)
        _check_now(chunk, added)
        held[positions] = added
    elif found is not None:
        held[:] = found


def _apply_on_device(chunk: _Chunk, found: tuple[Integers, Integers] | Integers | None, bits: Tensor) -> None:
    held = bits[chunk.start : chunk.start + chunk.size]
    if isinstance(found, tuple):
        positions = torch.from_numpy(found[0]).to(held.device)
        now = held[positions].cpu() + torch.from_numpy(found[1])
        _check_now(chunk, now.numpy())
        held[positions] = now.to(held.device)
    elif found is not None:
        held.copy_(torch.from_numpy(found.copy()))  # torch has no read-only tensors, and the blob is read-only


def _check_now(chunk: _Chunk, now: Integers) -> None:
    if chunk.now_checksum != zlib.crc32(now.data):
        raise SyncError("a delta was made against other weights than those held: it does not give the ones it was made for")


def _workers(threads: int | None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads or torch.get_num_threads(), "delta")
