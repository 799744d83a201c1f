"""Callers that wait until what was in flight at a pause has ended.

Invariants: I2 (every future ends exactly once: done, failed, or given up when the engine goes on or away).

Threads: the engine's thread only; the futures' callbacks run there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["DrainWaiters"]


class DrainWaiters:
    """Futures to be answered when the engine has drained, and what to do just before."""

    def __init__(self) -> None:
        self._waiters: list[tuple[Future[Any], Callable[[], Any]]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, action: Callable[[], Any]) -> Future[Any]:
        """Return a future that gets the result of ``action`` once the engine has drained."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # from now on it cannot be cancelled: the answer always finds it open
        self._waiters.append((future, action))
        return future

    def drained(self) -> None:
        """Run the actions and answer the futures."""
        waiters, self._waiters = self._waiters, []
        for future, action in waiters:
            _answer(future, action)

    def give_up(self, reason: str) -> None:
        """Fail the futures, without the actions."""
        waiters, self._waiters = self._waiters, []
        for future, _ in waiters:
            future.set_exception(RuntimeError(reason))


def _answer(future: Future[Any], action: Callable[[], Any]) -> None:
    try:
        result = action()
    except Exception as error:  # noqa: BLE001  # the waiting caller's to know
        future.set_exception(error)
    else:
        future.set_result(result)
