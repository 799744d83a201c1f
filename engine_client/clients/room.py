"""Senders that wait because too much is queued for an engine that does not read.

Invariants: I7 (a wait ends when there is room, when the engine is dead, or at its deadline).

Threads: any; ``wake`` by whoever has made room, which is the reader.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from engine_client.clients.link import EngineLink
from engine_client.deadline import Deadline
from engine_client.ipc.latch import LONGEST_SLEEP

__all__ = ["Room"]


class Room:
    """Who waits for room, in one client.

    Args:
        high_water: bytes queued for an engine, above which its senders wait.
        must_not_wait: tells that the caller must go on whatever is queued: nothing will be taken any more, or it is the
            one who makes room.
    """

    def __init__(self, high_water: int, must_not_wait: Callable[[], bool]) -> None:
        self._high_water = high_water
        self._must_not_wait = must_not_wait
        self.waiters: set[Callable[[], object]] = set()  # changed by one C call at a time; for others to look at only

    def __len__(self) -> int:
        return len(self.waiters)

    def __repr__(self) -> str:
        return f"<Room {len(self)} waiting>"

    def is_free(self, link: EngineLink) -> bool:
        """Tell whether a sender need not wait."""
        return link.channel.backlog <= self._high_water or link.over.done() or self._must_not_wait()

    def join(self, waiter: Callable[[], object]) -> None:
        """Have this called whenever there may be room, until ``leave``."""
        self.waiters.add(waiter)

    def leave(self, waiter: Callable[[], object]) -> None:
        """Take a waiter away; unknown ones are ignored."""
        self.waiters.discard(waiter)

    def wake(self) -> None:
        """Have all who wait look again."""
        for waiter in list(self.waiters):
            waiter()

    def wait(self, link: EngineLink, deadline: Deadline) -> None:
        """Wait until there is room for an engine, or the end.

        Raises:
            TimeoutError: the deadline came first.
        """
        if self.is_free(link):
            return
        news: SimpleQueue[None] = SimpleQueue()  # an Event would not survive every interrupt, and this keeps all news
        waiter = partial(news.put, None)
        try:
            self.waiters.add(waiter)
            self._sleep(link, news, deadline)
        finally:
            self.waiters.discard(waiter)  # one C call, so that no interrupt comes before it

    def _sleep(self, link: EngineLink, news: SimpleQueue[None], deadline: Deadline) -> None:
        """Sleep until there is room; see ``Channel._drain_locked`` for why the loop stands apart."""
        while not self.is_free(link):
            with suppress(Empty):
                news.get(timeout=deadline.capped(LONGEST_SLEEP))
            if deadline.expired():
                raise self.timeout_error(link, deadline)

    @staticmethod
    def timeout_error(link: EngineLink, deadline: Deadline) -> TimeoutError:
        """Return the error of a sender that has waited in vain."""
        return TimeoutError(f"{link.title} reads nothing: no room within {deadline.timeout:g} s")
