"""Which engine of a client gets a request, and which take one at all.

Threads: any; each change is one atomic operation of a set or an integer, and a race only spreads requests differently.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import count
from typing import Any, Final

from engine_client.clients.in_flight import InFlight
from engine_client.clients.link import EngineLink
from engine_client.protocol.routing import Load, choose_rank

__all__ = ["LinkClosedError", "Router"]

_BURST: Final = 0.2
"""Seconds after a request in which the pages of some ranks may not know of it yet."""
_PAUSE: Final = 1.0
"""Seconds without a request that end a burst; a process may stand still for less, say to collect garbage."""
_LONGEST_BURST: Final = 5.0
"""Seconds after which requests whose end nobody has looked at no longer count, however quickly others follow."""
_MEMORY: Final = 1.0
"""Seconds for which a page may count requests that have ended: a step may take so long."""


class LinkClosedError(Exception):
    """An engine takes no more requests, or its number belongs to another one: choose again."""


class Router:
    """Chooses among the engines of one client.

    Args:
        links: of the client, by rank; read at every choice, so it may change.
        in_flight: tells how many requests each rank has.
        start: where the first search begins; front-ends of the same engines are given different ones.
    """

    def __init__(self, links: dict[int, EngineLink], in_flight: InFlight, start: int = 0) -> None:
        self._links = links
        self._in_flight = in_flight
        self._turns = count(start)
        self._sent_at = 0.0
        self._looked_at = 0.0
        self._noticed_at = 0.0
        self._peaks: dict[int, int] = {}  # most own requests that a rank had since a moment, and before that
        self._older_peaks: dict[int, int] = {}
        self._peaks_since = 0.0
        self._others: dict[int, int] = {}  # requests of other front-ends by rank, as it was then
        self.closed: set[int] = set()  # ranks that take no more requests: dead, about to leave, or about to come back
        self.draining: set[int] = set()  # those of them that finish what they have, and take calls meanwhile

    def __repr__(self) -> str:
        return f"<Router ranks={sorted(self._links)} closed={sorted(self.closed)}>"

    def open_links(self) -> list[EngineLink]:
        """Return the engines that take requests and calls."""
        if not self.closed:
            return list(self._links.values())
        return [link for rank, link in list(self._links.items()) if rank not in self.closed]

    def takes_calls(self, link: EngineLink) -> bool:
        """Tell whether an engine takes calls, with one in the table, as ``ensure_open``."""
        return link.rank not in self.closed or (link.rank in self.draining and not link.over.done())

    def ensure_open(self, link: EngineLink) -> None:
        """Raise ``LinkClosedError`` unless an engine takes requests; to be called with one in the table.

        Whoever closes a rank first says so and then looks at what it has: one of the two sees the other.
        """
        if link.rank in self.closed or self._links.get(link.rank) is not link:
            raise LinkClosedError

    def links_of(self, ranks: Iterable[int] | None, *, closed_too: bool = False) -> list[EngineLink]:
        """Return the engines of these ranks; None: all that take calls.

        Raises:
            ValueError: there is no such rank.
        """
        if ranks is None:
            links = list(self._links.values())
            return [link for link in links if self.takes_calls(link)] if self.closed else links
        found = []
        for rank in ranks:
            link = self._links.get(rank)
            found.append(link if link is not None and (closed_too or self.takes_calls(link)) else self._link_of(rank))
        return found

    def choose(self, request: Any) -> EngineLink | None:
        """Return the engine that gets a request: the one it asks for, or the least loaded; None if there is none.

        Raises:
            ValueError: it asks for a rank that this client has not.
        """
        rank = getattr(request, "data_parallel_rank", None)
        if rank is not None:
            return self._link_of(rank)
        links = self.open_links()
        if len(links) <= 1:
            return links[0] if links else None
        now = time.monotonic()
        in_burst = now - self._sent_at < _BURST
        if now - self._sent_at > _PAUSE or now - self._noticed_at > _LONGEST_BURST:
            self._in_flight.notice_ends()
            self._noticed_at = now
        loads = {link.rank: Load(*link.status.counts(), self._in_flight.load(link.rank)) for link in links}
        others = self._others
        if not in_burst or now - self._looked_at >= _BURST or others.keys() != loads.keys():
            others = self._others = self._look(loads, now)
        chosen = choose_rank(loads, next(self._turns), in_burst=in_burst, others=others)
        self._peaks[chosen] = max(self._peaks.get(chosen, 0), loads[chosen].own + 1)
        self._sent_at = now
        return self._links.get(chosen)

    def _look(self, loads: dict[int, Load], now: float) -> dict[int, int]:
        """Return how many requests others have on each rank; own ones that a page may still count are none of them."""
        self._looked_at = now
        if now - self._peaks_since > _MEMORY:
            self._peaks, self._older_peaks, self._peaks_since = {}, self._peaks, now
        peaks, older = self._peaks, self._older_peaks
        known = {rank: max(load.own, peaks.get(rank, 0), older.get(rank, 0)) for rank, load in loads.items()}
        return {rank: max(0, load.total - known[rank]) for rank, load in loads.items()}

    def _link_of(self, rank: int) -> EngineLink:
        link = self._links.get(rank) if rank not in self.closed else None
        if link is None:
            ranks = sorted(link.rank for link in self.open_links())
            raise ValueError(f"data_parallel_rank {rank} is not one of the ranks {ranks} that this client can use")
        return link
