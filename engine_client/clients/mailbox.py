"""From the reader's thread into event loops: one wake-up of a loop for everything that came in a burst.

::

    reader ── post(loop, callback) ──▶ mailbox of the loop ── call_soon_threadsafe, once ──▶ callbacks, on the loop

A loop that was closed takes nothing: its mailbox is dropped, and ``post`` says so.  Nothing here keeps a loop alive.

In the kernel of a notebook a loop that is slept in wakes now and then, so that the stop button interrupts what waits.

Threads: ``post`` from any; callbacks run on their loop's.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Final, TypeVar

from engine_client.clients.calls import Reply
from engine_client.progress import in_notebook

__all__ = ["Mailboxes"]

T = TypeVar("T")

_TURN: Final = 0.005
"""Seconds that one consumer may go on without letting the other tasks of its loop run."""

_TICK: Final = 0.2
"""Seconds that the loop of a kernel may sleep."""


class _Mailbox:
    """What waits to be called on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._posts: deque[Callable[[], None]] = deque()  # append and popleft are atomic
        self._is_due = False
        self.turned_at = time.monotonic()

    @property
    def is_closed(self) -> bool:
        """Tell whether the loop was closed, or is gone."""
        loop = self._loop()
        return loop is None or loop.is_closed()

    def post(self, callback: Callable[[], None]) -> bool:
        """Have the loop call this soon; return whether it can."""
        loop = self._loop()
        if loop is None or loop.is_closed():  # also where a delivery was due that will not come any more
            self._posts.clear()
            return False
        self._posts.append(callback)
        if not self._is_due:
            self._is_due = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # it was closed in between
                self._posts.clear()
                return False
        return True

    def _deliver(self) -> None:
        self._is_due = False
        self.turned_at = time.monotonic()
        with suppress(IndexError):  # all are done
            while True:
                self._posts.popleft()()


class _Ticks:
    """Wakes the running loop now and then, until it is cancelled.

    The handler of ipykernel for SIGINT adds a callback to the loop, from within its sleep, and does not end that sleep.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK, self._tick)

    def cancel(self) -> None:
        self._timer.cancel()


class Mailboxes:
    """The mailboxes of one client: one for each event loop that its coroutines have run in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = weakref.WeakKeyDictionary()
        self._open: set[_Mailbox] = set()  # also those whose loop is gone, until ``take_closed``
        self._is_notebook = in_notebook()

    def __repr__(self) -> str:
        return f"<Mailboxes loops={len(self._boxes)}>"

    def _box(self, loop: asyncio.AbstractEventLoop) -> _Mailbox:
        with self._lock:
            box = self._boxes.get(loop)
            if box is None:
                box = self._boxes[loop] = _Mailbox(loop)
                self._open.add(box)
            return box

    def current(self) -> Hashable:
        """Return what stands for the running loop."""
        return self._box(asyncio.get_running_loop())

    def take_closed(self) -> list[Hashable]:
        """Return, once, what stands for loops that were closed."""
        if not any(box.is_closed for box in list(self._open)):
            return []
        with self._lock:
            closed = list(filter(_is_closed, self._open))
            self._open.difference_update(closed)
        return list(closed)

    def post(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
        """Have a loop call something soon, from any thread; return False if it is closed."""
        return self._box(loop).post(callback)

    def waker(self, future: asyncio.Future[Any]) -> Callable[..., bool]:
        """Return what ends a future of the running loop, from any thread, whatever it is called with.

        It returns False if that loop is closed, so that nobody waits any more.
        """
        loop = asyncio.get_running_loop()
        box = self._box(loop)

        def end() -> None:
            if not future.done():
                future.set_result(None)

        return lambda *_: box.post(end)

    async def wait(self, reply: Reply, timeout: float | None = None) -> bool:
        """Wait for the end of a reply, at most ``timeout`` seconds; return whether it has ended."""
        if not reply.done():
            future = self.future()
            reply.add_waiter(self.waker(future))
            await self.sleep(future, timeout)
        return reply.done()

    @staticmethod
    def future() -> asyncio.Future[None]:
        """Return a future of the running loop, to wait for with ``sleep``."""
        return asyncio.get_running_loop().create_future()

    async def sleep(self, future: asyncio.Future[T], timeout: float | None = None) -> T:
        """Wait for the end of a future, and return its result; with a timeout it is one that has none."""
        ticks = _Ticks() if self._is_notebook else None
        timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self.waker(future))
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            if ticks is not None:
                ticks.cancel()

    async def take_turns(self, *, together: bool = False) -> None:
        """Let other tasks of the running loop go on, if they had to wait for some milliseconds.

        Args:
            together: one of many tasks that come here does so for all, so that what they send stays together.
        """
        box = self._box(asyncio.get_running_loop())
        if time.monotonic() - box.turned_at > _TURN:
            if together:
                box.turned_at = time.monotonic()
            await asyncio.sleep(0)
            box.turned_at = time.monotonic()


def _is_closed(box: _Mailbox) -> bool:
    return box.is_closed
