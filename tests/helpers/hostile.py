"""Bytes that no honest peer sends: streams of the protocol, cut, changed, repeated, or put in another order."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from engine_client.protocol.frames import Frame, Segment
from engine_client.protocol.framing import pack_prefix

__all__ = ["damaged", "packed"]


def packed(frame: Frame) -> bytes:
    """Return a frame as it is on the wire."""
    segments = [Segment(len(view)) for view in frame.buffers]
    prefix = pack_prefix(frame.kind, frame.flags, frame.ref, len(frame.header), segments)
    return b"".join([prefix, frame.header, *frame.buffers])


@st.composite
def damaged(draw: st.DrawFn, messages: Sequence[bytes]) -> bytes:
    """Return some messages in any order, repeated, with bytes cut out, changed or put in; one byte stands before."""
    stream = bytearray(b"".join(draw(st.lists(st.sampled_from(messages), max_size=6))))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(stream)))
        # Mostly at the beginning, where the lengths are.
        place = place if draw(st.booleans()) else min(place, draw(st.integers(0, 40)))
        stream[place : place + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(draw(st.binary(min_size=1, max_size=1)) + stream[: draw(st.integers(0, len(stream)))])
