"""Utility calls that wait for their reply.

Invariants: I2 (whoever takes a reply out of the table ends it, and it is taken out once).

Threads: any.  There is no lock: each operation is one atomic operation of a ``dict``, ``list`` or ``deque`` (``pop``,
item assignment, ``popitem``, ``append``), so a finalizer or an interrupt in the middle of any of them can do no harm.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from itertools import count
from typing import Any, Final

from engine_client.ipc.latch import Latch

__all__ = ["PendingCalls", "Reply"]

_log = logging.getLogger("engine_client.session")

_LAST_ID: Final = 2**64 - 1
"""The highest id that fits into a frame; 1 comes after it."""


class Reply:
    """What becomes of one call.  It has the methods of a ``Future`` that matter here, and survives interrupts."""

    __slots__ = ("_callbacks", "_latch", "_outcomes", "owner", "rank")

    def __init__(self, rank: int = 0, owner: Hashable = None) -> None:
        self.rank = rank  # of the engine that is to answer
        self.owner = owner  # stands for the event loop that waits, if one does
        self._latch = Latch()
        self._outcomes: list[tuple[Any, BaseException | None]] = []  # the first one counts
        self._callbacks: deque[Callable[[Reply], object]] = deque()

    def __repr__(self) -> str:
        return f"<Reply {'done' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Tell whether it has ended."""
        return self._latch.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, at most ``timeout`` seconds; return whether it has ended."""
        return self._latch.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it.

        Raises:
            TimeoutError: there is none within ``timeout`` seconds.
            BaseException: the error that ended it.
        """
        result, error = self._outcome(timeout)
        if error is not None:
            try:
                raise error
            finally:
                error = None  # else its traceback would lead back to it, and all its frames stay until a collection
        return result

    def forget_error(self) -> None:
        """Let go of the error that has ended it, if one has: whoever waited has it."""
        if self._outcomes and self._outcomes[0][1] is not None:
            self._outcomes.clear()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for its end and return the error, or None if it has a result."""
        return self._outcome(timeout)[1]

    def _outcome(self, timeout: float | None) -> tuple[Any, BaseException | None]:
        if not self.wait(timeout):
            raise TimeoutError
        return self._outcomes[0]

    def set_result(self, result: Any) -> None:
        """End it with a result; does nothing if it has ended."""
        self._end(result, None)

    def set_exception(self, error: BaseException) -> None:
        """End it with an error; does nothing if it has ended."""
        self._end(None, error)

    def _end(self, result: Any, error: BaseException | None) -> None:
        self._outcomes.append((result, error))
        self._latch.set()
        if self._callbacks:
            self._run_callbacks()

    def add_done_callback(self, callback: Callable[[Reply], object]) -> None:
        """Have ``callback(reply)`` called at its end, on the thread that ends it; now if it has ended."""
        self._callbacks.append(callback)
        if self.done():
            self._run_callbacks()

    def add_waiter(self, wake: Callable[[Reply], object]) -> None:
        """Have ``wake(reply)`` called at its end, before the callbacks, which may take long."""
        self._callbacks.appendleft(wake)
        if self.done():
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # another thread took the last one
            try:
                callback(self)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001  # user's code on a thread that serves others: it must not end that
                _log.exception("a callback of a call has failed")


class PendingCalls:
    """The table of one client: call id to reply."""

    def __init__(self) -> None:
        self.replies: dict[int, Reply] = {}
        self._next = count(1)

    def __len__(self) -> int:
        return len(self.replies)

    def __repr__(self) -> str:
        return f"<PendingCalls {len(self.replies)}>"

    def new_id(self) -> int:
        """Return a new id; whoever has it before the call is registered can always discard the call."""
        return (next(self._next) - 1) % _LAST_ID + 1

    def new(self, call_id: int | None = None, rank: int = 0, owner: Hashable = None) -> tuple[int, Reply]:
        """Register a call to an engine; return its id and its reply."""
        if call_id is None:
            call_id = self.new_id()
        reply = Reply(rank, owner)
        self.replies[call_id] = reply
        return call_id, reply

    def discard(self, call_id: int) -> None:
        """Give a call up: a reply that still comes is dropped."""
        self.replies.pop(call_id, None)

    def discard_of(self, owner: Hashable) -> None:
        """Give up the calls of an owner who is gone."""
        for call_id, reply in list(self.replies.items()):
            if reply.owner == owner:
                self.discard(call_id)

    def settle(self, call_id: int, *, result: Any = None, error: BaseException | None = None) -> bool:
        """End a call with its result or its error; return whether it was waiting, or had been given up."""
        reply = self.replies.pop(call_id, None)
        if reply is None:
            return False
        if error is not None:
            reply.set_exception(error)
        else:
            reply.set_result(result)
        return True

    def has_rank(self, rank: int) -> bool:
        """Tell whether a call to an engine waits for its reply."""
        return any(reply.rank == rank for reply in list(self.replies.values()))

    def fail_rank(self, rank: int, make_error: Callable[[], BaseException]) -> None:
        """End every call to one engine with an error of its own."""
        for call_id, reply in list(self.replies.items()):
            if reply.rank == rank:
                self.settle(call_id, error=make_error())

    def fail_all(self, make_error: Callable[[], BaseException]) -> None:
        """End every call with an error of its own."""
        while self.replies:
            try:
                _, reply = self.replies.popitem()
            except KeyError:
                return  # another thread took the last one
            reply.set_exception(make_error())
