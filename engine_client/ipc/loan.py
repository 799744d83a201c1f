"""A channel that the reader has lent to those who wait for what comes through it: they read it themselves.

A frame that the reader's thread reads for a caller costs a thread's wake-up and a hand-over of the interpreter's lock:
a multiple of what its decoding takes.  So the reader stands aside where callers ask and wait in quick succession::

    ReaderThread ── Loan(channel) ──▶ a caller: next() polls, reads, returns a frame; take() has it
                 ◀── end() ────────── at any time: another wait, an exit, silence, a frame that is none of the caller's

At most one caller reads at a time.  What it has read and not taken stays in ``channel.ahead``, where the reader finds
it, whatever has become of the caller: it may be interrupted between any two of its lines, in a signal handler for
minutes, or gone.  Therefore everything that counts is one C call each, and happens only while it is permitted::

    sizes  = [65536]   ahead.extend(map(recv, sizes))              read
    permit = [ahead]   list.extend(map(list.pop, permit, (0,)))    take

``end`` empties both lists, and then waits until nobody is inside of the one function that reads, which never blocks.

Invariants: I1 (one reader at a time, since nobody else can begin to read once ``end`` has emptied the lists).

Threads: ``next`` and ``take`` from any; ``end`` and ``is_idle`` are the reader's, which has made the loan.
"""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from engine_client.ipc.channel import Channel
from engine_client.protocol.frames import RESTRICTED, Frame
from engine_client.protocol.framing import READ_SIZE, take_small

__all__ = ["Loan", "can_lend"]

_FIRST: Final = slice(0, 1)
_set_items: Final[Any] = list.__setitem__


def can_lend() -> bool:
    """Tell whether this interpreter has what a loan relies on: a lock that one thread at a time has."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class Loan:
    """The right to read one channel; begins with ``open`` and ends with ``end``.

    Args:
        rank: of the engine.
        channel: for which ``can_be_lent`` is true.
    """

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank = rank
        self.channel = channel
        self._sizes: list[int] = []
        self._ahead = channel.ahead
        self._permit: list[list[bytes | Frame]] = [self._ahead]
        self._borrower: dict[int, list[int]] = {}  # at 0: a list of its own with the number of its thread
        self._recv = channel.recv()
        self._poller = select.poll()
        self._poller.register(channel.fileno(), select.POLLIN)
        self._reads = self._seen = 0

    def __repr__(self) -> str:
        return f"<Loan of {self.channel.name} {'open' if self._permit else 'over'} reads={self._reads}>"

    def borrow(self) -> list[int] | None:
        """Become the one who reads, until ``give_back``; return what is given back, None if somebody else reads."""
        me = [threading.get_ident()]
        return me if self._borrower.setdefault(0, me) is me else None

    def give_back(self, me: list[int]) -> None:
        """Have others read."""
        if self._borrower.get(0) is me:
            del self._borrower[0]

    def next(self, seconds: float) -> Frame | None:
        """Return the frame that comes next, and stays that until it is taken; poll for it for so many seconds.

        Returns:
            None: nothing has come, or what has come is no whole small frame, or the loan is over.
        """
        if not self._ahead:
            _read(self._poller.poll, self._recv, self._sizes, self._permit, self._ahead, time.monotonic() + seconds)
            self._reads += 1
        first = next(iter(self._ahead), None)
        return self._split(first) if isinstance(first, bytes) else first

    def _split(self, data: bytes) -> Frame | None:
        """Have frames stand in the place of the bytes that they came in; return the first."""
        frames: list[Frame] = []
        end = take_small(data, 0, len(data), frames.append)
        if self.channel.is_restricted:  # as ``Channel.receive`` marks them
            frames = [frame._replace(flags=frame.flags | RESTRICTED) for frame in frames]
        rest = [data[end:]] if end < len(data) else []
        done: list[None] = []
        done.extend(map(_set_items, self._permit, (_FIRST,), ([*frames, *rest],)))
        return frames[0] if frames and done else None

    def take(self, taken: list[Any]) -> bool:
        """Move the next frame into an empty list; return False if the loan is over: then the reader has it."""
        taken.extend(map(list.pop, self._permit, (0,)))
        return bool(taken)

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Have borrowers read: whatever came before is delivered."""
        self._sizes.append(READ_SIZE)

    def is_idle(self) -> bool:
        """Tell whether nobody has read since the last time."""
        seen, self._seen = self._seen, self._reads
        return seen == self._reads

    def end(self) -> None:
        """Have nobody read any more; what was read and not taken is the channel's."""
        self._sizes.clear()
        self._permit.clear()
        while self._is_reading():
            time.sleep(20e-6)

    def _is_reading(self) -> bool:
        for me in list(self._borrower.values()):
            # There is no other way to ask; in a variable the frame of this thread itself would be a cycle.
            if getattr(sys._current_frames().get(me[0]), "f_code", None) is _read.__code__:  # noqa: SLF001
                return True
        return False


def _read(  # all that it uses: it calls nothing of Python's
    poll: Callable[[float], Sequence[object]],
    recv: Callable[[int], bytes],
    sizes: list[int],
    permit: list[list[bytes | Frame]],
    ahead: list[bytes | Frame],
    until: float,
) -> None:
    """Poll for bytes, and read them: the one function that does, see ``Loan.end``."""
    try:
        while permit:
            if poll(0) and sizes:
                ahead.extend(map(recv, sizes))
                return
            if time.monotonic() >= until:
                return
    except OSError as error:
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:  # a signal handler's, in Python: a TimeoutError, say
            raise
        # Else it was closed, by us or by the peer: the reader, or the end of it, tells.
