"""The wire format: a msgpack header and the raw buffers of its arrays. No pickle.

A frame is

    magic b"HRW" + schema (1 byte) | header length (4) | body length (8) | header | zeros | body

all little-endian. The part after the lengths is cut into pieces of `PIECE` bytes, each followed by its crc32 (4): a long frame
is written, sent and read piece by piece, and memory is taken as pieces arrive, not as announced.

Arrays are extensions that hold (dtype, shape, offset, length), and lie 8-byte aligned in the body, so that decoding a frame of
one piece copies nothing. Small records are extensions that hold their name and fields; rollouts, batches and episodes travel as
columns (`headrace.records.columns`). Every size is checked before memory is allocated, and records check themselves, so
malformed bytes raise `WireError` and never another error.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import msgpack
import numpy as np

from headrace.records.sampling import InfraAbort, Invalid, Sampling, SamplingMask, Scored
from headrace.records.weight_update import Manifest, Part, WeightUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from headrace.records.validate import Array

SCHEMA = 5
"""Rises when old frames can no longer be read."""
PIECE = 8 << 20
"""Bytes that are checksummed, sent and read at once, some 10 ms of work."""
MAX_FRAME = 64 << 30
"""Bytes; a frame that announces more is rejected unread."""
MAX_HEADER = 256 << 20
"""Bytes; likewise. Everything but arrays is in the header."""

_PREAMBLE = struct.Struct("<3sBIQ")
_CHECKSUM = struct.Struct("<I")
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
_MAX_RECORD_DEPTH = 8
"""Records within records; ours are two deep. More would cost C stack, which is not checked."""


class WireError(ValueError):
    """The bytes are not a frame this version can read; the message says why."""


class _Truncated(WireError):
    """The bytes end before the frame does."""


class Frame(NamedTuple):
    """An encoded value. Its pieces are made as they are taken, from arrays that must not change meanwhile."""

    num_bytes: int
    pieces: Iterator[bytes]


class wire_errors:
    """Turn any error that malformed data causes into a `WireError`. A class, because several are entered for every message."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, _MALFORMED):
            raise WireError(f"{self._what}: {error}") from error


def encode(value: object) -> bytes:
    """A whole frame of plain data, arrays and small records, nested in lists and dicts."""
    return b"".join(make_frame(value).pieces)


def make_frame(value: object) -> Frame:
    """`encode` for what may be long. What cannot be encoded raises here, before the first piece is made."""
    buffers: list[bytes | memoryview] = []
    size = 0

    def extension(item: object) -> msgpack.ExtType:
        nonlocal size
        if isinstance(item, np.ndarray):
            array = np.asarray(item, dtype=item.dtype.newbyteorder("<"), order="C")
            if array.dtype.str not in _DTYPES:
                raise WireError(f"arrays of {array.dtype} do not travel")
            padding = -size % 8
            buffers.extend((bytes(padding), array.reshape(-1).view(np.uint8).data))
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
    _, num_bytes = _checked_sizes(len(header), size, max_bytes=MAX_FRAME)
    preamble = _PREAMBLE.pack(_MAGIC, SCHEMA, len(header), size)
    return Frame(num_bytes, _pieces(preamble, [header, bytes(-len(header) % 8), *buffers]))


def _pieces(preamble: bytes, parts: list[bytes | memoryview]) -> Iterator[bytes]:
    taken: list[bytes | memoryview] = []
    room = PIECE
    for part in parts:
        rest = part
        while len(rest) > room:
            yield _sealed(preamble, [*taken, rest[:room]])
            preamble, taken, rest, room = b"", [], memoryview(rest)[room:], PIECE
        taken.append(rest)
        room -= len(rest)
    yield _sealed(preamble, taken)


def _sealed(preamble: bytes, parts: list[bytes | memoryview]) -> bytes:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([preamble, *parts, _CHECKSUM.pack(checksum)])


def decode(frame: bytes | memoryview, *, max_bytes: int = MAX_FRAME) -> Any:  # noqa: ANN401  (what was encoded)
    """Decode one complete frame, with nothing after it."""
    rest = memoryview(frame)

    def read(size: int) -> memoryview:
        nonlocal rest
        piece, rest = rest[:size], rest[size:]
        return piece

    value = _read_from(read, max_bytes=max_bytes)
    if rest:
        raise WireError(f"frame is followed by other bytes: {len(rest)} of {len(frame)}")
    return value


