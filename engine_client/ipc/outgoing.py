"""A frame on its way out of a channel.

Threads: as the channel that owns it says.
"""

from __future__ import annotations

from engine_client.interfaces import Buffer
from engine_client.protocol.framing import Segment

__all__ = ["Outgoing"]


class Outgoing:
    """A frame that is being written: its parts, and the counts of the writes that succeeded."""

    __slots__ = ("is_queued", "parts", "segments", "size", "written")

    def __init__(self) -> None:
        self.is_queued = False  # set a moment before it is true
        self.segments: list[Segment] = []  # filled as they are placed
        self.parts: list[Buffer] = []
        self.size = 0
        self.written: list[int] = []

    def fill(self, parts: list[Buffer]) -> Outgoing:
        """Take the parts."""
        self.parts = parts
        self.size = sum(len(part) for part in parts)
        return self

    def remaining(self) -> list[Buffer]:
        """Return the parts that are not written yet, the first one cut to what is left of it."""
        done = sum(self.written)
        if not done:
            return self.parts
        for index, part in enumerate(self.parts):
            if done < len(part):
                return [memoryview(part)[done:], *self.parts[index + 1 :]]
            done -= len(part)
        return []

    def owned(self) -> Outgoing:
        """Return what is left as a copy, so that nobody else's memory is referred to."""
        return Outgoing().fill([bytes(part) for part in self.remaining()])
