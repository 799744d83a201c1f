"""File descriptors: those that an engine inherits, and how they stay clear of standard input, output and error.

A host may run with descriptors 0 to 2 closed; the next pipe or file then gets one of those numbers, and a stray
``print`` writes into it.  Worse, a child that inherits it takes it for its standard stream.  Every descriptor that
this library keeps or passes on goes through ``above_stdio`` first.

Invariants: I11 (the descriptor handed in is closed even if moving it fails).
Threads: stateless; callable from any.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from contextlib import suppress

__all__ = ["above_stdio", "close_all"]


def above_stdio(fd: int) -> int:
    """Return ``fd``, or if it is below 3 a close-on-exec duplicate that is not; the original is then closed.

    Raises:
        OSError: no descriptor is left; ``fd`` has been closed.
    """
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def close_all(fds: list[int]) -> None:
    """Close descriptors and empty the list; whatever interrupts this, none is lost or closed twice.

    Taking one from the list and closing it are one step of the interpreter, so that nothing can come in between.
    """
    with suppress(IndexError):  # the list is empty: that ends the iteration
        deque(map(os.close, iter(fds.pop, None)), maxlen=0)
