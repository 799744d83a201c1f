"""One child process: whether it lives, how it ended, how to end it.

::

    is_alive, exitcode, join ──▶ waitid(WNOWAIT)   it stays a zombie, so its pid and its group stay ours
    reap ──────────────────────▶ waitid            ... until its owner has cleaned up the group

The sentinel is a pidfd: it cannot come to mean another process, it fires while grandchildren live on, and signals sent
through it never hit a stranger.  Where the system has none, it is a pipe whose other end only the child holds.

A host may reap all its children (``os.waitpid(-1, 0)``) or ignore SIGCHLD; then the end is known and the exit code is
not.  It is reported as unknown, never as 0.

Threads: every method may be called from any thread.  ``_lock`` is reentrant, since a finalizer may run in the middle of
a method of the same thread; nothing blocks under it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from functools import cache

from engine_client.deadline import Deadline
from engine_client.ipc.exits import exit_name

__all__ = ["ChildHandle", "has_pidfd"]

_POLL = 0.02
"""Seconds between looks at a child without a pidfd, whose sentinel its own children may keep from firing."""


@cache
def has_pidfd() -> bool:
    """Tell whether this system and this Python can watch, signal and wait for a process through a descriptor."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # an old build of Python or kernel, or a sandbox
        return False
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True  # understood: we are not our own child
    except OSError:
        return False  # Linux 5.3 alone can open a pidfd but not wait on it
    finally:
        os.close(pidfd)
    return False


class ChildHandle:
    """Watches one child; has the interface of ``multiprocessing.Process``.

    It owns the sentinel and, until ``reap``, the child's zombie.  In a forked copy of the process that made it, it
    signals and reaps nothing.

    Args:
        name: for messages.
        pid: of a child that nobody has reaped yet.
        fallback: the read end of a pipe that ends with the child, for systems without pidfd; becomes ours.
    """

    def __init__(self, name: str, pid: int, *, fallback: int | None = None) -> None:
        self.name = name
        self.pid = pid
        self._owner = os.getpid()
        self._lock = threading.RLock()
        # -- guarded by _lock --
        self._ended = False
        self._code: int | None = None
        self._reaped = False
        self._is_pidfd, self._sentinel = _watch(pid) if fallback is None else (False, fallback)

    @property
    def sentinel(self) -> int:
        """Return a descriptor that becomes readable when the process has ended; -1 after ``close``."""
        return self._sentinel

    @property
    def exitcode(self) -> int | None:
        """Return the exit code, minus the signal number, or None while it runs or when it is unknown."""
        self._look()
        return self._code

    @property
    def exit_known(self) -> bool:
        """Tell whether the process has ended and ``exitcode`` says how."""
        return self.exitcode is not None

    @property
    def is_reaped(self) -> bool:
        """Tell whether the pid is no longer ours: somebody, we or another, has reaped the process."""
        self._look()
        return self._reaped

    @property
    def is_prompt(self) -> bool:
        """Tell whether the sentinel fires with the process's own end, whatever its children do."""
        return self._is_pidfd

    def is_alive(self) -> bool:
        """Tell whether the process still runs."""
        return not self._look()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds."""
        deadline = Deadline(timeout)
        while not self._look() and not deadline.expired():
            left = deadline.remaining()
            if not self._is_pidfd:
                left = deadline.capped(_POLL)
            if self._wait_sentinel(left) and not self._look():
                time.sleep(0.001)  # the end is announced and not yet to be had

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, signum: int) -> None:
        """Send a signal; do nothing when the process is gone, or in a forked copy of its owner."""
        if self._owner != os.getpid():
            return
        with self._lock, suppress(ProcessLookupError):  # gone is what the caller wanted, or soon learns
            if self._is_pidfd and self._sentinel >= 0:
                signal.pidfd_send_signal(self._sentinel, signum)
            elif not self._look():  # unreaped, so the number is still its own
                os.kill(self.pid, signum)

    def reap(self) -> None:
        """Let go of the pid of an ended process.  Idempotent; does nothing while it runs."""
        with self._lock:
            if self._look() and not self._reaped and self._owner == os.getpid():
                self._collect()
                self._reaped = True

    def close(self) -> None:
        """Close the sentinel.  Idempotent; what is known of the end stays known."""
        with self._lock:
            fd, self._sentinel = self._sentinel, -1
            if fd >= 0:
                os.close(fd)

    def after_fork_in_child(self) -> None:
        """Close the sentinel in a forked copy; takes no lock, since its holder may not exist here."""
        self._lock = threading.RLock()
        self.close()

    def _look(self) -> bool:
        """Return whether the process has ended, and note how."""
        if self._ended:
            return True
        with self._lock:
            if not self._ended:
                self._ended, self._code, self._reaped = self._peek()
            return self._ended

    def _peek(self) -> tuple[bool, int | None, bool]:
        """Return whether it has ended, how, and whether somebody else reaped it."""
        try:
            result = os.waitid(*self._wait_id(), os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            # Reaped by the host; or this is a forked copy of the owner, which has no children of ours.
            gone = self._owner == os.getpid() or self._wait_sentinel(0)
            return gone, None, gone
        if result is None:
            return False, None, False
        return True, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status, False

    def _collect(self) -> None:
        """Reap an ended process."""
        with suppress(ChildProcessError):  # the host was faster
            os.waitid(*self._wait_id(), os.WEXITED | os.WNOHANG)

    def _wait_id(self) -> tuple[int, int]:
        if self._is_pidfd and self._sentinel >= 0:
            return os.P_PIDFD, self._sentinel
        return os.P_PID, self.pid

    def _wait_sentinel(self, timeout: float | None) -> bool:
        """Wait until the sentinel fires; return whether it did (or was closed meanwhile)."""
        fd = self._sentinel
        if fd < 0:
            time.sleep(_POLL if timeout is None else min(timeout, _POLL))
            return False
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1000))

    def __del__(self) -> None:
        # Whoever drops a handle without closing it must not leak its descriptor; no lock: nobody else has it.
        if getattr(self, "_sentinel", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        state = exit_name(self._code) if self._look() else "running"
        return f"<{type(self).__name__} {self.name} pid={self.pid} {state}>"


def _watch(pid: int) -> tuple[bool, int]:
    """Open a pidfd; for a process that somebody reaped already, a pipe that is readable from the start."""
    try:
        return True, os.pidfd_open(pid)
    except ProcessLookupError:
        read_end, write_end = os.pipe()
        os.close(write_end)
        return False, read_end
