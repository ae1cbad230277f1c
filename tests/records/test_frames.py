"""Frames carry every value unchanged, and bytes that are not a frame give a `WireError` and nothing else, quickly."""

from __future__ import annotations

import ast
import gc
import io
import random
import struct
import time
import tracemalloc
import weakref
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from strategies import arrays, names, plain, quick, small_records, weight_updates

import headrace
from headrace.records import (
    Batch,
    Call,
    Episode,
    FinishReason,
    InfraAbort,
    Part,
    Rollout,
    Sampling,
    SamplingMask,
    Scored,
    Source,
    TensorInfo,
    WeightUpdate,
    frames,
    pack_batch,
    pack_episodes,
    pack_rollouts,
    unpack_batch,
    unpack_episodes,
    unpack_rollouts,
)
from headrace.records.frames import WireError, decode, encode, read_frames

PREAMBLE = struct.Struct("<3sBIQ")


def seal(header: object, body: bytes = b"", *, schema: int = frames.SCHEMA) -> bytes:
    """A frame of one piece whose checksum is right whatever it holds; `header` is packed unless it is bytes already."""
    packed = header if isinstance(header, bytes) else msgpack.packb(closed(header), use_bin_type=True)
    payload = packed + bytes(-len(packed) % 8) + body
    return PREAMBLE.pack(b"HRW", schema, len(packed), len(body)) + payload + struct.pack("<I", zlib.crc32(payload))


def opened(frame: bytes) -> tuple[dict, bytes]:
    """A frame's header and body, to be changed and sealed again. Extensions are shown as dicts with the key $array or
    $record."""

    def show(code: int, data: bytes) -> dict:
        content = msgpack.unpackb(data, ext_hook=show)
        return {"$array": content} if code == frames._ARRAY else {"$record": content[0], **content[1]}

    header_size = PREAMBLE.unpack_from(frame)[2]
    payload = frame[PREAMBLE.size : -4]
    return msgpack.unpackb(payload[:header_size], ext_hook=show), payload[header_size + -header_size % 8 :]


def closed(item: object) -> object:
    """The inverse: extensions for the dicts that show them."""
    if isinstance(item, list):
        return [closed(entry) for entry in item]
    if not isinstance(item, dict):
        return item
    if item.keys() == {"$array"}:
        return msgpack.ExtType(frames._ARRAY, msgpack.packb(closed(item["$array"])))
    fields = {key: closed(entry) for key, entry in item.items() if key != "$record"}
    if "$record" not in item:
        return fields
    return msgpack.ExtType(frames._RECORD, msgpack.packb([closed(item["$record"]), fields]))


def make_rollout(id: str) -> Rollout:
    """Two turns, the first resumed, with every optional field there."""
    sampling = Sampling(temperature=0.5, top_k=4, stop_ids=(2,), stop=("</a>",), seed=2**40)
    spans = ((2, 3, "abort"), (3, 4, "stop"), (6, 7, "length"))
    kinds = [Source.PROMPT] * 2 + [Source.SAMPLED] * 2 + [Source.TOOL, Source.TEMPLATE, Source.SAMPLED]
    sampled = np.array([kind is Source.SAMPLED for kind in kinds])
    return Rollout(
        id=id,
        episode="e",
        group="g",
        index=1,
        lineage="a1",
        parent=("r0", 3),
        token_ids=np.arange(7),
        source=np.array(kinds),
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.25, 0),
        versions=np.where(sampled, 5, -1),
        calls=tuple(
            Call(start=i, stop=j, engine="x", sampling=sampling, finish_reason=FinishReason(reason), started=1.5, finished=2.5)
            for i, j, reason in spans
        ),
        finish_reason=FinishReason.LENGTH,
        expert_routing=np.ones((7, 2, 1), dtype=np.int16),
        sampling_mask=SamplingMask.from_rows([np.arange(3 * kind) for kind in sampled]),
        rewards={"right": 1.0},
        step_rewards=((3, 0.5),),
        columns={"values": np.zeros((7, 2), dtype=np.float16)},
        outcome=Scored(1.0),
    )


