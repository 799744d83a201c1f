"""A frame that is being written: what is left of it."""

from __future__ import annotations

from hypothesis import given, strategies as st

from engine_client.ipc.outgoing import Outgoing


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
