"""The arithmetic of `headrace.sync.delta`: which elements of a chunk differ and by how much, in few bytes.

A delta is two lists of numbers: gaps (how many elements lie between a changed element and the next) and distances (from the old
bits to the new, in units of the last place, numbered -1, +1, -2, +2 and so on). Most are small. Each list is written as byte
planes, the lowest bytes of all numbers first, as many as the largest number needs. zlib gives frequent bytes short codes, and
runs of zeros almost none; planes that are practically random are written uncoded.

    chunk                  gaps, distances
    list                   1 byte: the number of planes, then each of them
    plane                  4 bytes: its length, and that many bytes: uncoded if as many as there are changes, else raw deflate
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    Integers = NDArray[Any]

_SAMPLE = 1 << 10  # bytes from the middle of a plane
_WORTHWHILE = 0.9  # planes are coded only if they shrink to this: coding takes as long as everything else together
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
    pieces = [_find_piece(base, now, start, mask) for start in range(0, max(1, len(base)), _PIECE)]
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
    gaps = np.diff(changes.positions, prepend=-1).astype(np.uint32) - np.uint32(1)
    unsigned, bits = np.dtype(f"u{changes.now.itemsize}"), 8 * changes.now.itemsize - 1
    difference = changes.now - changes.base
    distances = ((difference << 1) ^ (difference >> bits)).view(unsigned) - unsigned.type(1)
    return b"".join([*_write_numbers(gaps), *_write_numbers(distances)])


def read_changes(data: memoryview, count: int, itemsize: int, size: int) -> tuple[Integers, Integers]:
    """Return the positions of `count` changes among `size` elements, and what to add to each. Raises `ValueError` or what
    `struct` and `zlib` raise if the content is none of these."""
    gaps, at = _read_numbers(data, 0, count, np.dtype(np.uint32))
    unsigned, signed = np.dtype(f"u{itemsize}"), np.dtype(f"i{itemsize}")
    distances, at = _read_numbers(data, at, count, unsigned)
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(count)
    if not count or positions[-1] >= size or at != len(data):
        raise ValueError(f"{count} changes of {size} elements in {len(data)} bytes")
    distances += unsigned.type(1)
    return positions, (distances >> unsigned.type(1)).view(signed) ^ -(distances & unsigned.type(1)).view(signed)


def _write_numbers(numbers: Integers) -> Iterator[bytes]:
    num_planes = -(-int(numbers.max()).bit_length() // 8)
    yield bytes([num_planes])
    for place in range(num_planes):
        coded = _deflate((numbers >> numbers.dtype.type(8 * place)).astype(np.uint8))
        yield _LENGTH.pack(len(coded))
        yield coded


def _read_numbers(data: memoryview, at: int, count: int, dtype: np.dtype[Any]) -> tuple[Integers, int]:
    """Return `count` numbers, and where what follows them begins."""
    numbers: Integers = np.zeros(count, dtype)
    num_planes, at = data[at], at + 1
    if num_planes > dtype.itemsize:
        raise ValueError(f"numbers of {num_planes} bytes where {dtype.itemsize} is the most")
    for place in range(num_planes):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        plane = _inflate(data[at - length : at], count)
        numbers |= plane.astype(dtype) << dtype.type(8 * place)
    return numbers, at


def _deflate(plane: Integers) -> bytes:
    """Coded, unless a sample shows that coding would gain little."""
    start = (len(plane) - _SAMPLE) // 2
    if len(plane) > 8 * _SAMPLE and len(_codes(plane[start : start + _SAMPLE])) > _WORTHWHILE * _SAMPLE:
        return plane.tobytes()
    coded = _codes(plane)
    return coded if len(coded) < len(plane) else plane.tobytes()


def _codes(octets: Integers) -> bytes:
    """Huffman coding and runs only: a window search would find nothing."""
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return coder.compress(octets.data) + coder.flush()


def _inflate(coded: memoryview, size: int) -> Integers:
    """Exactly `size` bytes; never allocates more than one beyond, whatever the plane would expand to."""
    plain = coded if len(coded) == size else zlib.decompressobj(-zlib.MAX_WBITS).decompress(coded, size + 1)
    if len(plain) != size:
        raise ValueError(f"a plane does not hold the {size} bytes it should")
    return np.frombuffer(plain, np.uint8)
