"""Which ranks a client has: those that serve, those that come and those that go.

::

    starting ── admit ──▶ open to requests ── departing ──▶ leaving ── forget ──▶ (none)
        │ undo_start           │ death that others survive
        ▼                      ▼
      (none)                 dead, until it is started again or taken away

Invariants: I8 (``_lock`` is held for assignments only).

Threads: any; ``_lock`` is re-entrant, since a finalizer may run on a thread that holds it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from engine_client.clients.endings import JOIN_TIMEOUT, Ending
from engine_client.clients.events import EngineEvent, Events
from engine_client.clients.link import EngineLink
from engine_client.clients.taking import Taking
from engine_client.config import ClientOptions
from engine_client.deadline import Deadline
from engine_client.ipc.latch import Latch
from engine_client.ipc.process_group import ProcessGroup

__all__ = ["Membership"]


class Membership(Taking):
    """The part of a session that knows its ranks.

    Args:
        options: of the client.
        start: number of this front-end among those of the same engines.
    """

    def __init__(self, options: ClientOptions, start: int = 0) -> None:
        super().__init__(options, start)
        self.group = ProcessGroup()
        self.events = Events()
        self.departing: set[int] = set()  # ranks that are being taken away, and finish what they have
        self.leaving: set[int] = set()  # those of them that have nothing to do any more: their end is wanted
        self.restarts: Counter[int] = Counter()  # after deaths, by rank
        self._starts: dict[Latch, int] = {}  # starts of ranks that join, and the threads that are at it
        self._lock = threading.RLock()  # guards the death and the opening of a rank, and what a session says

    def verdict_on(self, links: list[EngineLink], error: Exception) -> Exception:
        """Return what to tell of engines that did not answer: how they ended, or the error if they live."""
        ending = self._ending or next((self.deaths[link.rank] for link in links if link.rank in self.deaths), None)
        return error if ending is None else ending.error()

    def tell(self, rank: int, state: str, detail: str = "") -> None:
        """Tell those who listen to events."""
        self.events.tell(EngineEvent(rank, state, detail, time.monotonic()))

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Have ``close`` wait for the end of this block, which is to end by itself, and soon, when the session does.

        Raises:
            EngineDeadError: it has ended.
        """
        start = Latch()
        self._starts[start] = threading.get_ident()
        try:
            self.ensure_alive()
            yield
        finally:
            del self._starts[start]
            start.set()

    def admit(self, ranks: Iterable[int], before: Mapping[int, Ending]) -> None:
        """Let requests go to engines that are new, unless they have died already.

        Args:
            ranks: of them.
            before: the deaths that were known when they were started.
        """
        with self._lock:
            self._admit_locked(ranks, before)

    def _admit_locked(self, ranks: Iterable[int], before: Mapping[int, Ending]) -> None:
        for rank in ranks:
            if self.deaths.get(rank) is before.get(rank):
                self.deaths.pop(rank, None)
                self.router.closed.discard(rank)

    def undo_start(self, rank: int, before: EngineLink | None) -> None:
        """Let go of an engine that did not come up and was killed; ``before`` is the dead one that had its number."""
        link = self.links.get(rank)
        self.group.forget(rank)
        if link is not None and link is not before:
            link.over.set_result(None)
            link.close()
        if before is not None:
            self.links[rank] = before
        else:
            self.links.pop(rank, None)
            self.router.closed.discard(rank)

    def forget(self, rank: int) -> None:
        """Let go of an engine that has left and whose end was dealt with; unknown ones are ignored."""
        self.links.pop(rank, None)
        self.group.forget(rank)
        with self._lock:
            self.deaths.pop(rank, None)
            self.departing.discard(rank)
            self.leaving.discard(rank)
            self.router.closed.discard(rank)

    def await_starts(self, limit: Deadline) -> None:
        """Wait until nothing is being started, but by this very thread: a finalizer may run on any."""
        for start, thread in list(self._starts.items()):
            if thread != threading.get_ident():
                start.wait(limit.capped(JOIN_TIMEOUT))
