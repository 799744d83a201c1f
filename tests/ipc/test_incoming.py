"""Frames with buffers: all of them are there, or none is, and none is held."""

from __future__ import annotations

from typing import Any

import pytest

from engine_client.errors import RemoteProtocolError
from engine_client.ipc.incoming import resolve
from engine_client.protocol.frames import INLINE, Kind, RawFrame, Segment

SEGMENTS = [Segment(3), Segment(5, 64, 1), Segment(7, 128, 1), Segment(2)]


class Arena:
    """Notes what is leased and what is given back; fails at one offset."""

    def __init__(self, failing: int = -1, error: BaseException | None = None) -> None:
        self.failing = failing
        self.error = error
        self.discarded: list[int] = []

    def lease(self, segment: Segment) -> memoryview:
        if segment.offset == self.failing and self.error is not None:
            raise self.error
        return memoryview(bytes(segment.length))

    def discard(self, segment: Segment) -> None:
        self.discarded.append(segment.offset)


def raw() -> RawFrame:
    inline = [memoryview(b"abc"), memoryview(b"xy")]
    return RawFrame(Kind.REPLY, 0, 9, b"header", list(SEGMENTS), inline)


def test_buffers_come_in_the_order_of_the_segments() -> None:
    """Those of the frame itself, and those in shared memory."""
    arena: Any = Arena()
    frame = resolve(raw(), arena, "engine 0")
    assert [bytes(view) for view in frame.buffers] == [b"abc", bytes(5), bytes(7), b"xy"]
    assert (frame.kind, frame.ref, frame.header, frame.error) == (Kind.REPLY, 9, b"header", None)
    assert arena.discarded == []


@pytest.mark.parametrize("error", [RemoteProtocolError("no such block"), OSError("no memory"), MemoryError()])
def test_a_segment_that_cannot_be_mapped_fails_its_frame(error: Exception) -> None:
    """The frame says why, has no buffers, and gives back that segment and those behind it."""
    arena: Any = Arena(64, error)
    frame = resolve(raw(), arena, "engine 0")
    assert (frame.error, list(frame.buffers), frame.ref) == (error, [], 9)
    assert arena.discarded == [64, 128, INLINE]


def test_without_shared_memory_a_segment_in_it_cannot_be() -> None:
    """The message names the channel."""
    frame = resolve(raw(), None, "engine 0")
    assert "engine 0: a buffer in shared memory, but there is none" in str(frame.error)
