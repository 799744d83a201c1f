"""What becomes of a client's engines, told as it happens.

::

    starts, deaths ──▶ Events ──▶ the queue of each EventStream ──▶ next()
    status pages  ◀── looked at by whoever waits in next(): paused, sleeping, stalled

Threads: ``tell`` and ``end`` from any; a stream is used by one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Union

from engine_client.deadline import Deadline, check_timeout

__all__ = ["EngineEvent", "EventStream", "Events"]

_LOOK: Final = 0.05
"""Seconds between looks at the status pages."""


@dataclass(frozen=True)
class EngineEvent:
    """One change.

    Args:
        rank: of the engine.
        state: ``starting``, ``ready``, ``paused``, ``sleeping``, ``stalled``, ``leaving`` or ``dead``.
        detail: more about it: what it died of, or what it is doing.
        at: monotonic seconds.
    """

    rank: int
    state: str
    detail: str = ""
    at: float = 0.0


_Queue = SimpleQueue[Union[EngineEvent, None]]


class Events:
    """Passes events on to all streams of one client."""

    def __init__(self) -> None:
        self._queues: set[_Queue] = set()  # changed by one C call at a time
        self.has_ended = False

    def __repr__(self) -> str:
        return f"<Events streams={len(self._queues)}>"

    def tell(self, event: EngineEvent) -> None:
        """Give an event to all streams."""
        for queue in list(self._queues):
            queue.put(event)

    def end(self) -> None:
        """End all streams, once what was told is read."""
        self.has_ended = True
        for queue in list(self._queues):
            queue.put(None)

    def subscribe(self) -> _Queue:
        """Return a queue that gets all events from now on, until ``unsubscribe``; None in it means the end."""
        queue: _Queue = SimpleQueue()
        self._queues.add(queue)
        return queue

    def unsubscribe(self, queue: _Queue) -> None:
        """Take a queue away; unknown ones are ignored."""
        self._queues.discard(queue)


class EventStream:
    """Iterates over events, beginning with the state in which each engine is; ends with the client.

    Args:
        events: of the client.
        look: returns rank, state and detail of each engine.
    """

    def __init__(self, events: Events, look: Callable[[], list[tuple[int, str, str]]]) -> None:
        self._events = events
        self._look = look
        self._queue = events.subscribe()
        self._known: dict[int, EngineEvent] = {}
        self._ready: list[tuple[EngineEvent, bool]] = []  # and whether it was told, and not seen
        self._is_over = False

    def __repr__(self) -> str:
        return f"<EventStream known={self._known}>"

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> EngineEvent:
        return self.next()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(AttributeError):  # its construction was interrupted
            self.close()

    def poll(self) -> EngineEvent | None:
        """Return the next event if there is one; None if there is none now.

        Raises:
            StopIteration: there will be none any more.
        """
        self._take_told()
        event = self._next_news()
        if event is None and not self._is_over:
            self._look_around()
            event = self._next_news()
        if event is None and self._is_over:
            raise StopIteration
        return event

    def _next_news(self) -> EngineEvent | None:
        while self._ready:
            event, was_told = self._ready.pop(0)
            if self._is_news(event, was_told):
                self._known[event.rank] = event
                return event
        return None

    def _take_told(self) -> None:
        with suppress(Empty):
            while True:
                self._take(self._queue.get_nowait())

    def _take(self, told: EngineEvent | None) -> None:
        if told is None:
            self._look_around()  # how it ended
            self._is_over = True
        else:
            self._ready.append((told, True))

    def _look_around(self) -> None:
        has_ended = self._events.has_ended  # before the look, which then shows how
        now = time.monotonic()
        self._ready += [(EngineEvent(rank, state, detail, now), False) for rank, state, detail in self._look()]
        if has_ended:
            self._is_over = True

    def _is_news(self, event: EngineEvent, was_told: bool) -> bool:
        """Tell whether an event is a change: of the state, or of a start's phase, of which a look knows the latest."""
        known = self._known.get(event.rank)
        if known is None or known.state != event.state:
            return True
        return event.state == "starting" and not was_told and known.detail != event.detail

    def next(self, timeout: float | None = None) -> EngineEvent:
        """Wait for the next event.

        Args:
            timeout: seconds; None waits as long as the client lives.

        Raises:
            StopIteration: the client has ended, and all events were returned.
            TimeoutError: nothing happened in time.
        """
        deadline = Deadline(check_timeout(timeout))
        while True:
            event = self.poll()
            if event is not None:
                return event
            if deadline.expired():
                raise TimeoutError(f"no event within {deadline.timeout:g} s")
            with suppress(Empty):
                self._take(self._queue.get(timeout=deadline.capped(_LOOK)))

    def close(self) -> None:
        """Listen no more; idempotent."""
        self._is_over = True
        self._ready.clear()
        self._events.unsubscribe(self._queue)
