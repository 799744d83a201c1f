"""Waits that let more arrive where much arrives, as network drivers do with their interrupts.

A frame for which nobody waits costs its sender less than a microsecond; one that has to wake a sleeping thread costs
several, and the thread a multiple of that.  So a reader that hardly has to wait for the next frame slows its senders
down by asking for each one anew.  After some such waits in a row it naps before it asks again: then one wake-up serves
all that has arrived meanwhile.  Whoever sends and waits for the answer is never meant: that takes longer.  While nobody
waits for what is read, because what was read before is not taken yet, longer waits count too, and the nap is a longer
one: whoever sends much in one go then keeps the interpreter, and the processor, to itself.

Threads: a ``Moderated`` belongs to the thread that selects.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Final

from engine_client.ipc.polling import poll

__all__ = ["Moderated"]

_HARDLY_WAITED: Final = 30e-6
"""Seconds; a message there and back takes twice as long at least."""

_NOT_LONG: Final = 100e-6
"""Seconds, while nobody waits: about what an engine takes for a small step and its wake-ups."""

_MOST_IN_A_ROW: Final = 8

_NAP: Final = 50e-6
"""Seconds; the system makes about a hundred microseconds of it."""

_LONG_NAP: Final = 500e-6
"""Seconds, while nobody waits."""


class Moderated:
    """Selects, and naps before it does where the last waits were hardly any.

    Args:
        selector: the caller's.
        is_awaited: tells whether somebody may wait for what comes.
    """

    def __init__(self, selector: selectors.BaseSelector, is_awaited: Callable[[], bool] = lambda: True) -> None:
        self._selector = selector
        self._is_awaited = is_awaited
        self._in_a_row = 0  # waits that were hardly any

    def __repr__(self) -> str:
        return f"<Moderated {self._in_a_row} short waits in a row>"

    def select(self, timeout: float | None, spin: float = 0.0) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events.

        Args:
            timeout: seconds; None waits until there are some.
            spin: seconds to poll for them before the thread sleeps.
        """
        if spin:  # a quick exchange, and no stream: also the waits that its beginning has ended were no short ones
            self._in_a_row = 0
            spin = spin if timeout is None else min(spin, timeout)
            events = poll(self._selector, spin)
            if events:
                return events
            timeout = None if timeout is None else timeout - spin
        hardly, nap = (_HARDLY_WAITED, _NAP) if self._is_awaited() else (_NOT_LONG, _LONG_NAP)
        if self._in_a_row >= _MOST_IN_A_ROW:
            time.sleep(nap)
        began = time.monotonic()
        events = self._selector.select(timeout)
        self._in_a_row = self._in_a_row + 1 if events and time.monotonic() - began < hardly else 0
        return events
