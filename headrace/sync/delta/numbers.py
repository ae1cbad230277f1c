"""The arithmetic of `headrace.sync.delta`: which elements of a chunk differ and by how much, in few bytes.

A delta is two lists of numbers: gaps (how many elements lie between a changed element and the next) and distances (from the old
bits to the new, in units of the last place, numbered -1, +1, -2, +2 and so on). Most are small. Each is written in two or four
bits; the rest of those that do not fit follows in byte streams, lowest byte first. Several small numbers share a byte and zlib
gives frequent bytes short codes: fewer symbols than one code per number, and closer to the entropy. The low bits of large gaps
are practically random and are written uncoded.

The content of a chunk, in order:

    shift                  1 byte: how many low bits of the gaps are written uncoded, a multiple of 4
    low bits               for each 4 of them: two numbers to a byte, no length
    gaps >> shift          numbers
    distances              numbers

    numbers                1 byte: bits of small numbers (2 or 4), stream, 1 byte: how many streams follow, those streams
    stream                 4 bytes: its length, and that many bytes: uncoded if of the size the reader expects, else raw deflate

The decoded size of a stream is never read from the blob: it follows from the number of changes and, for numbers that did not
fit, from how many small numbers have the largest value.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import SyncError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Integers = NDArray[Any]

_WIDTHS = (2, 4)  # bits of small numbers. Their largest value means "this or more".
_WIDEST_GAP = 32  # mean gap from which four low bits are written uncoded; four more at each factor of 16
_LARGEST_SHIFT = 28
_SAMPLE = 1 << 10  # bytes from the middle of a stream
_WORTHWHILE = 0.9  # streams are coded only if they shrink to this: coding takes as long as everything else together
_LENGTH = struct.Struct("<I")
_PIECE = 1 << 21  # elements compared at a time


@dataclass(frozen=True)
class Changes:
    """The changed elements of a chunk: [n] int64 positions, ascending, with their old and new bits [n] as int16 or int32."""

    positions: Integers
    base: Integers
    now: Integers


def find(base: Integers, now: Integers) -> Changes:
    """Compare bits on a CPU, in pieces that fit its caches."""
    mask = np.empty(min(_PIECE, len(base)) * base.itemsize // 8, np.bool_)  # shared by all pieces: fresh memory is slow
    pieces = [_find_piece(base, now, start, mask) for start in range(0, len(base), _PIECE)]
    joined = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
    return Changes(*joined)


def _find_piece(base: Integers, now: Integers, start: int, mask: NDArray[np.bool_]) -> tuple[Integers, Integers, Integers]:
    """Compare words of eight bytes, then only the elements of words that differ."""
    old, new = base[start : start + _PIECE], now[start : start + _PIECE]
    power = 1 if base.itemsize == 4 else 2
    whole = len(old) >> power << power
    old_words, new_words = old[:whole].view(np.int64), new[:whole].view(np.int64)
    words = _nonzero(np.not_equal(old_words, new_words, out=mask[: len(old_words)]))
    old_lanes, new_lanes = (each.take(words, mode="clip").view(old.dtype) for each in (old_words, new_words))
    picked = np.flatnonzero(old_lanes != new_lanes)
    positions = _places(words, picked, power)
    positions += start
    found = positions, old_lanes.take(picked, mode="clip"), new_lanes.take(picked, mode="clip")
    if whole == len(old):
        return found
    rest = np.flatnonzero(old[whole:] != new[whole:]) + whole
    last = rest + start, old[rest], new[rest]
    positions, olds, news = (np.concatenate(parts) for parts in zip(found, last, strict=True))
    return positions, olds, news


def _nonzero(mask: NDArray[np.bool_]) -> Integers:
    """`np.flatnonzero` for a mask that is mostly False: three times as fast, by testing eight at once first."""
    whole = len(mask) >> 3 << 3
    eights = mask[:whole].view(np.int64)
    groups = np.flatnonzero(eights != 0)
    found = _places(groups, np.flatnonzero(eights.take(groups, mode="clip").view(np.bool_)), 3)
    return found if whole == len(mask) else np.concatenate([found, np.flatnonzero(mask[whole:]) + whole])


def _places(groups: Integers, picked: Integers, power: int) -> Integers:
    """Turn indices into the listed groups, of 2**power elements each, into indices into all groups."""
    places: Integers = groups.take(picked >> power, mode="clip")
    places <<= power
    places += picked & (1 << power) - 1
    return places


def find_on_device(base: Tensor, now: Tensor) -> Changes:
    """Compare with torch on the tensors' device; return the changes on the CPU."""
    positions = (base != now).nonzero().squeeze(1)
    return Changes(positions.cpu().numpy(), base[positions].cpu().numpy(), now[positions].cpu().numpy())


