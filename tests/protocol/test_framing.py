"""Frames: packing, and taking a stream apart whatever its cuts and whatever is in it."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from engine_client.errors import LocalProtocolError, RemoteProtocolError
from engine_client.protocol import framing
from engine_client.protocol.frames import INLINE, MAX_SEGMENTS, Flag, Frame, Kind, RawFrame, Segment
from engine_client.protocol.framing import MAX_FRAME, FrameReader, pack_prefix, take_small

MIB = 1 << 20
LENGTHS = st.one_of(
    st.integers(0, 64),
    st.sampled_from([16 * 1024 - 1, 16 * 1024, 16 * 1024 + 1, 64 * 1024, 70_000]),
)


def feed(reader: FrameReader, data: bytes, most: int | None = None) -> list[Any]:
    """Give ``data`` to the reader, at most ``most`` bytes at a time, as a channel would."""
    frames: list[Any] = []
    rest = memoryview(data)
    while rest:
        room = reader.buffer()
        count = min(len(rest), len(room), most or len(rest))
        room[:count] = rest[:count]
        rest = rest[count:]
        frames += reader.advance(count)
    return frames


def pack(kind: int, flags: int, ref: int, header: bytes, parts: list[bytes | Segment]) -> bytes:
    segments = [part if isinstance(part, Segment) else Segment(len(part)) for part in parts]
    inline = [part for part in parts if isinstance(part, bytes)]
    return b"".join([pack_prefix(kind, flags, ref, len(header), segments), header, *inline])


def raw_prefix(kind: int = 6, flags: int = 0, count: int = 0, ref: int = 0, header_length: int = 0) -> bytes:
    return struct.pack("<4sBBHQQ", b"ECF1", kind, flags, count, ref, header_length)


@st.composite
def frame_parts(draw: st.DrawFn) -> tuple[int, int, int, bytes, list[bytes | Segment]]:
    filler = draw(st.integers(0, 255))
    shared = st.builds(Segment, st.integers(0, 1 << 35), st.integers(0, 1 << 40), st.integers(0, (1 << 64) - 1))
    inline = LENGTHS.map(lambda length: bytes([filler]) * length)
    return (
        draw(st.sampled_from(list(Kind))),
        draw(st.integers(0, 3)),
        draw(st.integers(0, (1 << 64) - 1)),
        b"h" * draw(LENGTHS),
        draw(st.lists(st.one_of(inline, shared), max_size=4)),
    )


@given(st.lists(frame_parts(), max_size=4), st.sampled_from([None, 1, 7, 4096]), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_frames_come_back_equal_whatever_the_cuts(specs, most, rng):
    """Frames are the same however the stream is cut into pieces."""
    stream = b"".join(pack(*spec) for spec in specs)
    if most == 1 and len(stream) > 20_000:
        most = rng.randrange(2_000, 20_000)
    reader = FrameReader()
    frames = feed(reader, stream, most)
    reader.end()
    assert len(frames) == len(specs)
    for frame, (kind, flags, ref, header, parts) in zip(frames, specs, strict=True):
        assert (frame.kind, frame.flags, frame.ref, bytes(frame.header)) == (kind, flags, ref, header)
        assert isinstance(frame, RawFrame if parts else Frame)
        if isinstance(frame, Frame):
            assert frame.buffers == ()
            continue
        assert [part for part in parts if isinstance(part, bytes)] == [bytes(view) for view in frame.inline]
        assert [part for part in parts if isinstance(part, Segment)] == [
            s for s in frame.segments if s.offset != INLINE
        ]


def test_random_cuts_of_one_long_stream_give_the_same_frames():
    """Cut positions are random and independent of frame borders."""
    rng = random.Random(7)
    specs = [
        (
            rng.choice(list(Kind)),
            0,
            n,
            rng.randbytes(rng.choice([0, 9, 300, 20_000])),
            [rng.randbytes(rng.choice([0, 5, 40_000]))],
        )
        for n in range(200)
    ]
    stream = b"".join(pack(*spec) for spec in specs)
    for most in (3, 1000, 16_384, 65_536, 200_000):
        frames = feed(FrameReader(), stream, rng.randrange(1, most) if most > 3 else 999)
        assert [(f.ref, bytes(f.header), bytes(f.inline[0])) for f in frames] == [
            (ref, header, parts[0]) for _, _, ref, header, parts in specs
        ]


def test_one_read_may_complete_many_frames():
    """Small frames that arrive together are returned together, in order."""
    stream = b"".join(pack(Kind.ADD, 0, n, b"x" * 20, []) for n in range(100))
    reader = FrameReader()
    reader.buffer()[: len(stream)] = stream
    assert [frame.ref for frame in reader.advance(len(stream))] == list(range(100))
    assert not reader.in_frame


def test_small_headers_are_bytes_and_large_ones_are_views():
    """A header up to 16 KiB is a bytes object; a larger one stays where it was read."""
    small, large = feed(FrameReader(), pack(1, 0, 0, b"a" * 100, []) + pack(1, 0, 0, b"b" * 100_000, []))
    assert type(small.header) is bytes
    assert type(large.header) is memoryview
    assert type(large.header.obj) is bytearray


@pytest.mark.parametrize("length", [0, 5, 20_000, 1_000_000])
def test_an_inline_segment_starts_at_offset_zero_of_its_own_bytearray(length):
    """Whoever wants writable memory finds it in the view's owner."""
    frame = feed(FrameReader(), pack(Kind.REPLY, 0, 1, b"head", [bytes(length)]))[0]
    view = frame.inline[0]
    assert type(view.obj) is bytearray
    assert len(view.obj) == len(view) == length
    assert not view.readonly


