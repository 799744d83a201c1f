"""What a frame is: its kind, its flags, its buffers.  How it lies in a byte stream is in ``framing``.

Threads: immutable.  Pure: performs no I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["INLINE", "MAX_SEGMENTS", "Flag", "Frame", "Kind", "RawFrame", "Segment", "new_tuple"]

INLINE: Final = -1
"""The offset of a segment whose bytes are in the frame itself."""
MAX_SEGMENTS: Final = 0xFFFF
"""Most segments in a frame: what the prefix can count."""


class Kind(enum.IntEnum):
    """What a frame is about.

    Before Python 3.12 a member of an enumeration takes ten times as long to look up as a global, so where that would be
    done for every frame or step, modules keep members as constants of their own.
    """

    HELLO = 1
    INIT = 2
    STATUS = 3
    READY = 4
    FAILED = 5
    ADD = 6
    ABORT = 7
    UTILITY = 8
    SHUTDOWN = 9
    OUTPUTS = 10
    REPLY = 11
    DEAD = 12
    GOODBYE = 13
    ATTACH = 14
    LOG = 15


class Flag(enum.IntFlag):
    """Properties of a frame that its receiver must know before it decodes the header."""

    NEEDS_MAIN = 1
    """The header names objects of the sender's ``__main__``."""
    FAILED = 2
    """A REPLY that carries an exception."""
    NESTED = 4
    """An OUTPUTS with values: the plain part of its header can be decoded where they cannot."""


RESTRICTED: Final = 0x100
"""Set by a receiver in the flags of a frame whose sender is not trusted; on the wire there is no room for it."""


class Segment(NamedTuple):
    """The place of one buffer: ``offset`` in the arena and the ``stamp`` of its block, or ``INLINE`` and 0."""

    length: int
    offset: int = INLINE
    stamp: int = 0


class Frame(NamedTuple):
    """One frame with its buffers resolved; ``error`` says why they could not be, and then they are empty."""

    kind: int
    flags: int
    ref: int
    header: bytes | memoryview
    buffers: Sequence[memoryview] = ()
    error: BaseException | None = None

    @property
    def size(self) -> int:
        """Return the bytes of header and buffers."""
        return len(self.header) + sum(view.nbytes for view in self.buffers)


new_tuple: Final = tuple.__new__
"""``new_tuple(Frame, (kind, ..., error))`` does what the constructor of a named tuple does, in half of its time."""


class RawFrame(NamedTuple):
    """One frame with segments, which are still to be resolved.

    ``inline`` holds a view of each inline segment in order; each starts at offset 0 of a bytearray of its own.
    """

    kind: int
    flags: int
    ref: int
    header: bytes | memoryview
    segments: list[Segment]
    inline: list[memoryview]
