"""The Python stacks of an engine, written by itself into memory that its launcher holds.

::

    launcher ── QUESTION ──▶ engine: the thread that waits for it ── stacks of all threads ──▶ fault memory ──▶ launcher
             ── FORCE ─────▶ ... or, when that cannot run, faulthandler's handler ──────────┘

The thread looks at the others while it has the interpreter's lock, so that none of them moves.  Where C code keeps that
lock, nobody moves either, and the handler, which is C code and needs no Python, writes the stacks in its stead.  The
same memory takes what ``faulthandler`` writes at a native crash.

Both are real-time signals, which programs hardly use; nothing is sent to an engine in which they are not caught, since
it would end the process.  They are blocked in all threads but that one, so that they interrupt no system call of the
user's code, and are heard where that has blocked all signals.

Both processes share one file position, which tells how much was written: memory cannot shrink, so it is wound back.

Threads: ``FaultMemory`` from any; one at a time asks.  ``report_stacks`` starts a daemon thread, which sleeps until it
is asked and ends with its process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from engine_client.ipc.arena_memory import create_memory
from engine_client.ipc.descriptors import close_all

__all__ = ["QUESTION", "FaultMemory", "own_stacks", "report_stacks"]

QUESTION: Final[int] = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""The signal that asks an engine for its stacks."""
FORCE: Final[int] = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""The signal that has them written whoever has the interpreter's lock."""

_END: Final = "-- end of the stacks that were asked for --\n"
_READY_TIMEOUT: Final = 5.0
"""Seconds for a thread to take its first steps."""
_PATIENCE: Final = 0.5
"""Seconds after which the thread cannot run, since something keeps the interpreter's lock."""
_MOST_BYTES: Final = 256 * 1024
"""Bytes of stacks that are read; of more, the end."""
_WIND_BACK: Final = 1024 * 1024
"""Bytes from which on the memory is used from its beginning again."""
_QUIET: Final = 0.25
"""Seconds without another byte after which an answer counts as whole where the system does not tell."""


def report_stacks(fd: int) -> None:
    """Have this process write its stacks on a native crash, when asked, and on SIGUSR2 for whoever has a shell."""
    import faulthandler  # noqa: PLC0415  # only an engine process needs it

    faulthandler.enable(fd, all_threads=True)
    for number in {QUESTION, FORCE, signal.SIGUSR2}:
        faulthandler.register(number, fd, all_threads=True, chain=False)
    if QUESTION != signal.SIGUSR2:
        signal.pthread_sigmask(signal.SIG_BLOCK, [QUESTION, FORCE])  # threads that this one starts inherit that
        ready = threading.Lock()
        ready.acquire()
        threading.Thread(target=_answer, args=(fd, ready), name="engine-stacks", daemon=True).start()
        ready.acquire(timeout=_READY_TIMEOUT)  # else code that keeps the interpreter's lock could be quicker


def _answer(fd: int, ready: threading.Lock) -> None:
    """Wait to be asked for the stacks, again and again; release ``ready`` once the signals get here."""
    import faulthandler  # noqa: PLC0415  # as above

    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {FORCE})
    ready.release()
    while True:
        with suppress(OSError):  # an interruption, or no room for the stacks
            signal.sigwait([QUESTION])
            faulthandler.dump_traceback(fd, all_threads=True)
            os.write(fd, _END.encode())


def own_stacks() -> str:
    """Return the stacks of this process, in the same form."""
    import faulthandler  # noqa: PLC0415  # as above

    memory = FaultMemory(create_memory("stacks"))
    try:
        faulthandler.dump_traceback(memory.fileno(), all_threads=True)
        return memory.read()
    finally:
        memory.close()


