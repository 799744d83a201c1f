"""What a frame is."""

from __future__ import annotations

from engine_client.protocol.frames import INLINE, Flag, Frame, Kind, Segment


def test_kinds_and_flags_fit_their_bytes() -> None:
    """Each has one byte in the prefix; a kind is not 0, so that zeroes are no frame, and flags are single bits."""
    assert all(0 < kind < 256 for kind in Kind)
    assert len({int(kind) for kind in Kind}) == len(Kind)
    assert all(flag.value.bit_count() == 1 and flag < 256 for flag in Flag)


def test_a_frame_tells_its_size() -> None:
    """That of its header and of all its buffers."""
    assert Frame(Kind.ADD, 0, 1, b"abc").size == 3
    assert Frame(Kind.ADD, 0, 1, b"abc", [memoryview(b"1234"), memoryview(bytearray(8)).cast("Q")]).size == 15


def test_a_segment_is_in_the_frame_unless_it_has_a_place() -> None:
    """Without an offset its bytes follow the header."""
    assert Segment(7) == (7, INLINE, 0)
