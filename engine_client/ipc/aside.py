"""Run code where no signal handler can interrupt it.

Python runs signal handlers on the main thread, between any two of its steps; one that raises (Ctrl-C) may come after a
descriptor or a process was made and before anybody owns it.  On another thread nothing comes in between.

Where the calling thread is the only one, blocking all signals does the same without another.

Threads: ``run_aside`` from any thread.  It starts one thread, only when called on the main one, and waits for its end.
``signals_blocked`` is for the calling thread alone, and for the processes that it starts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

from engine_client.deadline import NEVER, Deadline
from engine_client.ipc.latch import Latch

__all__ = ["run_aside", "signals_blocked"]

T = TypeVar("T")

_PATIENCE: Final = 10.0
"""Seconds after the last interrupt, after which something hangs and the user wants out."""


class _Call(Generic[T]):
    """A call that is made once, whoever makes it, and what became of it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.claim = threading.Lock()
        self.done = Latch()
        self.results: list[T] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.results.append(self.function())
        except BaseException as error:  # noqa: BLE001  # passed on to the caller
            self.error = error
        self.done.set()


def run_aside(function: Callable[[], T]) -> T:
    """Call a function, return what it returns and raise what it raises; an interrupt waits for its end.

    To be used for what takes a fraction of a second.

    Raises:
        BaseException: what the function, or a signal handler meanwhile, raised.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    call = _Call(function)
    interrupt: BaseException | None = None
    thread: threading.Thread | None = None
    patience = NEVER
    while (not call.done.is_set() or (thread is not None and thread.is_alive())) and not patience.expired():
        try:
            if thread is None:
                # Interrupted in here it may run or not: then there will be a second one, and one of them does nothing.
                starting = threading.Thread(target=call, name="engine-client-aside", daemon=True)
                starting.start()
                thread = starting
            call.done.wait(patience.remaining())
            thread.join(patience.remaining())
        except RuntimeError:
            call()  # no thread can be had
        except BaseException as error:  # noqa: BLE001  # raised below, when the function has ended
            interrupt = interrupt or error
            patience = Deadline(_PATIENCE)
    if interrupt is not None:
        raise interrupt
    if call.error is not None:
        raise call.error
    return call.results.pop()


@contextmanager
def signals_blocked(*signums: int) -> Iterator[None]:
    """Block signals, by default all, on this thread; those that come meanwhile are delivered at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signums or signal.valid_signals())
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