def read_frames(file: IO[bytes]) -> Iterator[Any]:
    """The values in a file of frames, without a last frame that a crash left incomplete."""
    while True:
        try:
            value = _read_from(file.read)
        except _Truncated:
            return
        yield value


def _read_from(read: Callable[[int], bytes | memoryview], *, max_bytes: int = MAX_FRAME) -> Any:  # noqa: ANN401
    reader = reading(max_bytes=max_bytes)
    wanted = next(reader)
    try:
        while True:
            piece = read(wanted)
            if len(piece) < wanted:
                raise _Truncated(f"frame is truncated: {len(piece)} bytes where {wanted} should follow")
            wanted = reader.send(piece)
    except StopIteration as end:
        return end.value


def reading(*, max_bytes: int = MAX_FRAME) -> Generator[int, bytes | memoryview, Any]:
    """Decode a frame from any source: yields how many bytes to send it next, and returns the value."""
    magic, schema, header_size, body_size = _PREAMBLE.unpack((yield _PREAMBLE.size))
    if magic != _MAGIC:
        raise WireError("not a Headrace frame: it does not begin with 'HRW'")
    if schema != SCHEMA:
        raise WireError(f"frame has schema {schema}, this version reads {SCHEMA}")
    total, _ = _checked_sizes(header_size, body_size, max_bytes=max_bytes)
    payload = yield from _read_piece(min(PIECE, total))
    if total > PIECE:
        whole = bytearray(payload)
        while len(whole) < total:
            whole += yield from _read_piece(min(PIECE, total - len(whole)))
        payload = memoryview(whole).toreadonly()
    with wire_errors("malformed frame"):
        return _revive(payload[:header_size], payload[total - body_size :])


def _read_piece(size: int) -> Generator[int, bytes | memoryview, memoryview]:
    piece = memoryview((yield size + _CHECKSUM.size))
    if _CHECKSUM.unpack(piece[size:])[0] != zlib.crc32(piece[:size]):
        raise WireError("checksum differs: the frame was changed in transit")
    return piece[:size]


def _checked_sizes(header_size: int, body_size: int, *, max_bytes: int) -> tuple[int, int]:
    """(bytes of header, zeros and body; of the whole frame). The body starts at a multiple of 8, to align its arrays."""
    total = header_size + -header_size % 8 + body_size
    num_bytes = _PREAMBLE.size + total + max(1, -(-total // PIECE)) * _CHECKSUM.size
    if header_size > MAX_HEADER or num_bytes > max_bytes:
        most = f"at most {max_bytes} are accepted, and {MAX_HEADER} of header"
        raise WireError(f"oversized frame: {num_bytes} bytes, {header_size} of them header; {most}")
    return total, num_bytes


def _read(packed: bytes | memoryview, extension: Callable[[int, bytes], Any]) -> Any:  # noqa: ANN401
    """Decode msgpack without bytes, with text for keys; `extension` makes values of our extensions."""
    return msgpack.unpackb(packed, ext_hook=extension, max_bin_len=0)


def _revive(packed: bytes | memoryview, body: memoryview, *, depth: int = 0) -> Any:  # noqa: ANN401
    if depth > _MAX_RECORD_DEPTH:
        raise WireError(f"records nested deeper than {_MAX_RECORD_DEPTH}")

    def extension(code: int, data: bytes) -> Any:  # noqa: ANN401
        if code == _ARRAY:
            return _revive_array(msgpack.unpackb(data), body)
        name, fields = _revive(data, body, depth=depth + 1)
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
    numbers: list[Any] = [*shape, offset, length] if isinstance(shape, list) and len(shape) <= 8 else [None]
    if set(map(type, numbers)) != {int} or min(numbers) < 0:
        raise WireError("an array's shape, offset and length must be whole numbers")
    count, kind = math.prod(shape), _DTYPES[dtype]
    if count * kind.itemsize != length or offset + length > len(body):
        raise WireError(f"an array of shape {shape} and {length} bytes at {offset} does not fit a body of {len(body)}")
    array = np.frombuffer(body, dtype=kind, count=count, offset=offset)
    return array if len(shape) == 1 else array.reshape(shape)
