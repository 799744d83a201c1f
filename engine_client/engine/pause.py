"""Callers that wait until a pause is complete: what was in flight has ended, and ranks in lock-step have agreed.

Invariants: I2 (every future ends exactly once: done, failed, or given up when the engine goes on or away).

Threads: the engine's thread only; the futures' callbacks run there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["DrainWaiters"]


class DrainWaiters:
    """Futures to be answered when a pause is complete, how that is known, and what to do just before."""

    def __init__(self) -> None:
        self._waiters: list[tuple[Future[Any], Callable[[], bool], Callable[[], Any]]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, is_complete: Callable[[], bool], action: Callable[[], Any]) -> Future[Any]:
        """Return a future that gets the result of ``action`` once ``answer`` finds that it is complete."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # from now on it cannot be cancelled: the answer always finds it open
        self._waiters.append((future, is_complete, action))
        return future

    def answer(self) -> None:
        """Run the actions of those whose pause is complete, and answer their futures."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            future, is_complete, action = waiter
            if is_complete():
                _answer(future, action)
            else:
                self._waiters.append(waiter)

    def give_up(self, reason: str) -> None:
        """Fail the futures, without the actions."""
        waiters, self._waiters = self._waiters, []
        for future, _, _ in waiters:
            future.set_exception(RuntimeError(reason))


def _answer(future: Future[Any], action: Callable[[], Any]) -> None:
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  # the waiting caller's to know
        future.set_exception(error)
    else:
        future.set_result(result)
