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

__all__ = ["Exchange", "Polling", "poll"]

_SHORT: Final = 1e-3
"""Seconds, of a wait for which polling would have paid, and most seconds to poll: a few MiB are copied in half of it.

While both sides poll, the system keeps them on processors of their own.  Where one of them sleeps, it may be woken on
the one that the other is using, though another is idle: then they take turns."""

_IN_A_ROW: Final = 3
"""Short waits after which the next one is polled for."""

_QUICK: Final = 1e-3
"""Seconds from an answer to the next question that make a quick succession."""

_MANY_QUICK: Final = 3
"""Questions in quick succession after which callers read their answers themselves."""


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


class Exchange:
    """What callers ask and wait for: whether the next wait is polled for, and by whom.

    A caller who asks for the next thing as soon as the last one is there, again and again, reads best by itself.

    Args:
        spin_us: as for ``Polling``.
    """

    __slots__ = ("_answered_at", "_expected_at", "_quick", "_until", "polling")

    def __init__(self, spin_us: float | None = None) -> None:
        self.polling = Polling(spin_us)
        self._expected_at = 0.0  # when somebody began to wait for what is not here yet
        self._answered_at = 0.0  # when what somebody waited for was last here
        self._quick = 0  # waits in a row that each began right after such an answer
        self._until = 0.0  # when the reader's polling ends

    def __repr__(self) -> str:
        return f"<Exchange {self.polling!r} {self._quick} in quick succession>"

    def is_polled_for(self, *, is_answer: bool) -> bool:
        """Tell whether a wait counts here: for an answer, or for anything if a number of microseconds says so."""
        return self.polling.spin > 0 if self.polling.is_fixed else is_answer

    def expect(self, *, can_read: bool) -> bool:
        """Note that a caller begins to wait; return whether the reader is to poll."""
        self._expected_at = now = time.monotonic()
        if can_read:
            self._quick = self._quick + 1 if now - self._answered_at < _QUICK else 0
        if self.polling.spin:
            self._until = now + self.polling.spin
        return bool(self.polling.spin)

    def spin_left(self) -> float:
        """Return for how many seconds the reader is still to poll."""
        return max(0.0, self._until - time.monotonic()) if self._until else 0.0

    def arrived(self) -> bool:
        """Note that something has come; return whether callers should read what comes next by themselves."""
        self._until = 0.0
        began, self._expected_at = self._expected_at, 0.0
        if not began:
            return False
        self.answered(began)
        is_quick = self._quick >= _MANY_QUICK and self.polling.spin > 0
        if is_quick:
            self._quick = 0
        return is_quick

    def answered(self, began: float) -> None:
        """Note that what somebody has waited for, since this monotonic second, is here."""
        self._answered_at = now = time.monotonic()
        self.polling.waited(now - began)


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