def make_records() -> dict[str, object]:
    """One record of each kind, with something in every field."""
    members = (make_rollout("r1"), make_rollout("r2"))
    ones = (np.ones(7, dtype=np.float32),) * 2
    tensor = TensorInfo(name="w", shape=(2, 3), dtype="float32", num_bytes=24, checksum=2**63)
    part = Part(transport="files", key="7-0", place={"file": "w", "bytes": 9}, num_bytes=24, ranges=(("w", 0, 6),))
    task = {"prompt": [{"role": "user", "content": "hé"}], "answer": None, "n": -1}
    return {
        "Rollout": members[0],
        "Episode": Episode(id="e", group="g", task=task, rollouts=members, outcome=InfraAbort("worker died")),
        "Batch": Batch(
            rollouts=members,
            advantages=ones,
            weights=ones,
            loss="grpo",
            constants={"c": 0.2},
            corrections={"tis": {}},
            version=6,
        ),
        "WeightUpdate": WeightUpdate(
            policy="policy",
            lineage="a1",
            version=7,
            payload="adapter",
            adapter={"r": 8, "on": ["q"]},
            manifest=(tensor,),
            parts=(part,),
        ),
    }


@pytest.fixture(scope="module")
def rich() -> dict[str, object]:
    return make_records()


KINDS = ["Rollout", "Episode", "Batch", "WeightUpdate"]


def packed(record: object) -> object:
    """A record in the form it travels in."""
    if isinstance(record, Rollout):
        return pack_rollouts([record])
    if isinstance(record, Episode):
        return pack_episodes([record])
    return pack_batch(record) if isinstance(record, Batch) else record


def unpacked(kind: str, value: object) -> object:
    """The record that was packed."""
    if kind == "Rollout":
        return unpack_rollouts(value)[0]
    if kind == "Episode":
        return unpack_episodes(value)[0]
    return unpack_batch(value) if kind == "Batch" else value


# Whatever goes in comes out


@given(weight_updates())
@quick
def test_a_weight_update_comes_out_as_it_went_in(update: WeightUpdate) -> None:
    copy = decode(encode(update))
    assert type(copy) is WeightUpdate
    assert copy == update


@given(
    st.recursive(small_records | plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
)
@quick
def test_nested_lists_and_dicts_of_records_come_out_as_they_went_in(value) -> None:
    assert decode(encode(value)) == value


@given(arrays())
@quick
def test_an_array_comes_out_as_it_went_in(array: np.ndarray) -> None:
    copy = decode(encode({"array": array}))["array"]
    assert (copy.dtype, copy.shape, copy.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    "array",
    [np.arange(12.0).reshape(3, 4).T, np.arange(12)[::2], np.arange(5, dtype=">i4"), np.broadcast_to(np.int16(3), (2, 2))],
    ids=["transposed", "strided", "big-endian", "broadcast"],
)
def test_an_array_travels_however_it_lies_in_memory(array: np.ndarray) -> None:
    copy = decode(encode(array))
    assert copy.dtype == array.dtype.newbyteorder("<")
    assert np.array_equal(copy, array)


def test_plain_types_and_their_subclasses() -> None:
    value = decode(encode([FinishReason.STOP, Source.TOOL, np.float64(0.5), True, (1, 2)]))
    assert value == ["stop", 2, 0.5, True, [1, 2]]
    assert [type(item) for item in value] == [str, int, float, bool, list]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        b"bytes",
        {1, 2},
        1j,
        np.array([None]),
        np.array(["text"]),
        np.zeros(2, dtype=complex),
        {1: 2},
        make_rollout("r"),
        2**64,
        -(2**63) - 1,
        "\ud800",
        np.int64(3),
    ],
    ids=lambda value: type(value).__name__ if type(value) is object else repr(value),
)
def test_what_does_not_travel_is_refused_when_it_is_encoded(value) -> None:
    with pytest.raises(WireError):
        encode(value)
    with pytest.raises(WireError):
        encode([{"inside": value}])


def nested(depth: int, innermost: object) -> object:
    for _ in range(depth):
        innermost = [innermost]
    return innermost


@pytest.mark.parametrize("innermost", [1, [], np.zeros(2)], ids=["number", "list", "array"])
def test_what_can_be_encoded_can_be_decoded_at_any_depth(innermost) -> None:
    num_carried = 0
    for depth in range(1021, 1028):
        try:
            frame = encode(nested(depth, innermost))
        except WireError:
            continue
        assert encode(decode(frame)) == frame, f"depth {depth}"
        num_carried += 1
    assert 1 <= num_carried < 7  # some are carried and some refused


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x", "schema": {"$ref": "#/definitions/a"}},
        {"prompt": "x", "answer": 2**70},
        {"prompt": "\ud83d"},
        {"prompt": "x", "tree": nested(59, 1)},
        {"prompt": "x", "tree": nested(1029, 1)},
    ],
    ids=["JSON schema", "large number", "half a surrogate pair", "deep", "deeper"],
)
def test_an_episode_that_can_be_made_can_travel(row) -> None:
    """A row is refused when tasks are opened or it is carried: a checkpoint hours later must not be where it fails."""
    try:
        episode = Episode(id="e", group="g", task=row)
    except ValueError:
        return
    assert unpack_episodes(decode(encode(pack_episodes([episode])))) == [episode]


