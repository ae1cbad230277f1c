"""The wire format: a msgpack header and the raw buffers of its arrays. No pickle.

A frame is

    magic b"HRW" + schema (1 byte) | crc32 (4) | header length (4) | body length (8) | header | zeros | body

all little-endian. Arrays are extensions that hold (dtype, shape, offset, length), and lie 8-byte aligned in the body, so that
decoding copies nothing. Small records are extensions that hold their name and fields; rollouts, batches and episodes travel as
columns (`headrace.records.columns`). Every size is checked before memory is allocated, and records check themselves, so
malformed bytes raise `WireError` and never another error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import struct
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO

import msgpack
import numpy as np

from headrace.records.sampling import InfraAbort, Invalid, Sampling, SamplingMask, Scored
from headrace.records.weight_update import Manifest, Part, WeightUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.records.validate import Array

SCHEMA = 3
"""Rises when old frames can no longer be read."""
MAX_FRAME = 2 << 30
"""Bytes; a frame that announces more is rejected unread."""

_PREAMBLE = struct.Struct("<3sBIIQ")
PREAMBLE_BYTES = _PREAMBLE.size
"""Bytes to read before a frame's length is known."""
_MAGIC = b"HRW"
_DTYPES = {
    name: np.dtype(name) for name in ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
}
_RECORDS: dict[str, type[Any]] = {
    record.__name__: record for record in (WeightUpdate, Part, Manifest, Sampling, SamplingMask, Scored, Invalid, InfraAbort)
}
_FIELDS = {record: tuple(field.name for field in dataclasses.fields(record)) for record in _RECORDS.values()}
_MALFORMED = ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, msgpack.UnpackException
_ARRAY, _RECORD = 1, 2
"""Codes of our msgpack extensions."""
_MAX_DEPTH = 8
"""Records within records; ours are two deep. More would cost C stack, which is not checked."""


class WireError(ValueError):
    """The bytes are not a frame this version can read; the message says why."""


@contextlib.contextmanager
def wire_errors(what: str) -> Iterator[None]:
    """Turn any error that malformed data causes into a `WireError`."""
    try:
        yield
    except _MALFORMED as error:
        raise WireError(f"{what}: {error}") from error


def encode(value: object) -> bytes:
    """Encode plain data, arrays and small records, nested in lists and dicts."""
    buffers: list[bytes | memoryview] = []
    size = 0

    def extension(item: object) -> msgpack.ExtType:
        nonlocal size
        if isinstance(item, np.ndarray):
            array = np.asarray(item, dtype=item.dtype.newbyteorder("<"), order="C")
            if array.dtype.str not in _DTYPES:
                raise WireError(f"arrays of {array.dtype} do not travel")
            padding = -size % 8
            buffers.extend((bytes(padding), array.data))
            start, size = size + padding, size + padding + array.nbytes
            return msgpack.ExtType(_ARRAY, msgpack.packb([array.dtype.str, array.shape, start, array.nbytes]))
        if type(item) in _FIELDS:
            fields = {name: getattr(item, name) for name in _FIELDS[type(item)]}
            return msgpack.ExtType(_RECORD, msgpack.packb([type(item).__name__, fields], default=extension))  # noqa: F821
        if isinstance(item, int):
            raise WireError(f"{item} does not fit in 64 bits")
        raise WireError(f"a {type(item).__name__} does not travel")

    with wire_errors("cannot be encoded"):
        header: bytes = msgpack.packb(value, default=extension)
        _read(header, msgpack.ExtType)  # refuses here what a reader would refuse, such as bytes and keys that are numbers
    del extension  # it refers to itself, which would keep the arrays in memory until the next garbage collection
    if _body_start(len(header)) + size > MAX_FRAME:
        raise WireError(f"{len(header) + size} bytes are more than a frame may hold ({MAX_FRAME})")
    parts = [header, bytes(_body_start(len(header)) - _PREAMBLE.size - len(header)), *buffers]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([_PREAMBLE.pack(_MAGIC, SCHEMA, checksum, len(header), size), *parts])


