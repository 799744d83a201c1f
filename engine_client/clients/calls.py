"""Utility calls that wait for their reply.

Invariants: I2 (whoever takes a future out of the table ends it, and it is taken out once).

Threads: any.  There is no lock: each operation is one ``dict`` operation that the language documents as atomic
(``pop``, item assignment, ``popitem``), so a finalizer that runs in the middle of any of them cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from typing import Any, Final

__all__ = ["PendingCalls"]

_LAST_ID: Final = 2**64 - 1
"""The highest id that fits into a frame; 1 comes after it."""


class PendingCalls:
    """The table of one client: call id to future."""

    def __init__(self) -> None:
        self.futures: dict[int, Future[Any]] = {}
        self._next = count(1)

    def __len__(self) -> int:
        return len(self.futures)

    def __repr__(self) -> str:
        return f"<PendingCalls {len(self.futures)}>"

    def new_id(self) -> int:
        """Return a new id; whoever has it before the call is registered can always discard the call."""
        return (next(self._next) - 1) % _LAST_ID + 1

    def new(self, call_id: int | None = None) -> tuple[int, Future[Any]]:
        """Register a call; return its id and its future."""
        if call_id is None:
            call_id = self.new_id()
        future: Future[Any] = Future()
        self.futures[call_id] = future
        return call_id, future

    def discard(self, call_id: int) -> None:
        """Give a call up: a reply that still comes is dropped."""
        self.futures.pop(call_id, None)

    def settle(self, call_id: int, *, result: Any = None, error: BaseException | None = None) -> bool:
        """End a call with its result or its error; return whether it was waiting, or had been given up."""
        future = self.futures.pop(call_id, None)
        if future is None:
            return False
        with suppress(InvalidStateError):  # its caller cancelled it in this very moment
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        return True

    def fail_all(self, make_error: Callable[[], BaseException]) -> None:
        """End every call with an error of its own."""
        while self.futures:
            try:
                _, future = self.futures.popitem()
            except KeyError:
                return  # another thread took the last one
            with suppress(InvalidStateError):  # as in settle
                future.set_exception(make_error())
