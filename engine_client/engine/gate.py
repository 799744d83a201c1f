"""The front-ends of one engine as a set: which of them is to be waited for, which is full, which is gone.

Invariants: I7 (blocks in the selector only).

Threads: the busy loop's thread only.
"""

from __future__ import annotations

import select
import selectors
import time
from collections.abc import Iterator
from typing import Final

from engine_client.engine.front_end import FrontEnd
from engine_client.ipc.polling import Polling, poll
from engine_client.protocol.frames import Frame
from engine_client.protocol.wire import decode_text

__all__ = ["Gate"]

_STALL_LIMIT: Final = 1.0
"""Seconds in which a front-end over its limit must take something, where it holds up others."""


class Gate:
    """Watches the channels and processes of front-ends; ends with its selector.

    Args:
        front_ends: by client index.
        selector: where their descriptors are registered; the caller's.
        backlog_limit: bytes that may wait for a front-end.
        spin_us: microseconds for which an idle engine polls before it sleeps; None: as long as that pays.
    """

    def __init__(
        self,
        front_ends: list[FrontEnd],
        selector: selectors.BaseSelector,
        backlog_limit: int,
        spin_us: float | None = 0.0,
    ) -> None:
        self.front_ends = front_ends
        self._selector = selector
        self._backlog_limit = backlog_limit
        self._polling = Polling(spin_us)
        self._connect(front_ends)
        self._poller = select.poll()  # asked in each step: a selector's own code would take three times as long
        for front_end in front_ends:
            selector.register(front_end.channel.fileno(), selectors.EVENT_READ)
            self._poller.register(front_end.channel.fileno(), select.POLLIN)

    def _connect(self, front_ends: list[FrontEnd]) -> None:
        self._connected = tuple(front_ends)
        self._waiting = tuple(front_end.channel.waiting for front_end in front_ends)  # empty ones, but for a backlog

    def __repr__(self) -> str:
        return f"<Gate connected={sum(1 for _ in self)} of {len(self.front_ends)}>"

    def __iter__(self) -> Iterator[FrontEnd]:
        """Return those that are not gone; one that goes meanwhile may be among them."""
        return iter(self._connected)

    def receive(self) -> None:
        """Read what has arrived."""
        for front_end in self._connected:
            front_end.receive()

    def with_news(self) -> list[FrontEnd]:
        """Return the front-ends from which something has arrived: to look costs less than to read nothing."""
        ready = self._poller.poll(0)
        if not ready:
            return []
        descriptors = {descriptor for descriptor, _ in ready}
        return [front_end for front_end in self._connected if front_end.channel.fileno() in descriptors]

    def wait(self, limits: list[float], *, is_idle: bool = False) -> list[int]:
        """Block until something arrives or can be written, at most as long as the shortest limit (seconds).

        Args:
            limits: at the end of any of them the wait ends.
            is_idle: the engine has nothing to do, so the thread may poll before it sleeps.

        Returns:
            The descriptors that are ready.
        """
        for front_end in self._connected:
            self._watch(front_end)
            if self._is_overdue(front_end):
                limits.append(_STALL_LIMIT)
        began = time.monotonic()
        spin = min([self._polling.spin, *limits]) if is_idle else 0.0
        limit = min(limits) - spin if limits else None
        events = poll(self._selector, spin) or self._selector.select(limit)
        if is_idle:
            self._polling.waited(time.monotonic() - began)
        return [key.fd for key, _ in events]

    def _watch(self, front_end: FrontEnd) -> None:
        channel = front_end.channel
        wanted = bool(channel.waiting)
        if wanted != channel.is_watched:
            self._selector.modify(channel.fileno(), selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0))
            channel.is_watched = wanted

    def is_blocked(self) -> bool:
        """Tell whether so much waits for a front-end that nothing should be added."""
        if not any(self._waiting):
            return False
        return any(front_end.channel.backlog > self._backlog_limit for front_end in self._connected)

    def is_lost(self, front_end: FrontEnd) -> bool:
        """Tell whether a front-end has left, has died, or does not read at all while others would."""
        return front_end.channel.ended or front_end.has_died() or self._holds_up_others(front_end)

    def _holds_up_others(self, front_end: FrontEnd) -> bool:
        if not self._is_overdue(front_end) or time.monotonic() - front_end.took_at < _STALL_LIMIT:
            return False
        return sum(1 for _ in self) > 1

    def _is_overdue(self, front_end: FrontEnd) -> bool:
        """Tell whether a front-end should read: too much waits for it, what is in shared memory included.

        The memory of one that does read is its own affair: it may keep what it was sent for long.
        """
        backlog = front_end.channel.backlog
        return backlog > 0 and backlog + front_end.held() > self._backlog_limit

    def attach(self, front_end: FrontEnd, frame: Frame) -> None:
        """Note which process a front-end is, so that its end is seen whoever holds its pipe."""
        try:
            known, pidfd = front_end.pidfd, front_end.watch(int(decode_text(frame)))
        except Exception as error:  # noqa: BLE001  # what arrives cannot end the loop that serves others
            front_end.log.warning("an ATTACH cannot be understood and is ignored: %r", error)
            return
        if known < 0 <= pidfd:
            self._selector.register(pidfd, selectors.EVENT_READ)

    def drop(self, front_end: FrontEnd) -> tuple[list[str], BaseException | None]:
        """Let go of a front-end; return the ids of its requests, and what was wrong with what it has sent."""
        if not front_end.channel.ended and not front_end.has_died():
            text = "client %d has taken nothing for a second, and up to %d bytes wait for it: it is cut off"
            front_end.log.warning(text, front_end.index, front_end.channel.backlog + front_end.held())
        self._selector.unregister(front_end.channel.fileno())
        self._poller.unregister(front_end.channel.fileno())
        if front_end.pidfd >= 0:
            self._selector.unregister(front_end.pidfd)
        fault = None if front_end.channel.hung_up else front_end.channel.fault
        if fault is not None:  # the client finds this in what the engine has logged, since the channel is broken
            front_end.log.error("what client %d sends cannot be read: %s", front_end.index, fault)
        self._connect([other for other in self._connected if other is not front_end])
        return front_end.leave(), fault

    def has_nobody(self) -> bool:
        """Tell whether nobody is left but guests, who do not keep an engine."""
        return all(front_end.is_guest for front_end in self)
