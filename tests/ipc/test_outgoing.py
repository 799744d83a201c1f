"""A frame that is being written: what is left of it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from engine_client.ipc.outgoing import Backlog, Outgoing


def test_nothing_is_left_of_nothing() -> None:
    """Before it is filled a frame has no parts."""
    outgoing = Outgoing()
    assert (outgoing.remaining(), outgoing.size, outgoing.is_queued) == ([], 0, False)


@given(st.lists(st.binary(max_size=6), max_size=6), st.lists(st.integers(0, 8), max_size=8))
def test_what_is_left_is_what_was_not_written(parts: list[bytes], writes: list[int]) -> None:
    """Whatever the cuts, the rest is the rest; as a copy, too."""
    whole = b"".join(parts)
    outgoing = Outgoing().fill(list(parts))
    assert outgoing.size == len(whole)
    done = 0
    for count in writes:
        count = min(count, len(whole) - done)  # noqa: PLW2901  # as the system would
        outgoing.written.append(count)
        done += count
        assert b"".join(outgoing.remaining()) == whole[done:]
        copy = outgoing.owned()
        assert copy.size == len(whole) - done
        assert all(type(part) is bytes for part in copy.parts)
        assert b"".join(copy.parts) == whole[done:]


@given(st.lists(st.lists(st.binary(max_size=40_000), min_size=1, max_size=3), max_size=8), st.data())
def test_what_waits_goes_out_in_order_whatever_is_joined(frames: list[list[bytes]], data: st.DataObject) -> None:
    """Bytes leave in the order of the frames, and the count of those that wait is right after each write."""
    backlog = Backlog()
    for parts in frames:
        backlog.append(Outgoing().fill(list(parts)))
    whole = b"".join(map(b"".join, frames))
    out = b""
    while backlog.frames:
        if data.draw(st.booleans()):
            backlog.merge()
        first = backlog.frames[0]
        rest = b"".join(first.remaining())
        count = data.draw(st.integers(0, len(rest)))
        out += rest[:count]
        first.written.append(count)
        backlog.wrote(count)
        assert backlog.nbytes == len(whole) - len(out)
        if count == len(rest):
            assert not backlog.frames or backlog.frames[0] is not first
    assert out == whole
    assert repr(backlog) == "<Backlog 0 frames, 0 bytes>"


def test_small_frames_are_joined_and_large_ones_are_not() -> None:
    """Joining copies, so it stops at 64 KiB."""
    backlog = Backlog()
    for size in (10, 20, 1 << 20, 5):
        backlog.append(Outgoing().fill([b"x" * size]))
    backlog.merge()
    assert (len(backlog.frames), backlog.frames[0].size, backlog.nbytes) == (3, 30, 35 + (1 << 20))


def test_a_frame_that_waits_is_owned_wherever_it_is() -> None:
    """Its memory may be changed afterwards; one that is gone is not looked for in vain."""
    backlog = Backlog()
    memory = bytearray(b"abc")
    outgoing = Outgoing().fill([memory])
    for waiting in (Outgoing().fill([b"first"]), outgoing, Outgoing().fill([b"last"])):
        backlog.append(waiting)
    backlog.own(outgoing)
    backlog.own(Outgoing())
    memory[:] = b"xyz"
    backlog.merge()
    assert b"".join(backlog.frames[0].remaining()) == b"firstabclast"
    backlog.clear()
    assert (len(backlog.frames), backlog.nbytes) == (0, 0)


def test_a_frame_that_cannot_be_owned_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for the copy: the frame and its bytes count as never sent, what waits before it goes out."""
    backlog = Backlog()
    backlog.append(Outgoing().fill([b"first"]))
    large = Outgoing().fill([bytearray(1000)])
    backlog.append(large)

    def fail(outgoing: Outgoing) -> Outgoing:
        raise MemoryError

    monkeypatch.setattr(Outgoing, "owned", fail)
    with pytest.raises(MemoryError):
        backlog.own(large)
    assert (backlog.nbytes, len(backlog.frames), large.is_queued) == (5, 1, False)
