"""Faults to inject: ways for a process to die or hang, and a pipe that misbehaves.

In an engine: ``die``, ``hold_gil``, ``start_grandchild``.  From outside: ``frozen`` stops a process for a while.  On
the wire, ``FaultyLink`` sits between the two ends of a connection and passes bytes on, late, in pieces, changed or
not at all::

    one end (a socket) ◀──▶ FaultyLink, a thread ◀──▶ the other end (a socket)

Threads: a ``FaultyLink`` owns one thread, which ends with it; its settings may be changed from any thread.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, Literal, NoReturn

__all__ = ["DEATHS", "Death", "FaultyLink", "die", "frozen", "hold_gil", "start_grandchild"]

Death = Literal["sigkill", "sigsegv", "sigterm", "exit0", "exit3", "system_exit"]

DEATHS: Final[tuple[Death, ...]] = ("sigkill", "sigsegv", "sigterm", "exit0", "exit3", "system_exit")
"""Every way that ``die`` knows."""

_CHUNK: Final = 64 * 1024


def die(how: Death) -> NoReturn:
    """End this process, now and without clean-up; ``system_exit`` raises ``SystemExit(7)`` instead.

    ``sigterm`` returns to nobody either: should a handler take the signal, this sleeps until the handler's doing ends
    the process.
    """
    sys.stdout.flush()
    if how == "system_exit":
        raise SystemExit(7)
    if how in ("exit0", "exit3"):
        os._exit(0 if how == "exit0" else 3)
    number = {"sigkill": signal.SIGKILL, "sigsegv": signal.SIGSEGV, "sigterm": signal.SIGTERM}[how]
    os.kill(os.getpid(), number)
    while True:
        time.sleep(1)


def hold_gil(seconds: float) -> None:
    """Sleep in C code without giving the interpreter to other threads, and without looking at signals."""
    import ctypes  # noqa: PLC0415  # only this fault needs it

    libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps the lock during calls
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        libc.usleep(int(min(left, 0.9) * 1e6))


_GRANDCHILD: Final = """
import os, signal, time
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
os.write(1, b"!")
time.sleep(600)
"""


def start_grandchild(*, new_session: bool = False, stubborn: bool = True) -> int:
    """Start a child of this process that sleeps for ten minutes; return its pid once it runs.

    Args:
        new_session: it leaves this process's group and session, as a daemon would.
        stubborn: it ignores SIGTERM and SIGINT.
    """
    ready, told = os.pipe()
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-S", "-c", _GRANDCHILD.format(stubborn=stubborn)],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, told, 1)],
            setsid=new_session,
        )
        os.close(told)
        told = -1
        os.read(ready, 1)
    finally:
        os.close(ready)
        if told >= 0:
            os.close(told)
    return pid


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process (SIGSTOP) for the length of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(pid, signal.SIGCONT)


class FaultyLink:
    """Two connected sockets, ``left`` and ``right``, with a thread between them that passes bytes on.

    What goes from left to right can be disturbed: set an attribute at any time.  The other direction is left alone.
    Use as a context manager, or ``close`` it; the two sockets are closed with it, unless they were detached.

    Args:
        delay: seconds to wait before each piece.
        piece: most bytes passed on at once.
        cut_after: bytes after which the connection is closed on both sides, or None.
        change: called with each piece; returns the bytes to pass on instead.
    """

    def __init__(
        self,
        *,
        delay: float = 0.0,
        piece: int = _CHUNK,
        cut_after: int | None = None,
        change: Callable[[bytes], bytes] = lambda piece: piece,
    ) -> None:
        self.delay = delay
        self.piece = piece
        self.cut_after = cut_after
        self.change = change
        self.passed = 0  # bytes passed from left to right
        self.left, self._near = socket.socketpair()
        self.right, self._far = socket.socketpair()
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._running = threading.Event()
        self._running.set()
        self._thread = threading.Thread(target=self._run, name="engine_client.testing.link", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "open" if self._thread.is_alive() else "closed"
        return f"<FaultyLink {state} passed={self.passed}>"

    def __enter__(self) -> FaultyLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def stall(self) -> None:
        """Pass nothing on, in neither direction, until ``resume``."""
        self._running.clear()

    def resume(self) -> None:
        """Go on after ``stall``."""
        self._running.set()

    def close(self) -> None:
        """Cut the connection and end the thread; idempotent."""
        self._stop_writer.close()
        self._running.set()
        self._thread.join()
        for end in (self.left, self.right, self._stop_reader):
            end.close()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for end in (self._near, self._far, self._stop_reader):
                    selector.register(end, selectors.EVENT_READ)
                while all(self._pass_on(key.fileobj) for key, _ in selector.select()):
                    self._running.wait()
        except OSError:
            pass  # one end was closed while something was on its way to it: that cuts the other, too
        finally:
            self._near.close()
            self._far.close()

    def _pass_on(self, source: object) -> bool:
        """Take a piece from one end to the other; return whether the connection goes on."""
        if source is self._stop_reader:
            return False
        if source is self._far:
            data = self._far.recv(_CHUNK)
            self._near.sendall(data)
            return bool(data)
        data = self._near.recv(self.piece)
        if not data:
            return False
        if self.delay:
            time.sleep(self.delay)
        data = self.change(data)
        room = len(data) if self.cut_after is None else max(0, self.cut_after - self.passed)
        self._far.sendall(data[:room])
        self.passed += min(room, len(data))
        return self.cut_after is None or self.passed < self.cut_after