def test_a_large_part_is_read_straight_into_its_final_memory():
    """Once its length is known, buffer() is the part itself, exactly as long as what is missing."""
    reader = FrameReader()
    feed(reader, pack(Kind.REPLY, 0, 1, b"head", [bytes(MIB)])[: 48 + 4 + 100])
    room = reader.buffer()
    assert len(room) == MIB - 100
    room[:3] = b"abc"
    owner = room.obj
    feed(reader, bytes(MIB - 200))
    frame = feed(reader, bytes(100))[0]
    assert frame.inline[0].obj is owner


def test_the_reader_keeps_nothing_of_a_frame_that_it_handed_on():
    """The owner of a large part can be resized at once, so no view of it is left in the reader."""
    reader = FrameReader()
    frame = feed(reader, pack(Kind.REPLY, 0, 1, b"", [bytes(MIB)]))[0]
    owner = frame.inline[0].obj
    frame.inline[0].release()
    owner.append(0)
    assert len(owner) == MIB + 1


def test_a_part_larger_than_the_growth_step_comes_whole(monkeypatch):
    """Memory for a long part grows with what has come and its bytes stay in order."""
    monkeypatch.setattr(framing, "_GROWTH", 20_000)
    body = random.Random(1).randbytes(70_000)
    for most in (None, 999):
        frame = feed(FrameReader(), pack(Kind.REPLY, 0, 1, b"", [body]), most)[0]
        assert bytes(frame.inline[0]) == body