def _body_start(header_size: int) -> int:
    """The body starts at a multiple of 8, so that its arrays are aligned."""
    return -(-(_PREAMBLE.size + header_size) // 8) * 8


def decode(frame: bytes | memoryview, *, max_bytes: int = MAX_FRAME) -> Any:  # noqa: ANN401  (what was encoded)
    """Decode one complete frame, with nothing after it."""
    frame = memoryview(frame)
    header_size, body_size, checksum = _read_preamble(frame, max_bytes=max_bytes)
    expected = _body_start(header_size) + body_size
    if len(frame) != expected:
        what = "truncated" if len(frame) < expected else "followed by other bytes"
        raise WireError(f"frame is {what}: {len(frame)} bytes where {expected} were announced")
    payload = frame[_PREAMBLE.size :]
    if zlib.crc32(payload) != checksum:
        raise WireError("checksum differs: the frame was changed in transit")
    with wire_errors("malformed frame"):
        return _revive(payload[:header_size], frame[_body_start(header_size) :])


def remaining_bytes(preamble: bytes, *, max_bytes: int = MAX_FRAME) -> int:
    """Bytes of a frame after its preamble."""
    header_size, body_size, _ = _read_preamble(memoryview(preamble), max_bytes=max_bytes)
    return _body_start(header_size) - _PREAMBLE.size + body_size


def read_frames(file: BinaryIO) -> Iterator[Any]:
    """The values in a file of frames, without a last frame that a crash left incomplete."""
    while preamble := file.read(_PREAMBLE.size):
        if len(preamble) < _PREAMBLE.size:
            return
        size = remaining_bytes(preamble)
        rest = file.read(size)
        if len(rest) < size:
            return
        yield decode(preamble + rest)


def _read_preamble(frame: memoryview, *, max_bytes: int) -> tuple[int, int, int]:
    if len(frame) < _PREAMBLE.size:
        raise WireError(f"frame is truncated: {len(frame)} bytes, the preamble alone takes {_PREAMBLE.size}")
    magic, schema, checksum, header_size, body_size = _PREAMBLE.unpack(frame[: _PREAMBLE.size])
    if magic != _MAGIC:
        raise WireError("not a Headrace frame: it does not begin with 'HRW'")
    if schema != SCHEMA:
        raise WireError(f"frame has schema {schema}, this version reads {SCHEMA}")
    if _body_start(header_size) + body_size > max_bytes:
        raise WireError(f"oversized frame: announces {header_size + body_size} bytes, at most {max_bytes} are accepted")
    return header_size, body_size, checksum


def _read(packed: bytes | memoryview, extension: Callable[[int, bytes], Any]) -> Any:  # noqa: ANN401
    """Decode msgpack without bytes, with text for keys; `extension` makes values of our extensions."""
    return msgpack.unpackb(packed, ext_hook=extension, max_bin_len=0, timestamp=1)


def _revive(packed: bytes | memoryview, body: memoryview, *, depth: int = 0) -> Any:  # noqa: ANN401
    if depth > _MAX_DEPTH:
        raise WireError(f"records nested deeper than {_MAX_DEPTH}")

    def extension(code: int, data: bytes) -> Any:  # noqa: ANN401
        content = _revive(data, body, depth=depth + 1)
        if code == _ARRAY:
            return _revive_array(content, body)
        name, fields = content
        if code != _RECORD or name not in _RECORDS:
            raise WireError(f"unknown record {name!r}")
        record = _RECORDS[name]
        odd = sorted(fields.keys() ^ set(_FIELDS[record]))
        if odd:
            raise WireError(f"record {name} has missing or unknown fields: {', '.join(odd)}")
        return record(**fields)

    return _read(packed, extension)


def _revive_array(claim: Any, body: memoryview) -> Array:  # noqa: ANN401
    if not isinstance(claim, list) or len(claim) != 4:
        raise WireError("an array is described by dtype, shape, offset and length")
    dtype, shape, offset, length = claim
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WireError(f"arrays of {dtype!r} are not accepted")
    if not isinstance(shape, list) or len(shape) > 8 or not all(type(n) is int and n >= 0 for n in [*shape, offset, length]):
        raise WireError("an array's shape, offset and length must be whole numbers")
    count, kind = math.prod(shape), _DTYPES[dtype]
    if count * kind.itemsize != length or offset + length > len(body):
        raise WireError(f"an array of shape {shape} and {length} bytes at {offset} does not fit a body of {len(body)}")
    array = np.frombuffer(body[offset : offset + length], dtype=kind)
    return array if len(shape) == 1 else array.reshape(shape)
