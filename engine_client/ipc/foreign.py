"""A process that somebody else has started and will reap: it can be watched, and nothing else.

Threads: every method from any thread.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

__all__ = ["ForeignHandle"]


class ForeignHandle:
    """Watches a process that is not our child; has the interface of ``multiprocessing.Process`` as far as that goes.

    Its end is seen through a pidfd.  Where the system has none, ``sentinel`` is -1, and only the end of its pipe tells.
    How it ended is known to its parent alone: ``exitcode`` is always None.

    Args:
        name: for messages.
        pid: of the process.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.exitcode: int | None = None
        self.sentinel = -1
        with suppress(AttributeError, OSError):  # an old system, or it has ended, as its pipe will tell
            self.sentinel = os.pidfd_open(pid)

    def __repr__(self) -> str:
        return f"<ForeignHandle {self.name} pid={self.pid}>"

    def is_alive(self) -> bool:
        """Tell whether the process is not known to have ended."""
        return self.sentinel >= 0 and not self._wait(0)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds."""
        if self.sentinel >= 0:
            self._wait(timeout)

    def _wait(self, timeout: float | None) -> bool:
        poller = select.poll()  # select knows no descriptor above 1023, and hosts have many
        poller.register(self.sentinel, select.POLLIN)
        return bool(poller.poll(None if timeout is None else 1000 * timeout))

    def terminate(self) -> None:
        """Do nothing: it is not ours."""

    def kill(self) -> None:
        """Do nothing: it is not ours."""

    def close(self) -> None:
        """Close the sentinel; idempotent."""
        sentinel, self.sentinel = self.sentinel, -1
        if sentinel >= 0:
            os.close(sentinel)
