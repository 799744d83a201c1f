"""Where requests wait for their turn: first come first served, or by priority.

Both queues do everything in (amortised) constant or logarithmic time, so that a step costs the same however many
requests wait.

Threads: the engine's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Final, Union

from engine_client.engine.request import Request

__all__ = ["FcfsQueue", "PriorityQueue", "Queue", "make_queue"]

_FEW: Final = 32
"""Removed entries that a heap may hold without being rebuilt."""


class FcfsQueue:
    """First come, first served; preempted requests come back to the front."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        """Add a new request."""
        self._requests[request.request_id] = request

    def push_back(self, request: Request) -> None:
        """Put a preempted request back, before all others."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """Return the next request and leave it there."""
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        """Return the next request and remove it."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Remove a request; one that is not there is ignored."""
        self._requests.pop(request.request_id, None)


class PriorityQueue:
    """Lowest ``priority`` first, then the earliest ``arrival_time``, then the order of arrival here.

    Removed requests stay in the heap as dead entries until they surface, or until they are the larger part of it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        """Add a request, new or preempted, at its place."""
        self._members[request.request_id] = request
        heappush(self._heap, (request.rank, request))

    push_back = push

    def peek(self) -> Request:
        """Return the next request and leave it there."""
        while self._is_dead(self._heap[0][1]):
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        """Return the next request and remove it."""
        request = self.peek()
        heappop(self._heap)
        del self._members[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Remove a request; one that is not there is ignored."""
        if self._members.get(request.request_id) is not request:
            return
        del self._members[request.request_id]
        if len(self._heap) > 2 * len(self._members) + _FEW:
            self._heap = [entry for entry in self._heap if not self._is_dead(entry[1])]
            heapify(self._heap)

    def _is_dead(self, request: Request) -> bool:
        return self._members.get(request.request_id) is not request


Queue = Union[FcfsQueue, PriorityQueue]


def make_queue(policy: str) -> Queue:
    """Return an empty queue of a policy: ``"fcfs"`` or ``"priority"``."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()
