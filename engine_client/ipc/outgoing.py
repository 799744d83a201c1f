"""Frames on their way out of a channel: one that is being written, and those that wait behind it.

Threads: as the channel that owns them says.  Signals: a handler may append between any two lines, and an interrupt may
come there; what that leaves is a count of waiting bytes that is too high until nothing waits, and nothing else.
"""

from __future__ import annotations

from typing import Final

from engine_client.interfaces import Buffer
from engine_client.protocol.frames import Segment

__all__ = ["Backlog", "Outgoing"]

_MERGED: Final = 64 * 1024
"""Bytes up to which waiting frames are joined, so that one system call writes them all."""


class Outgoing:
    """A frame that is being written: its parts, and the counts of the writes that succeeded.

    Args:
        parts: of the frame; None: they are not known yet, and ``fill`` will tell.
    """

    __slots__ = ("is_queued", "parts", "segments", "size", "written")

    def __init__(self, parts: list[Buffer] | None = None) -> None:
        self.is_queued = False  # set a moment before it is true
        self.segments: list[Segment] = []  # filled as they are placed
        self.written: list[int] = []
        self.parts = parts = parts or []
        self.size = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))

    def fill(self, parts: list[Buffer]) -> Outgoing:
        """Take the parts."""
        self.parts = parts
        self.size = sum(map(len, parts))
        return self

    @property
    def left(self) -> int:
        """Return how many bytes are not written yet."""
        return self.size - sum(self.written)

    def remaining(self) -> list[Buffer]:
        """Return the parts that are not written yet, the first one cut to what is left of it."""
        if not self.written:
            return self.parts
        done = sum(self.written)
        for index, part in enumerate(self.parts):
            if done < len(part):
                return [memoryview(part)[done:], *self.parts[index + 1 :]]
            done -= len(part)
        return []

    def owned(self) -> Outgoing:
        """Return what is left as a copy, so that nobody else's memory is referred to."""
        return Outgoing([bytes(part) for part in self.remaining()])


class Backlog:
    """The frames of a channel that are not written to their end, in order."""

    __slots__ = ("frames", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self.frames: list[Outgoing] = []  # changed here only

    def __repr__(self) -> str:
        return f"<Backlog {len(self.frames)} frames, {self.nbytes} bytes>"

    def append(self, outgoing: Outgoing) -> None:
        """Append a frame."""
        self.nbytes += outgoing.size
        outgoing.is_queued = True
        self.frames.append(outgoing)

    def wrote(self, count: int) -> None:
        """Note that so many bytes of the first frame were written; forget it if it is complete."""
        self.nbytes -= count
        frames = self.frames
        if frames and (count >= frames[0].size or sum(frames[0].written) >= frames[0].size):
            del frames[0]
        if not frames:
            self.nbytes = 0

    def own(self, outgoing: Outgoing) -> None:
        """Keep a copy of what is left of a frame, wherever it waits.

        Raises:
            MemoryError: there is none; the frame waits no longer, unless some of it is written.
        """
        for index in range(len(self.frames) - 1, -1, -1):
            if self.frames[index] is outgoing:
                try:
                    self.frames[index] = outgoing.owned()
                except MemoryError:
                    if outgoing.written:
                        return  # better to refer to the caller's memory than to break the stream in mid-frame
                    del self.frames[index]
                    self.nbytes -= outgoing.size
                    outgoing.is_queued = False
                    raise
                return

    def merge(self) -> None:
        """Join the first frames if they are small."""
        parts: list[Buffer] = []
        size = merged = 0
        for waiting in self.frames:
            size += waiting.left
            if size > _MERGED:
                break
            parts += waiting.remaining()
            merged += 1
        if merged > 1:
            self.frames[:merged] = [Outgoing([b"".join(parts)])]  # one C call: all of it, or nothing

    def clear(self) -> None:
        """Forget all of them."""
        self.frames.clear()
        self.nbytes = 0