def write_changes(changes: Changes) -> bytes:
    """Encode the content of a chunk with at least one change."""
    positions = changes.positions.astype(np.uint32)
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + np.uint32(1)
    shift, mean = 0, (int(positions[-1]) + 1) / len(positions)
    while mean >= _WIDEST_GAP << shift:
        shift += 4
    parts = [bytes([shift])]
    for low in range(0, shift, 4):
        parts.append(_pack((gaps >> np.uint32(low)).astype(np.uint8) & np.uint8(15), 4).tobytes())
    parts += _write_numbers(gaps >> np.uint32(shift) if shift else gaps, 4)
    bits = 8 * changes.now.itemsize - 1
    unsigned = np.dtype(f"u{changes.now.itemsize}")
    difference = changes.now - changes.base
    numbers = ((difference << 1) ^ (difference >> bits)).view(unsigned) - unsigned.type(1)
    is_small = 4 * np.count_nonzero(numbers < 3) > 3 * len(numbers)  # late in a run; early, small weights move further
    parts += _write_numbers(numbers, 2 if is_small else 4)
    return b"".join(parts)


def read_changes(data: memoryview, count: int, itemsize: int, size: int) -> tuple[Integers, Integers]:
    """Return the positions of `count` changes among `size` elements, and what to add to each. Checks everything it reads."""
    reader = Reader(data)
    shift = reader.take(1)[0]
    if not 0 < count <= size or shift > _LARGEST_SHIFT or shift % 4:
        raise SyncError(f"a delta claims {count} changes with shift {shift} among {size} elements")
    lows = [_unpack(np.frombuffer(reader.take(_packed_size(count, 4)), np.uint8), count, 4) for _ in range(0, shift, 4)]
    gaps = _read_numbers(reader, count, np.dtype(np.uint32), limit=size >> shift)
    if shift:
        gaps <<= np.uint32(shift)
    for place, low in enumerate(lows):
        gaps |= low.astype(np.uint32) << np.uint32(4 * place)
    gaps += np.uint32(1)
    positions = np.cumsum(gaps, dtype=np.int64)
    positions -= 1
    if positions[-1] >= size:
        raise SyncError(f"a delta changes element {positions[-1]} of {size}")
    unsigned = np.dtype(f"u{itemsize}")
    numbers = _read_numbers(reader, count, unsigned, limit=(1 << 8 * itemsize) - 2)
    reader.close()
    numbers += unsigned.type(1)
    signed = np.dtype(f"i{itemsize}")
    return positions, (numbers >> unsigned.type(1)).view(signed) ^ -(numbers & unsigned.type(1)).view(signed)


