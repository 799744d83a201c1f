"""Which rank gets the next request.

The load of a rank is known from two sides: its status page tells how many requests wait and run there, whoever sent
them, and each front-end knows how many of its own are in flight, those included that the rank has not looked at yet.

The score is the reference's, 4 * waiting + running; the smallest wins, and ties go round.  While own requests were sent
a moment ago, the pages of different ranks are of different ages, and a score would prefer whoever has looked last.
So only ranks with at most one request more than the least loaded one are then compared, which keeps a burst even.  What
others have sent is, for the same reason, taken from one look at all pages and not looked up anew each time.

Threads: pure functions.  Pure: performs no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["Load", "choose_rank"]

_WAITING_WEIGHT: Final = 4
"""How much more a request counts that waits than one that runs (the reference's)."""


class Load(NamedTuple):
    """What one rank has to do.

    Args:
        waiting: requests that wait there, by its page.
        running: requests that run there, by its page.
        own: requests that this front-end has in flight there.
    """

    waiting: int
    running: int
    own: int

    @property
    def total(self) -> int:
        """Return the number of requests there: what the page says, and no less than what was sent."""
        return max(self.waiting + self.running, self.own)

    @property
    def score(self) -> int:
        """Return how busy the rank is; requests that it has not looked at yet wait."""
        return _WAITING_WEIGHT * (self.total - self.running) + self.running


def choose_rank(
    loads: Mapping[int, Load], start: int, *, in_burst: bool, others: Mapping[int, int] | None = None
) -> int:
    """Return the rank that gets the next request.

    Args:
        loads: by rank; at least one.
        start: where the search begins, in the order of ``loads``; to be raised by one each time, so that ties spread.
        in_burst: own requests were sent a moment ago, so that the pages cannot be compared.
        others: requests of other front-ends by rank, as seen in one look at all pages; None: as the loads say.

    Raises:
        ValueError: there is no rank.
    """
    ranks = list(loads)
    if not ranks:
        raise ValueError("there is no engine to send a request to")
    begin = start % len(ranks)
    ranks = ranks[begin:] + ranks[:begin]
    if in_burst:
        counts = {rank: load.own + others[rank] if others else load.total for rank, load in loads.items()}
        least = min(counts.values())
        ranks = [rank for rank in ranks if counts[rank] <= least + 1]
    return min(ranks, key=lambda rank: loads[rank].score)
