"""Whether to poll for what comes next, before a thread sleeps: it does while that pays.

A thread that sleeps takes the system tens of microseconds to wake, and comes back to cold caches: more than a short
answer takes.  Whoever polls uses a processor, and is of use to nobody if the wait is long.  So the last waits decide,
as they do in the ``haltpoll`` governor by which Linux polls before it halts an idle virtual processor: after some short
ones in a row the next is polled for, and one long wait ends that.  In a quick exchange nobody sleeps, while who waits
for a model, or for a person, uses no processor time.

Threads: any; a race costs a wait that is not polled for, or one that is.
"""

from __future__ import annotations

import selectors
import time
from typing import Final

__all__ = ["Polling", "poll"]

_SHORT: Final = 1e-3
"""Seconds, of a wait for which polling would have paid, and most seconds to poll: a few MiB are copied in half of it.

While both sides poll, the system keeps them on processors of their own.  Where one of them sleeps, it may be woken on
the one that the other is using, though another is idle: then they take turns."""

_IN_A_ROW: Final = 3
"""Short waits after which the next one is polled for."""


class Polling:
    """The recent waits of one kind.

    Args:
        spin_us: microseconds to poll, whatever the last waits were; None lets them decide.
    """

    __slots__ = ("_in_a_row", "is_fixed", "spin")

    def __init__(self, spin_us: float | None = None) -> None:
        self.is_fixed = spin_us is not None
        self.spin = (spin_us or 0.0) / 1e6  # seconds to poll in the next wait
        self._in_a_row = 0

    def __repr__(self) -> str:
        return f"<Polling {self.spin * 1e6:g} us{', fixed' if self.is_fixed else ''}>"

    def waited(self, seconds: float) -> None:
        """Note how long a wait was, polled for or not."""
        if self.is_fixed:
            return
        if seconds > _SHORT:
            self._in_a_row, self.spin = 0, 0.0
        else:
            self._in_a_row += 1
            if self._in_a_row >= _IN_A_ROW:
                self.spin = _SHORT


def poll(selector: selectors.BaseSelector, spin: float) -> list[tuple[selectors.SelectorKey, int]]:
    """Look for events again and again, without sleeping, for so many seconds; return the first ones."""
    if not spin:
        return []
    until = time.monotonic() + spin
    while time.monotonic() < until:
        events = selector.select(0)
        if events:
            return events
    return []
