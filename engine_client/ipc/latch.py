"""An event that survives an interrupt of whoever waits for it.

``threading.Event`` and ``concurrent.futures.Future`` wait under a condition, whose methods are written in Python.
Ctrl-C between the line that takes its lock and the block that gives it back leaves the lock taken for good, and then
the thread that sets the event, and serves others, waits for ever (met in practice: once in a few thousand interrupts).
Here everything that must not be torn is one call of C code.

Invariants: I7 (a wait can be interrupted, and has a timeout).

Threads: everything may be called from any thread, any finalizer and any signal handler.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from engine_client.deadline import Deadline

__all__ = ["LONGEST_SLEEP", "Latch"]

LONGEST_SLEEP: Final = 0.5
"""Seconds after which whoever waits looks around.

A signal that comes between the interpreter's last look and the moment that the system call blocks is noticed only when
that returns; without this, such a Ctrl-C would be lost.
"""


class Latch:
    """Is set once, and stays so."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: set[SimpleQueue[None]] = set()  # one of each wait; copied and changed by one C call at a time

    def __repr__(self) -> str:
        return f"<Latch {'set' if self._is_set else 'open'}>"

    def is_set(self) -> bool:
        """Tell whether ``set`` was called."""
        return self._is_set

    def set(self) -> None:
        """Let all go on who wait, now or later."""
        self._is_set = True
        for waiter in list(self._waiters):
            waiter.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; return whether it is."""
        if self._is_set:
            return True
        waiter: SimpleQueue[None] = SimpleQueue()
        deadline = Deadline(timeout)
        try:
            self._waiters.add(waiter)  # before the look, so that whoever sets it in between finds the waiter
            self._sleep(waiter, deadline)
        finally:
            self._waiters.discard(waiter)
        return self._is_set

    def _sleep(self, waiter: SimpleQueue[None], deadline: Deadline) -> None:
        """Sleep until it is set or time is over; see ``Channel._drain_locked`` for why the loop stands apart."""
        while not self._is_set:
            with suppress(Empty):
                waiter.get(timeout=deadline.capped(LONGEST_SLEEP))
            if deadline.expired():
                return
