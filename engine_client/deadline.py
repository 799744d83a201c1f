"""An absolute point in time that several waits share.

A *timeout* is relative (seconds); a *deadline* is absolute.  One call that waits in several places makes one
``Deadline`` and asks it what is left, so that the whole call keeps the bound rather than each wait.

Threads: immutable.  The clock is monotonic, so changes of the wall clock do not matter.
"""

from __future__ import annotations

import math
import time
from typing import Final

__all__ = ["NEVER", "Deadline", "check_timeout"]


def check_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """Return ``timeout`` (seconds; None waits without limit) if it is usable.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative or not a number in the sense of floating point.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"{name} must be a number of seconds or None, not {timeout!r}")
    if math.isnan(timeout) or timeout < 0:
        raise ValueError(f"{name} must be zero or more seconds, not {timeout!r}")
    return float(timeout)


class Deadline:
    """``Deadline(2.0)`` is two seconds from now; ``Deadline(None)`` never comes."""

    __slots__ = ("at", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.at = math.inf if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        """Return the seconds left, never below zero; None when there is no limit."""
        if self.at == math.inf:
            return None
        return max(0.0, self.at - time.monotonic())

    def expired(self) -> bool:
        """Tell whether the point has passed."""
        return time.monotonic() >= self.at

    def capped(self, seconds: float) -> float:
        """Return ``seconds``, or what is left if that is less."""
        if self.timeout is None:
            return seconds
        return min(seconds, max(0.0, self.at - time.monotonic()))

    def __repr__(self) -> str:
        return f"Deadline(remaining={self.remaining()})"


NEVER: Final = Deadline(None)
"""For whoever waits without a limit."""
