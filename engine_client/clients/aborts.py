"""Requests that are to be aborted: noted first, then carried out, so that no interrupt forgets one.

Threads: any; each change is one operation of a ``dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine_client.clients.in_flight import InFlight
from engine_client.clients.streams import StreamTable

__all__ = ["Aborts"]


class Aborts:
    """The notes of one client.

    Args:
        in_flight: forgets the requests.
        streams: ends their streams.
        send: tells a rank to end the requests with these keys.
    """

    def __init__(self, in_flight: InFlight, streams: StreamTable, send: Callable[[int, list[int]], None]) -> None:
        self._in_flight = in_flight
        self._streams = streams
        self._send = send
        self.noted: dict[int, int] = {}  # rank by key

    def __repr__(self) -> str:
        return f"<Aborts {len(self.noted)} noted>"

    def note(self, ranks: Mapping[int, int]) -> None:
        """Note requests: the rank of each by its key."""
        self.noted.update(ranks)

    def carry_out(self, *, can_send: bool) -> None:
        """Forget and abort what is noted; an interrupt leaves it noted until that is sent."""
        noted = dict(self.noted)
        for key in noted:
            self._in_flight.discard(key)
            self._streams.stop(key)
        if not can_send:
            return
        for rank in set(noted.values()):
            keys = [key for key, its_rank in noted.items() if its_rank == rank]
            self._send(rank, keys)
            for key in keys:
                self.noted.pop(key, None)