class FaultMemory:
    """The launcher's side; owns the descriptor.

    Args:
        fd: of the memory; -1 when there is none.
    """

    def __init__(self, fd: int) -> None:
        self._fds = [] if fd < 0 else [fd]  # until it is closed
        self.turn = threading.Lock()  # held by who asks
        self._begin = 0  # of what nobody has been given yet
        self.kept = ""  # stacks that a death is to show
        # -- guarded by turn --
        self._asked_at = 0
        self._open: list[str] = []  # the threads that could take the signal
        self._grown = (0, 0.0)
        self._force_at = 0.0  # when to use force; 0.0 once that was done
        self._send: Callable[[int], None] = lambda number: None

    def __repr__(self) -> str:
        return f"<FaultMemory {'open' if self._fds else 'closed'}>"

    def fileno(self) -> int:
        """Return the descriptor, which stays this object's; -1 when it is closed."""
        return self._fds[0] if self._fds else -1

    def read(self) -> str:
        """Return what is ``kept``, or what a crash has written; answers that came late are left out."""
        return self.kept or self._text(self._begin).rpartition(_END)[2]

    def ask(self, pid: int, send: Callable[[int], None]) -> None:
        """Ask the process for its stacks.  Requires ``turn``.

        Args:
            pid: of the engine.
            send: sends it a signal; does nothing when it is gone.

        Raises:
            RuntimeError: it would not understand.
        """
        if any(_signals(f"/proc/{pid}/status", "SigCgt", number) is False for number in (QUESTION, FORCE)):
            raise RuntimeError(f"the process does not catch signal {QUESTION}, which asks for its stacks")
        self._asked_at = self._written()
        self._grown = self._asked_at, time.monotonic()
        self._force_at = time.monotonic() + _PATIENCE
        self._open = [task for task in _tasks(pid) if _signals(task, "SigBlk", FORCE) is False]
        self._send = send
        send(QUESTION)

    def answer(self, pid: int) -> str | None:
        """Return the stacks that were asked for; None while they are not complete.  Requires ``turn``."""
        written, (before, at), now = self._written(), self._grown, time.monotonic()
        text = self._text(self._asked_at)
        if text.endswith(_END):
            return text.removesuffix(_END)
        if written != before:
            self._grown = written, now
        if now >= self._force_at and self._force_at:
            self._force_at = 0.0
            self._send(FORCE)
        if written == self._asked_at:
            return None
        # A thread does not take the signal again while it handles it.
        is_busy = _signals(f"/proc/{pid}/status", "ShdPnd", FORCE) or any(
            _signals(task, "SigBlk", FORCE) for task in self._open
        )
        is_quiet = now - at >= _QUIET
        return text if is_quiet or (is_busy is False and not self._force_at) else None

    def taken(self) -> None:
        """Note that somebody has what was written so far, so that no later death shows it.  Requires ``turn``."""
        self._begin = self._written()
        if self._begin > _WIND_BACK:
            with suppress(OSError, IndexError):  # closed meanwhile
                self._begin = os.lseek(self._fds[0], 0, os.SEEK_SET)

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        close_all(self._fds)

    def _written(self) -> int:
        with suppress(OSError, IndexError):  # closed, perhaps meanwhile
            return os.lseek(self._fds[0], 0, os.SEEK_CUR)
        return self._begin

    def _text(self, begin: int) -> str:
        end = self._written()
        start = max(begin, end - _MOST_BYTES)
        with suppress(OSError, IndexError):  # as above
            return os.pread(self._fds[0], end - start, start).decode(errors="replace")
        return ""


def _tasks(pid: int) -> list[str]:
    with suppress(OSError):  # no /proc, or it is gone
        return [f"/proc/{pid}/task/{task}/status" for task in os.listdir(f"/proc/{pid}/task")]
    return []


def _signals(path: str, mask: str, number: int) -> bool | None:
    """Tell whether a signal is in a mask; None where nothing tells."""
    with suppress(OSError, ValueError, IndexError), open(path, encoding="ascii", errors="replace") as file:
        return bool(int(file.read().split(f"\n{mask}:", 1)[1].split(maxsplit=1)[0], 16) >> (number - 1) & 1)
    return None