def test_in_frame_and_end_tell_a_border_from_the_middle():
    """The end of the stream between frames is fine; inside a frame it is the peer's fault."""
    data = pack(Kind.ADD, 0, 1, b"header", [b"segment"])
    for cut in range(1, len(data)):
        reader = FrameReader()
        assert not reader.in_frame
        assert feed(reader, data[:cut]) == []
        assert reader.in_frame
        with pytest.raises(RemoteProtocolError, match="inside a frame"):
            reader.end()
        with pytest.raises(RemoteProtocolError, match="inside a frame"):
            reader.buffer()
    FrameReader().end()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        raw_prefix(kind=0),
        raw_prefix(kind=max(Kind) + 1),
        raw_prefix(flags=0x80),
        raw_prefix(header_length=1 << 62),
        raw_prefix(header_length=(1 << 64) - 1),
        raw_prefix(count=1) + struct.pack("<QqQ", 1 << 62, -1, 0),
        raw_prefix(count=1) + struct.pack("<QqQ", 1 << 62, 0, 0),
        raw_prefix(count=1) + struct.pack("<QqQ", 1, -2, 0),
        raw_prefix(count=1) + struct.pack("<QqQ", 1, -1, 1),
        raw_prefix(count=2) + struct.pack("<QqQ", 40 << 30, -1, 0) * 2,
    ],
)
def test_a_violation_is_refused_without_allocation_and_for_good(data):
    """Each kind of nonsense raises RemoteProtocolError; every later call raises one of its own."""
    reader = FrameReader()
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError) as first:
            feed(reader, data)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert reader.broken == str(first.value)
    assert not reader.in_frame
    for call in (reader.buffer, reader.end, lambda: reader.advance(0)):
        with pytest.raises(RemoteProtocolError) as later:
            call()
        assert later.value is not first.value
        assert str(later.value) == str(first.value)


def test_a_lying_length_within_the_limit_allocates_one_growth_step_at_most():
    """A frame that promises 60 GiB gets memory only as its bytes come."""
    reader = FrameReader()
    tracemalloc.start()
    try:
        feed(reader, raw_prefix(header_length=60 << 30))
        assert len(reader.buffer()) <= 16 * MIB
        assert tracemalloc.get_traced_memory()[1] < 20 * MIB
    finally:
        tracemalloc.stop()
    with pytest.raises(RemoteProtocolError):
        reader.end()


def test_a_table_longer_than_the_limit_is_refused():
    """The segment table counts towards the limit before it is read."""
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        feed(FrameReader(max_frame=1000), raw_prefix(count=42))
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        feed(FrameReader(max_frame=1000), pack(Kind.ADD, 0, 0, b"", [bytes(600), bytes(600)]))
    assert len(feed(FrameReader(max_frame=1000), pack(Kind.ADD, 0, 0, b"", [bytes(400), bytes(500)]))) == 1


def test_no_memory_is_the_end_of_the_stream_and_not_of_the_reader_thread(monkeypatch):
    """A MemoryError becomes RemoteProtocolError, after which the reader is broken."""

    def no_memory(*_: object) -> None:
        raise MemoryError

    reader = FrameReader()
    monkeypatch.setattr(framing, "bytearray", no_memory, raising=False)
    with pytest.raises(RemoteProtocolError, match="no memory"):
        feed(reader, pack(Kind.ADD, 0, 0, bytes(100_000), []))
    assert "broken" in repr(reader)


def test_frames_before_a_violation_in_the_same_read_are_returned():
    """What was complete is delivered; the violation shows at once in ``broken`` and is raised by the next call."""
    data = pack(Kind.OUTPUTS, 0, 1, b"one", []) + pack(Kind.OUTPUTS, 0, 2, b"two", []) + bytes(100)
    reader = FrameReader()
    reader.buffer()[: len(data)] = data
    assert [frame.ref for frame in reader.advance(len(data))] == [1, 2]
    assert reader.broken
    with pytest.raises(RemoteProtocolError):
        reader.buffer()


@given(st.binary(max_size=200), st.booleans(), st.integers(1, 64))
@settings(max_examples=300, deadline=None)
def test_garbage_raises_nothing_but_remote_protocol_error(garbage, marked, most):
    """Also garbage that begins with the right mark; memory stays below the frame limit."""
    limit = 4096
    reader = FrameReader(max_frame=limit)
    try:
        for frame in feed(reader, b"ECF1" + garbage if marked else garbage, most):
            assert len(frame.header) + sum(map(len, getattr(frame, "inline", ()))) <= limit
        assert reader.in_frame == bool(garbage or marked) or not reader.in_frame
        reader.end()
    except RemoteProtocolError:
        assert reader.broken


