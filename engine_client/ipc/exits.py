"""How a process ended, in words.

An exit code is what ``multiprocessing`` calls one: zero or more is the process's own, below zero is minus the number of
the signal that ended it, None is not known.

Threads: pure; called from anywhere.
"""

from __future__ import annotations

import signal

__all__ = ["exit_name"]


def exit_name(code: int | None) -> str:
    """Return ``"exit code 3"``, ``"SIGKILL(-9)"`` or ``"unknown"``."""
    if code is None:
        return "unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal: only the first and the last of them have names
        name = f"signal {-code}"
    return f"{name}({code})"
