"""A delta brings weights from one version to the next bit for bit, is small, and what cannot be read is refused."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from headrace.errors import SyncError
from headrace.sync.delta import codec as delta, numbers
from tests.strategies import quick, seeds

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
ODD_BITS = {
    torch.int16: [0, -32768, 1, -32767, 0x7F80, 0x7FC0, 0x7F81, -1, 0x7FFF, 0x7C00, -128],
    torch.int32: [0, -(2**31), 1, 1 - 2**31, 0x7F800000, 0x7FC00000, 0x7F800001, -1, 2**31 - 1, -8388608, 2**30],
}
"""Zeros, infinities, NaNs of several kinds, the smallest numbers, and all bits."""


def random_flat(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul(0.02).to(dtype)


def with_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.clone().view(dtype)


def stepped(base: torch.Tensor, share: float, seed: int, *, ulps: int = 1) -> torch.Tensor:
    """About `share` of the elements moved by up to `ulps` units in the last place, as an optimizer's step does."""
    random = np.random.default_rng(seed)
    moved = random.random(base.numel()) < share
    by = random.integers(1, ulps + 1, base.numel()) * random.choice([-1, 1], base.numel())
    bits = base.view(BITS[base.dtype])
    return with_bits(bits + torch.from_numpy(moved * by).to(bits.dtype), base.dtype)


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(BITS[one.dtype]), other.view(BITS[other.dtype]))


