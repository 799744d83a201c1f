"""Interrupt a selector from another thread, from a finalizer or from a signal handler.

::

    any thread ── wakeup() ──▶ [pipe] ──▶ fileno() is readable ──▶ the selecting thread: clear(), then look for work

Both ends are non-blocking, so nobody ever waits here.  A full pipe is as good as a written byte: the reading end is
readable either way.  The selecting thread calls ``clear`` *before* it looks for work; what is added later finds the
pipe empty and makes it readable again, so no wakeup is lost.

Invariants: I4 (closed is sticky), I7 (no wait).

Threads: everything may be called from any thread, any finalizer and any signal handler.  There is no lock, since a
signal handler that needs a lock which its own thread holds would wait for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from engine_client.ipc.descriptors import above_stdio

__all__ = ["Wakeup"]

_CHUNK = 65536
"""Linux's default pipe capacity: one read empties it."""


class _Ends:
    """The two descriptors; they are closed when the last call that uses them returns.

    ``close`` drops the reference of the ``Wakeup``; a concurrent ``wakeup`` still holds its own.  Otherwise::

        wakeup: reads the number 7   close: closes 7   another thread: opens a file, gets 7   wakeup: writes into it
    """

    __slots__ = ("read", "write")

    def __init__(self) -> None:
        self.read = self.write = -1
        read, write = os.pipe()
        try:
            self.read = above_stdio(read)
        except OSError:
            os.close(write)
            raise
        self.write = above_stdio(write)
        os.set_blocking(self.read, False)
        os.set_blocking(self.write, False)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound early: globals go away at exit
        for name in self.__slots__:
            fd = getattr(self, name, -1)  # an interrupt may have come before there was any
            if fd >= 0:
                close(fd)


class Wakeup:
    """A descriptor that becomes readable on demand; ends with ``close``, or with the last reference to it."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: _Ends | None = _Ends()

    def wakeup(self) -> None:
        """Make ``fileno()`` readable; does nothing when closed."""
        ends = self._ends
        if ends is not None:
            with suppress(BlockingIOError):  # safe because a full pipe is readable already
                os.write(ends.write, b"\0")

    def clear(self) -> None:
        """Make ``fileno()`` unreadable until the next ``wakeup``; does nothing when closed."""
        ends = self._ends
        if ends is not None:
            with suppress(BlockingIOError):  # safe because empty is what was asked for
                while len(os.read(ends.read, _CHUNK)) == _CHUNK:
                    pass

    def fileno(self) -> int:
        """Return the descriptor to select on; -1 after ``close``."""
        ends = self._ends
        return -1 if ends is None else ends.read

    def close(self) -> None:
        """Close both ends, once no other thread is in a call; may be called again."""
        self._ends = None

    def __repr__(self) -> str:
        fd = self.fileno()
        return "<Wakeup closed>" if fd < 0 else f"<Wakeup fd={fd}>"