@given(frame_parts(), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_damaged_frames_raise_nothing_but_remote_protocol_error(spec, damage):
    """Bytes changed anywhere in prefix, table or header give frames, a wait for more, or the one error."""
    data = bytearray(pack(*spec))
    for position, value in damage:
        data[position % len(data)] = value
    reader = FrameReader(max_frame=1 << 20)
    try:
        feed(reader, bytes(data))
        reader.end()
    except RemoteProtocolError:
        assert reader.broken


def test_more_bytes_than_there_was_room_for_is_a_local_error():
    """advance() counts once per buffer(), within its room."""
    reader = FrameReader()
    with pytest.raises(LocalProtocolError):
        reader.advance(1)
    room = len(reader.buffer())
    with pytest.raises(LocalProtocolError):
        reader.advance(room + 1)
    with pytest.raises(LocalProtocolError):
        reader.advance(-1)
    assert reader.advance(0) == []
    with pytest.raises(LocalProtocolError):
        reader.advance(1)


def test_the_room_is_never_empty_however_small_frames_are_cut():
    """A small part that waits at the end of the scratch is moved to its front."""
    frame = pack(Kind.ADD, 0, 5, b"x" * 15_000, [b"y" * 9_000])
    for most in (None, 30_000):
        reader = FrameReader()
        assert len(feed(reader, frame * 50, most)) == 50
        reader.end()


def test_pack_prefix_has_the_documented_layout():
    """Prefix, then one entry per segment, little endian."""
    packed = pack_prefix(Kind.UTILITY, Flag.NEEDS_MAIN, 77, 5, [Segment(10), Segment(20, 4096, 3)])
    assert packed == (
        struct.pack("<4sBBHQQ", b"ECF1", 8, 1, 2, 77, 5)
        + struct.pack("<QqQ", 10, -1, 0)
        + struct.pack("<QqQ", 20, 4096, 3)
    )
    assert pack_prefix(Kind.ADD, 0, 1, 2) == raw_prefix(ref=1, header_length=2)


@pytest.mark.parametrize(
    "arguments",
    [(6, 0, 0, 0, [Segment(0)] * (MAX_SEGMENTS + 1)), (6, 0, -1, 0, []), (6, 0, 1 << 64, 0, []), (256, 0, 0, 0, [])],
)
def test_a_frame_that_the_format_cannot_hold_is_a_local_error(arguments):
    """Too many segments, or numbers out of range, are refused before anything is written."""
    with pytest.raises(LocalProtocolError, match="cannot be written"):
        pack_prefix(*arguments)


def test_the_most_segments_travel():
    """65535 segments are a legal frame."""
    segments = [Segment(1, n, 1) for n in range(MAX_SEGMENTS)]
    frame = feed(FrameReader(), pack(Kind.ADD, 0, 0, b"h", list(segments)))[0]
    assert frame.segments == segments


def test_lengths_over_two_gib_keep_their_value():
    """Lengths are 64 bits wide, so nothing wraps at 2 or 4 GiB."""
    for length in ((2 << 30) + 1, (4 << 30) + 1):
        packed = pack_prefix(Kind.ADD, 0, 0, length, [Segment(length)])
        reader = FrameReader(max_frame=16 << 30)
        feed(reader, packed)
        assert reader.in_frame
        frame = feed(FrameReader(), pack(Kind.ADD, 0, 0, b"", [Segment(length, 8, 1)]))[0]
        assert frame.segments == [Segment(length, 8, 1)]


def test_repr_tells_the_state():
    """The state is readable in a debugger."""
    reader = FrameReader()
    assert repr(reader) == "<FrameReader between frames>"
    feed(reader, b"EC")
    assert repr(reader) == "<FrameReader in frame>"


def test_bytes_read_elsewhere_are_taken_like_others():
    """``feed`` returns what the same bytes give in any other cuts, and may come in the middle of a frame."""
    frames = [Frame(Kind.REPLY, 0, n, bytes(length)) for n, length in enumerate((0, 40, 20_000, 200_000, 7))]
    stream = b"".join(pack_prefix(f.kind, f.flags, f.ref, len(f.header)) + f.header for f in frames)
    for cut in (0, 1, 30, 25_000, len(stream) - 3):
        reader = FrameReader()
        found = reader.feed(stream[:cut]) + reader.feed(stream[cut:]) + reader.feed(b"")
        assert [(f.ref, bytes(f.header)) for f in found] == [(f.ref, f.header) for f in frames]
        assert not reader.in_frame


def test_a_violation_in_bytes_read_elsewhere_is_one():
    """Frames before it are returned, and then it is said; ``take_small`` leaves it to the reader."""
    whole = pack_prefix(Kind.REPLY, 0, 1, 3) + b"abc"
    reader = FrameReader()
    assert [bytes(f.header) for f in reader.feed(whole + b"x" * 30 + bytes(100_000))] == [b"abc"]
    assert reader.broken
    reader, size = FrameReader(), 200_000  # what is read straight into its memory: the violation comes by itself
    assert [len(f.header) for f in reader.feed(pack_prefix(Kind.REPLY, 0, 1, size) + bytes(size) + b"x" * 30)] == [size]
    assert reader.broken
    with pytest.raises(RemoteProtocolError):
        FrameReader().feed(b"x" * 30)
    found: list[Frame] = []
    assert take_small(whole + b"x" * 30, 0, len(whole) + 30, found.append) == len(whole)
    assert [f.header for f in found] == [b"abc"]


@given(st.lists(frame_parts(), max_size=4), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_small_frames_are_taken_as_a_reader_takes_them(specs, cut):
    """What ``take_small`` takes is what a reader would make of it; the first frame that it leaves is not for it."""
    whole = [pack(*spec) for spec in specs]
    stream = b"".join(whole)[: -cut or None]
    for max_frame in (MAX_FRAME, 1 << 30, 20_000):
        found: list[Any] = []
        end = take_small(stream, 0, len(stream), found.append, max_frame, found.append)
        assert end == sum(map(len, whole[: len(found)]))
        assert found == feed(FrameReader(), stream[:end])
        rest = specs[len(found)] if len(found) < len(specs) else None
        if rest is not None and len(stream) >= end + len(whole[len(found)]):
            inline = [part for part in rest[4] if isinstance(part, bytes)]
            large = [part for part in rest[4] if isinstance(part, Segment) and part.length > max_frame - len(rest[3])]
            assert inline or large or len(rest[3]) >= 16 * 1024 or len(whole[len(found)]) > max_frame


def test_frames_with_segments_are_left_to_whoever_can_resolve_them():
    """The first of them ends the taking; and a table that cannot be is left to the reader."""
    small, placed = pack(Kind.REPLY, 0, 1, b"abc", []), pack(Kind.REPLY, 0, 2, b"d", [Segment(9, 4096, 3)])
    found: list[Any] = []
    assert take_small(small + placed, 0, len(small + placed), found.append) == len(small)
    wrong = pack(Kind.REPLY, 0, 2, b"d", [Segment(9, -2, 3)])
    assert take_small(wrong, 0, len(wrong), found.append, add_placed=found.append) == 0
    many = pack(Kind.REPLY, 0, 2, b"d", [Segment(0, 4096, 3)] * 50)
    assert take_small(many, 0, len(many), found.append, 1000, found.append) == 0
    assert [frame.ref for frame in found] == [1]
    with pytest.raises(RemoteProtocolError, match="cannot be"):
        feed(FrameReader(), wrong)