def _write_numbers(numbers: Integers, width: int) -> list[bytes]:
    """Write `width` bits of each unsigned number, then the rest of larger ones in as many byte streams as the largest needs."""
    escape = numbers.dtype.type((1 << width) - 1)
    parts = [bytes([width]), *_deflate(_pack(np.minimum(numbers, escape).astype(np.uint8), width))]
    large = numbers.take(_nonzero(numbers >= escape), mode="clip")
    large -= escape
    planes = -(-int(large.max()).bit_length() // 8) if len(large) else 0
    parts.append(bytes([planes]))
    for place in range(planes):
        parts += _deflate((large >> large.dtype.type(8 * place)).astype(np.uint8))
    return parts


def _read_numbers(reader: Reader, count: int, dtype: np.dtype[Any], *, limit: int) -> Integers:
    """Read `count` numbers; none may exceed `limit`."""
    width = reader.take(1)[0]
    if width not in _WIDTHS:
        raise SyncError(f"a delta has numbers of {width} bits; known are {', '.join(map(str, _WIDTHS))}")
    small = _unpack(_inflate(reader, _packed_size(count, width)), count, width)
    numbers: Integers = small.astype(dtype)
    planes = reader.take(1)[0]
    if planes > dtype.itemsize:
        raise SyncError(f"a delta has numbers of {planes} bytes where {dtype.itemsize} is the most")
    escape = (1 << width) - 1
    escaped = _nonzero(small == escape)
    large = np.full(len(escaped), escape, np.uint64)
    for place in range(planes):
        large += _inflate(reader, len(escaped)).astype(np.uint64) << np.uint64(8 * place)
    if len(large) and int(large.max()) > limit:
        raise SyncError(f"a delta has a number {large.max()} where {limit} is the most")
    numbers[escaped] = large.astype(dtype)
    return numbers


def _packed_size(count: int, width: int) -> int:
    return -(-count * width // 8)


def _pack(small: Integers, width: int) -> Integers:
    """Pack 8 ÷ width numbers to a byte. The first run of numbers gets the lowest bits of all bytes, the next run the bits
    above, and so on, so that whole runs are shifted at once."""
    run = _packed_size(len(small), width)
    packed = small[:run].copy()
    for place in range(1, 8 // width):
        part = small[place * run : (place + 1) * run]
        packed[: len(part)] |= part << np.uint8(place * width)
    return packed


def _unpack(packed: Integers, count: int, width: int) -> Integers:
    small = np.empty((8 // width, len(packed)), np.uint8)
    for place in range(8 // width):
        np.right_shift(packed, np.uint8(place * width), out=small[place])
    small &= np.uint8((1 << width) - 1)
    return small.reshape(-1)[:count]


def _deflate(octets: Integers) -> list[bytes]:
    """Write a length and that many bytes; uncoded if a sample shows that coding would gain little."""
    size = octets.size
    start = (size - _SAMPLE) // 2
    if size > 8 * _SAMPLE and len(_codes(octets[start : start + _SAMPLE])) > _WORTHWHILE * _SAMPLE:
        coded = octets.tobytes()
    else:
        coded = _codes(octets)
        if len(coded) >= size:
            coded = octets.tobytes()
    return [_LENGTH.pack(len(coded)), coded]


def _codes(octets: Integers) -> bytes:
    """Huffman coding and runs only: a window search would find nothing."""
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return coder.compress(octets.data) + coder.flush()


def _inflate(reader: Reader, size: int) -> Integers:
    """Read exactly `size` bytes; never allocates more, whatever the stream would expand to."""
    (length,) = _LENGTH.unpack(reader.take(_LENGTH.size))
    coded = reader.take(length)
    if length == size:
        return np.frombuffer(coded, np.uint8)
    if length > size:
        raise SyncError(f"a delta has {length} bytes for a stream of {size}")
    coder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        plain = coder.decompress(coded, size)  # size > length ≥ 0: 0 would mean no limit
        rest = b"" if coder.eof else coder.decompress(coder.unconsumed_tail, 1)
    except zlib.error as error:
        raise SyncError(f"a delta has a damaged stream: {error}") from error
    if len(plain) != size or rest or not coder.eof or coder.unused_data:
        raise SyncError(f"a delta has a stream that does not hold the {size} bytes it should")
    return np.frombuffer(plain, np.uint8)


class Reader:
    """Reads bytes in order. Reading past the end, or closing before it, is an error."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> memoryview:
        if length > len(self._data) - self._at:
            raise SyncError(f"a delta ends {length - (len(self._data) - self._at)} bytes too early")
        self._at += length
        return self._data[self._at - length : self._at]

    def close(self) -> None:
        if self._at != len(self._data):
            raise SyncError(f"a delta has {len(self._data) - self._at} bytes too many")