def test_decoding_copies_no_array(rich) -> None:
    frame = encode(packed(rich["Batch"]))
    whole = np.frombuffer(frame, dtype=np.uint8)
    copy = unpack_batch(decode(frame))
    assert isinstance(copy, Batch)
    for rollout, advantages in zip(copy.rollouts, copy.advantages, strict=True):
        for array in (advantages, rollout.token_ids, rollout.logprobs, *rollout.columns.values()):
            assert not array.size or np.shares_memory(array, whole)


def test_decoded_arrays_are_aligned() -> None:
    """Whatever the length of the header; arrays that are not are slow in numpy, and some libraries refuse them."""
    for length in range(1, 17):
        value = {"x" * length: np.zeros(3, dtype=np.int8), "y": np.zeros(3, dtype=np.float16), "z": np.arange(2.0)}
        copy = decode(encode(value))
        assert all(array.flags.aligned for array in copy.values()), f"after a key of {length} characters"


# Whatever is not a frame is a WireError


def is_refused(frame: bytes, kind: str = "") -> bool:
    """True where a WireError came; another exception goes through and fails the test."""
    try:
        unpacked(kind, decode(frame))
    except WireError:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_refused(rich, kind: str) -> None:
    frame = encode(packed(rich[kind]))
    assert [size for size in range(len(frame)) if not is_refused(frame[:size])] == []
    with pytest.raises(WireError, match="truncated"):
        decode(frame[:-1])
    with pytest.raises(WireError, match="followed by other bytes"):
        decode(frame + b"\0")


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_byte_is_refused(rich, kind: str) -> None:
    frame = bytearray(encode(packed(rich[kind])))
    bits = random.Random(0)
    accepted = []
    for index in range(len(frame)):
        for change in (1 << bits.randrange(8), 255):
            frame[index] ^= change
            if not is_refused(bytes(frame)):
                accepted.append(index)
            frame[index] ^= change
    assert accepted == []
    assert unpacked(kind, decode(bytes(frame))) == rich[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_header_byte_under_a_right_checksum_gives_a_record_or_a_wire_error(rich, kind: str) -> None:
    """A checksum is no defence against one who computes it."""
    header, body = opened(encode(packed(rich[kind])))
    written = bytearray(msgpack.packb(header))
    num_refused = 0
    for index in range(len(written)):
        for change in (0x01, 0x10, 0x80, 0xFF):
            written[index] ^= change
            num_refused += is_refused(seal(bytes(written), body), kind)
            written[index] ^= change
    assert num_refused > len(written)


def paths(item: object, path: tuple = ()) -> list[tuple]:
    """Every place in a header."""
    inside = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    return [path, *(found for key, value in inside for found in paths(value, (*path, key)))]


def changed(item: object, path: tuple, value: object) -> object:
    """A copy of a header with another value in one place."""
    if not path:
        return value
    copy = dict(item) if isinstance(item, dict) else list(item)
    copy[path[0]] = changed(copy[path[0]], path[1:], value)
    return copy


JUNK = [
    None,
    True,
    0,
    -1,
    2**63,
    1.5,
    float("nan"),
    "",
    "text",
    b"bytes",
    [],
    [[]],
    [1, 2],
    [None, "a"],
    {},
    {"a": 1},
    {"$record": "Scored", "reward": 1.0},
    {"$record": "Sampling"},
    {"$array": ["<i4", [0], 0, 0]},
    {"$array": ["<f8", [], 0, 8]},
]


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_in_any_place_gives_a_record_or_a_wire_error(rich, kind: str) -> None:
    header, body = opened(encode(packed(rich[kind])))
    places, escaped, num_refused = paths(header), [], 0
    for place in places:
        for junk in JUNK:
            try:
                num_refused += is_refused(seal(changed(header, place, junk), body), kind)
            except Exception as error:  # noqa: BLE001  (the point is that there is none)
                escaped.append(f"{'.'.join(map(str, place))} = {junk!r}: {type(error).__name__}")
    assert escaped == []
    assert num_refused > len(places)


@given(st.binary(max_size=200))
@quick
def test_random_bytes_are_refused(junk: bytes) -> None:
    assert is_refused(junk)
    assert is_refused(b"HRW" + junk)
    assert is_refused(b"HRW" + bytes([frames.SCHEMA]) + junk)


@given(st.binary(max_size=60), st.binary(max_size=16))
@quick
def test_random_headers_under_a_right_checksum_give_plain_data_or_a_wire_error(header: bytes, body: bytes) -> None:
    frame = seal(header, body)
    if not is_refused(frame):
        assert isinstance(decode(frame), bool | int | float | str | list | dict | None)


@pytest.mark.parametrize("schema", [0, 1, 255])
def test_another_schema_is_refused_by_number(schema: int) -> None:
    with pytest.raises(WireError, match=f"schema {schema}, this version reads {frames.SCHEMA}"):
        decode(seal([1], schema=schema))


def test_another_magic_is_refused() -> None:
    with pytest.raises(WireError, match="HRW"):
        decode(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")


OVERSIZED = [(0, 2**63), (2**32 - 1, 0), (2**32 - 1, 2**64 - 1), (0, frames.MAX_FRAME), (frames.MAX_HEADER + 1, 0)]


@pytest.mark.parametrize(("header_size", "body_size"), OVERSIZED)
def test_an_oversized_announcement_is_refused_before_anything_is_read(header_size: int, body_size: int) -> None:
    frame = PREAMBLE.pack(b"HRW", frames.SCHEMA, header_size, body_size)
    with pytest.raises(WireError, match="oversized"):
        decode(frame)
    file = io.BytesIO(frame)
    with pytest.raises(WireError, match="oversized"):
        list(read_frames(file))


def test_a_receiver_may_take_less() -> None:
    frame = encode(np.zeros(100))
    assert len(decode(frame, max_bytes=len(frame))) == 100
    with pytest.raises(WireError, match="oversized"):
        decode(frame, max_bytes=len(frame) - 1)


def test_unknown_records_and_fields_are_refused_by_name(rich) -> None:
    header, body = opened(encode(rich["WeightUpdate"]))
    with pytest.raises(WireError, match="unknown record 'Popen'"):
        decode(seal({"$record": "Popen", "args": ["ls"]}))
    with pytest.raises(WireError, match="missing or unknown fields: color"):
        decode(seal({**header, "color": "red"}, body))
    with pytest.raises(WireError, match="missing or unknown fields: lineage"):
        decode(seal({key: value for key, value in header.items() if key != "lineage"}, body))


@pytest.mark.parametrize("name", [None, 1, [], {}, "", "object", "Rollout.__init__", "headrace.records.Rollout"])
def test_a_record_is_named_exactly(name) -> None:
    with pytest.raises(WireError):
        decode(seal({"$record": name}))


@pytest.mark.parametrize("kind", KINDS)
def test_every_missing_field_is_refused(rich, kind: str) -> None:
    header, body = opened(encode(packed(rich[kind])))
    for name in header.keys() - {"$record"}:
        with pytest.raises(WireError, match=f"missing or unknown (fields|keys): {name}$"):
            unpacked(kind, decode(seal({key: value for key, value in header.items() if key != name}, body)))


def test_a_record_that_checks_itself_is_refused_in_its_own_words(rich) -> None:
    header, body = opened(encode(rich["WeightUpdate"]))
    with pytest.raises(WireError, match="version -1 on base None"):
        decode(seal({**header, "version": -1}, body))
    header, body = opened(encode(Sampling(top_k=4)))
    with pytest.raises(WireError, match=r"sampling.top_k = -1"):
        decode(seal({**header, "top_k": -1}, body))


@pytest.mark.parametrize(
    "claim",
    [
        ["|O", [1], 0, 8],
        ["O", [1], 0, 8],
        ["<U4", [1], 0, 16],
        ["|V8", [1], 0, 8],
        ["<M8[s]", [1], 0, 8],
        [">f8", [1], 0, 8],
        ["<f8,<O", [1], 0, 16],
        [None, [1], 0, 8],
        [["<f8"], [1], 0, 8],
        ["<f8", [3], 0, 16],
        ["<f8", [2], 0, 8],
        ["<f8", [1], 0, 16],
        ["<f8", [2], 8, 16],
        ["<f8", [1], 16, 8],
        ["<f8", [0], 17, 0],
        ["<f8", [1], -8, 8],
        ["<f8", [-1, -1], 0, 8],
        ["<f8", [-1], 0, -8],
        ["<f8", [2**40], 0, 2**43],
        ["<f8", [2**63, 2], 0, 16],
        ["<f8", [0, 2**63], 0, 0],
        ["<f8", [1.0], 0, 8],
        ["<f8", [True], 0, 8],
        ["<f8", 1, 0, 8],
        ["<f8", None, 0, 8],
        ["<f8", [1] * 9, 0, 8],
        ["<f8", [1], "0", 8],
        ["<f8", [1], None, None],
        ["<f8", [1], 0],
        ["<f8", [1], 0, 8, 0],
        [],
        "<f8",
        None,
        {"dtype": "<f8"},
    ],
    ids=repr,
)
def test_an_array_that_lies_about_itself_is_refused(claim) -> None:
    body = bytes(16)
    assert decode(seal({"$array": ["<f8", [2], 0, 16]}, body)).tolist() == [0, 0]
    with pytest.raises(WireError):
        decode(seal({"$array": claim}, body))


@pytest.mark.parametrize("depth", [1025, 5000, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(WireError):
        decode(seal(b"\x91" * depth + b"\xc0"))
    with pytest.raises(WireError):
        decode(seal(b"\x81\xa1a" * depth + b"\xc0"))
    with pytest.raises(WireError):
        encode(nested(depth, 1))


def test_deeply_nested_records_are_refused() -> None:
    record = msgpack.ExtType(frames._RECORD, msgpack.packb(["Invalid", {"reason": "x"}]))
    for _ in range(2000):
        record = msgpack.ExtType(frames._RECORD, msgpack.packb(["Invalid", {"reason": record}]))
    with pytest.raises(WireError):
        decode(seal(record))


FOREIGN = {
    "nothing": b"",
    "reserved": b"\xc1",
    "two values": b"\xc0\xc0",
    "long array": b"\xdd\xff\xff\xff\xff",
    "long map": b"\xdf\xff\xff\xff\xff",
    "long text": b"\xdb\xff\xff\xff\xffabc",
    "bytes": b"\xc4\x01a",
    "extension": b"\xd4\x05a",
    "not UTF-8": b"\xa1\xff",
    "number for a key": b"\x81\x01\x02",
    "nothing for a key": b"\x81\xc0\xc0",
    "list for a key": b"\x81\x90\xc0",
}


@pytest.mark.parametrize("header", FOREIGN.values(), ids=FOREIGN.keys())
def test_msgpack_we_do_not_write_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        decode(seal(header))


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(WireError, match="truncated"):
        decode(b"")


def test_keys_are_text_that_encode_would_take() -> None:
    with pytest.raises(WireError):
        decode(seal({b"bytes": 1}))


def test_hostile_frames_are_answered_quickly() -> None:
    """Seconds of processor time for frames that claim to be large or deep; a slow path takes minutes here, or memory."""
    hostile = [
        seal({"$array": ["<f8", [2**50], 0, 2**53]}),
        seal({"$array": ["<f8", [2**63 - 1] * 8, 0, 0]}),
        seal(b"\xdd\x7f\xff\xff\xff" + b"\xc0" * 1000),
        seal(b"\x91" * 50_000),
        seal(b"\x81\xa1a" * 50_000),
        PREAMBLE.pack(b"HRW", frames.SCHEMA, 2**31, 2**31),
    ]
    started = time.process_time()
    assert all(is_refused(frame) for _ in range(50) for frame in hostile)
    assert time.process_time() - started < 5


# Long frames


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PIECE", 64)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_of_several_pieces_comes_out_as_it_went_in(rich, kind: str) -> None:
    frame = frames.make_frame(packed(rich[kind]))
    pieces = list(frame.pieces)
    assert len(pieces) > 3 and max(map(len, pieces)) <= PREAMBLE.size + 64 + 4
    whole = b"".join(pieces)
    assert len(whole) == frame.num_bytes and unpacked(kind, decode(whole)) == rich[kind]
    assert [unpacked(kind, value) for value in read_frames(io.BytesIO(2 * whole))] == [rich[kind]] * 2
    assert is_refused(whole[:-1]) and is_refused(whole + b"\0")
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        assert is_refused(bytes(damaged)), place


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_may_end_anywhere() -> None:
    for length in range(200):
        value = {"text": "x" * (length % 70), "bytes": np.arange(length, dtype=np.uint8), "none": np.zeros((0, 3))}
        copy = decode(encode(value))
        assert copy["text"] == value["text"] and np.array_equal(copy["bytes"], value["bytes"]) and copy["none"].shape == (0, 3)
        assert all(array.flags.aligned and not array.flags.writeable for array in (copy["bytes"], copy["none"]))


def test_memory_is_taken_as_pieces_arrive_and_not_as_announced() -> None:
    reader = frames.reading()
    assert next(reader) == PREAMBLE.size
    assert reader.send(PREAMBLE.pack(b"HRW", frames.SCHEMA, 8, frames.MAX_FRAME - (1 << 20))) == frames.PIECE + 4


def test_making_the_pieces_of_a_long_frame_holds_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PIECE", 1 << 20)
    array = np.zeros(1 << 26, dtype=np.uint8)
    tracemalloc.start()
    try:
        num_bytes = sum(len(piece) for piece in frames.make_frame({"array": array}).pieces)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_bytes > array.nbytes and peak < 4 << 20


# Files of frames


@given(st.lists(small_records, max_size=3))
@settings(parent=quick, max_examples=20)
def test_a_file_of_frames(values: list) -> None:
    assert list(read_frames(io.BytesIO(b"".join(encode(value) for value in values)))) == values


def test_a_frame_cut_off_at_the_end_of_a_file_is_left_out(rich) -> None:
    first, last = encode([1, 2]), encode(rich["WeightUpdate"])
    for size in range(len(last)):
        assert list(read_frames(io.BytesIO(first + last[:size]))) == [[1, 2]]
    whole = list(read_frames(io.BytesIO(first + last)))
    assert whole == [[1, 2], rich["WeightUpdate"]]
    assert isinstance(whole[1], WeightUpdate)


def test_damage_in_the_middle_of_a_file_is_not_passed_over() -> None:
    first, last = bytearray(encode({"a": "text"})), encode([2])
    first[-1] ^= 1
    with pytest.raises(WireError, match="checksum"):
        list(read_frames(io.BytesIO(bytes(first) + last)))
    with pytest.raises(WireError, match="HRW"):
        list(read_frames(io.BytesIO(encode([1]) + b"\0" * 40 + last)))


# Nothing that runs code it reads

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load", "torch.hub.load"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or an attribute; empty for anything else."""
    if isinstance(node, ast.Attribute):
        inside = dotted(node.value)
        return f"{inside}.{node.attr}" if inside else ""
    return node.id if isinstance(node, ast.Name) else ""


def dangers(source: str) -> list[str]:
    """What in a module's source could run code that came as data."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in whole if name.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS]
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            first = node.args[0] if node.args else None
            is_hidden_import = name.endswith("import_module") and isinstance(first, ast.Constant)
            if name in FORBIDDEN_CALLS or (is_hidden_import and first.value in FORBIDDEN_MODULES):
                found.append(name)
            found += [f"{name}(allow_pickle)" for keyword in node.keywords if keyword.arg in ("allow_pickle", "weights_only")]
    return found


def test_no_module_of_ours_can_run_what_it_reads() -> None:
    folder = Path(headrace.__file__).parent
    modules = sorted(folder.rglob("*.py"))
    assert len(modules) > 30
    found = {str(path.relative_to(folder)): dangers(path.read_text()) for path in modules}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from cloudpickle import dumps",
        "def f():\n    import dill",
        "import marshal, os",
        "from shelve import open",
        "eval('1')",
        "exec(text)",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "np.load(path)",
        "importlib.import_module('pickle')",
        "thing.load(path, allow_pickle=True)",
    ],
)
def test_the_search_for_dangers_finds_them(source: str) -> None:
    assert dangers(source)


def test_the_search_for_dangers_leaves_others_alone() -> None:
    assert dangers("import ast, torch\nmodel.eval()\nast.literal_eval(x)\nspec.loader.exec_module(m)\nmodel.load(x)") == []


@pytest.mark.parametrize("value", [{"$array": 1}, {"$record": "Rollout"}, {"$": {"$$x": [{"$ref": 2}]}}], ids=repr)
def test_a_users_own_dollar_keys_travel_as_they_are(value: object) -> None:
    assert decode(encode(value)) == value


def test_encoding_keeps_no_array_in_memory() -> None:
    array = np.zeros(3)
    alive = weakref.ref(array)
    gc.disable()  # what only garbage collection frees is kept for long: a run collects seldom
    try:
        encode({"array": array, "sampling": Sampling()})
        del array
        assert alive() is None
    finally:
        gc.enable()