def carried(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The blob, after it was seen to give what it should and to leave the base alone."""
    before = [base.clone() for base, _ in pairs]
    blob = delta.encode(pairs)
    held = [base.clone() for base, _ in pairs]
    delta.apply(blob, held)
    for (base, now), kept, got in zip(pairs, before, held, strict=True):
        assert bits_equal(got, now)
        assert bits_equal(base, kept)
    return blob


def num_changed(blob: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(chunk.num_changed for chunk in delta._parse(blob.numpy().data, [base for base, _ in pairs]))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred elements are several chunks of several pieces."""
    monkeypatch.setattr(delta, "CHUNK", 96)
    monkeypatch.setattr(numbers, "_PIECE", 40)


@pytest.fixture(params=["cpu", "as on a GPU"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of finding and writing changes; the second is torch's alone and runs on any device."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(delta, "_is_on_gpu", lambda tensor: True)
        monkeypatch.setattr(delta, "_CHUNKS_ON_GPU", 2)


@st.composite
def versions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two versions of one flat: any bits, with any share of them changed by little or by anything."""
    dtype = draw(st.sampled_from(list(BITS)))
    size = draw(st.integers(0, 400))
    share = draw(st.sampled_from([0.0, 0.004, 0.05, 0.5, 1.0]))
    random = np.random.default_rng(draw(seeds))
    integers = np.int16 if dtype.itemsize == 2 else np.int32
    base = torch.from_numpy(np.frombuffer(random.bytes(size * dtype.itemsize), integers).copy())
    if draw(st.booleans()):
        return base.view(dtype), stepped(base.view(dtype), share, draw(seeds), ulps=draw(st.sampled_from([1, 40, 2**15])))
    other = torch.from_numpy(np.frombuffer(random.bytes(size * dtype.itemsize), integers).copy())
    return base.view(dtype), torch.where(torch.from_numpy(random.random(size) < share), other, base).view(dtype)


@pytest.mark.parametrize("device", ["cpu", "as on a GPU"])
@given(pairs=st.lists(versions(), max_size=3))
@quick
def test_any_two_versions_are_carried_bit_for_bit(device: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK", 96)
        patch.setattr(numbers, "_PIECE", 40)
        if device != "cpu":
            patch.setattr(delta, "_is_on_gpu", lambda tensor: True)
            patch.setattr(delta, "_CHUNKS_ON_GPU", 2)
        blob = carried(pairs)
        changed = sum(int((b.view(BITS[b.dtype]) != n.view(BITS[n.dtype])).sum()) for b, n in pairs)
        assert num_changed(blob, pairs) == changed
        chunks = sum(max(1, -(-now.numel() // 96)) for _, now in pairs)
        assert blob.numel() <= sum(now.nbytes for _, now in pairs) + 4 + 9 * chunks


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 1.0])
def test_sparse_and_dense_changes_over_several_chunks(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "CHUNK", 1 << 16)
    base = random_flat((1 << 17) + 4097, dtype, 1)
    blob = carried([(base, stepped(base, share, 2))])
    assert blob.numel() < base.nbytes / 5


@pytest.mark.usefixtures("place", "small_chunks")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 39, 41, 95, 96, 97, 291])
def test_one_change_anywhere(dtype: torch.dtype, size: int) -> None:
    base = random_flat(size, dtype, 3)
    for place in {0, size // 2, size - 1}:
        now = base.clone()
        now.view(BITS[dtype])[place] ^= 1
        assert num_changed(carried([(base, now)]), [(base, now)]) == 1


@pytest.mark.parametrize("dtype", BITS)
def test_odd_numbers_keep_their_bits(dtype: torch.dtype) -> None:
    odd = torch.tensor(ODD_BITS[BITS[dtype]], dtype=BITS[dtype])
    base, now = odd.repeat_interleave(len(odd)), odd.repeat(len(odd))
    pairs = [(with_bits(base, dtype), with_bits(now, dtype))]
    assert num_changed(carried(pairs), pairs) == len(odd) * (len(odd) - 1)  # NaN is not changed by being NaN; -0.0 is not 0.0


def test_nothing_at_all() -> None:
    carried([])
    carried([(torch.zeros(0), torch.zeros(0)), (torch.ones(3), torch.ones(3))])


def test_memory_that_is_not_aligned() -> None:
    base = random_flat(1001, torch.bfloat16, 4)[1:]
    now = stepped(random_flat(1003, torch.bfloat16, 4)[3:], 0.1, 5)
    carried([(base, now)])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_blob_does_not_depend_on_threads_or_device(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "CHUNK", 1 << 12)
    base = random_flat(50_001, torch.bfloat16, 6)
    pairs = [(base, stepped(base, 0.02, 7)), (base.float(), stepped(base.float(), 0.9, 8, ulps=30))]
    one = delta.encode(pairs, threads=1)
    assert torch.equal(one, delta.encode(pairs, threads=threads))
    monkeypatch.setattr(delta, "_is_on_gpu", lambda tensor: True)
    assert torch.equal(one, delta.encode(pairs, threads=threads))


@pytest.mark.parametrize(("share", "most"), [(0.0001, 21.0), (0.001, 15.0), (0.01, 10.7), (0.1, 6.4), (0.5, 3.7)])
def test_bits_per_change_are_near_the_entropy(share: float, most: float) -> None:
    """Of steps of one unit either way: log2 of the places a change may be at, and one bit for its sign."""
    base = random_flat(1 << 21, torch.bfloat16, 9)
    now = stepped(base, share, 10)
    blob = carried([(base, now)])
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share + 1
    assert entropy < 8 * blob.numel() / num_changed(blob, [(base, now)]) < most


def test_noise_is_sent_as_it_is() -> None:
    bits = torch.from_numpy(np.random.default_rng(0).integers(-(2**15), 2**15, (2, 100_000), dtype=np.int16))
    blob = carried([(bits[0].view(torch.float16), bits[1].view(torch.float16))])
    assert blob.numel() < 200_000 + 64


# What arrives damaged. Bits that are flipped may give other weights, which the manifest's checksums find.


def small_case() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A blob with all kinds of chunk, and the versions before."""
    base, wide = random_flat(300, torch.bfloat16, 11), random_flat(40, torch.float32, 12)
    now = base.clone()
    now[100:196] = stepped(base, 0.2, 13, ulps=300)[100:196]
    now[200:] = random_flat(100, torch.bfloat16, 14)
    return delta.encode([(base, now), (wide, stepped(wide, 0.5, 15))]), [base, wide]


@pytest.mark.usefixtures("small_chunks")
def test_a_blob_cut_or_lengthened_anywhere_is_refused() -> None:
    blob, held = small_case()
    assert {chunk.kind for chunk in delta._parse(blob.numpy().data, held)} == {0, 1, 2}
    for length in range(blob.numel()):
        with pytest.raises(SyncError):
            delta.apply(blob[:length], [flat.clone() for flat in held])
    with pytest.raises(SyncError, match="too many"):
        delta.apply(torch.cat([blob, blob[:1]]), [flat.clone() for flat in held])


@pytest.mark.usefixtures("small_chunks", "place")
def test_contents_that_lie_are_refused_or_in_bounds() -> None:
    """Whoever sends them: nothing but SyncError comes out, and nothing beside the weights is written."""
    blob, held = small_case()
    refused = 0
    for place in range(blob.numel()):
        for value in {0, 1, 2, 15, 127, 255} - {int(blob[place])}:
            lying = blob.clone()
            lying[place] = value
            guarded = [torch.cat([flat, flat, flat]) for flat in held]
            try:
                delta.apply(lying, [flat[flat.numel() // 3 : 2 * flat.numel() // 3] for flat in guarded])
            except SyncError:
                refused += 1
            for flat, own in zip(guarded, held, strict=True):
                size = own.numel()
                assert bits_equal(flat[:size], own) and bits_equal(flat[2 * size :], own)
    assert refused > 500


def one_chunk(content: bytes, *, num_changed: int) -> torch.Tensor:
    """A blob of one flat whose one chunk has this content."""
    return torch.frombuffer(bytearray(b"HRD2" + struct.pack("<BII", 1, num_changed, len(content)) + content), dtype=torch.uint8)


def coded(octets: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = coder.compress(octets) + coder.flush()
    return struct.pack("<I", len(stream)) + stream


def stored(octets: bytes) -> bytes:
    return struct.pack("<I", len(octets)) + octets


GAPS = bytes([1]) + stored(b"\x01\x02")  # one plane: 1 and 2
VALUES = bytes([1]) + stored(b"\x00\x01")  # the first is -1, the second +1


def test_the_format_is_what_it_says() -> None:
    """Elements 1 and 4 of 8 move by the first two distances; written by hand, so that the format cannot drift."""
    held = torch.zeros(8, dtype=torch.bfloat16)
    delta.apply(one_chunk(GAPS + VALUES, num_changed=2), [held])
    assert held.view(torch.int16).tolist() == [0, -1, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("content", "num_changed", "said"),
    [
        (GAPS + VALUES, 3, "."),
        (GAPS + VALUES, 0, "."),
        (GAPS + VALUES, 9, "9 changes of 6 elements"),
        (GAPS + VALUES, 2**32 - 1, "changes of 6"),
        (GAPS + VALUES + b"\0", 2, "2 changes of 6 elements in 15 bytes"),
        (GAPS + VALUES[:-1], 2, "."),
        (GAPS, 2, "."),
        (bytes([1]) + stored(b"\x01\x04") + VALUES, 2, "2 changes of 6 elements"),
        (bytes([5]) + GAPS[1:] + VALUES, 2, "numbers of 5 bytes"),
        (GAPS + bytes([3]) + VALUES[1:], 2, "numbers of 3 bytes"),
        (bytes([1]) + coded(bytes(100)) + VALUES, 2, "does not hold the 2 bytes"),
        (bytes([1]) + stored(b"\xff\xff\xff") + VALUES, 2, "."),
    ],
)
def test_a_claim_that_cannot_be_is_refused(content: bytes, num_changed: int, said: str) -> None:
    held = torch.zeros(6, dtype=torch.bfloat16)
    with pytest.raises(SyncError, match=said):
        delta.apply(one_chunk(content, num_changed=num_changed), [held])
    assert not held.view(torch.int16).any()


def test_a_plane_that_would_grow_beyond_its_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb of zeros: 64 MB from a few ten KB."""
    count, grown, real = 1 << 20, list[int](), zlib.decompressobj

    class Watched:
        def __init__(self, bits: int) -> None:
            self._real = real(bits)

        def decompress(self, data: bytes, size: int) -> bytes:
            grown.append(len(found := self._real.decompress(data, size)))
            return found

    monkeypatch.setattr(zlib, "decompressobj", Watched)
    content = bytes([1]) + coded(bytes(1 << 26)) + bytes([0])
    with pytest.raises(SyncError, match="does not hold the 1048576 bytes"):
        delta.apply(one_chunk(content, num_changed=count), [torch.zeros(count, dtype=torch.bfloat16)])
    assert grown == [count + 1]


@pytest.mark.parametrize("count", [0, 2])
def test_a_delta_of_more_or_fewer_weights_is_refused(count: int) -> None:
    base = random_flat(5000, torch.bfloat16, 20)
    with pytest.raises(SyncError, match="another layout"):
        delta.apply(delta.encode([(base, stepped(base, 0.05, 21))]), [base.clone() for _ in range(count)])


@pytest.mark.parametrize("blob", [torch.zeros(0, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8), torch.zeros(100)])
def test_what_is_no_delta_is_refused(blob: torch.Tensor) -> None:
    with pytest.raises(SyncError):
        delta.apply(blob, [])
