"""Ways in which an engine's loop hangs, for ``collective_rpc``.

An engine imports this within the limits of a test, so it imports hardly anything itself.
"""

from __future__ import annotations

import ctypes
import signal
import threading

__all__ = ["deadlock", "hang_deaf", "hang_holding", "sleep_in_c", "take_signals"]


def deadlock(core: object) -> None:
    """Wait for a lock that nobody gives back."""
    del core
    lock = threading.Lock()
    with lock:
        lock.acquire()


def sleep_in_c(core: object) -> None:
    """Enter C code that never returns."""
    del core
    ctypes.CDLL(None).sleep(600)


def hang_holding(core: object) -> None:
    """Enter C code that never returns and keeps the interpreter's lock."""
    del core
    ctypes.PyDLL(None).sleep(600)


def hang_deaf(core: object) -> None:
    """Wait for ever, with every signal blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    deadlock(core)


def take_signals(core: object) -> None:
    """Handle every signal that can be handled."""
    del core
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda *_: None)
