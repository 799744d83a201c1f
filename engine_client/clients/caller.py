"""Sends utility calls: to one engine, to some, by default to all.

Invariants: I2 (a call that was begun is answered, failed or given up).

Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine_client.clients.endings import closed_ending
from engine_client.clients.fan_out import FanOut
from engine_client.clients.link import EngineLink, LinkGoneError
from engine_client.clients.traffic import Traffic
from engine_client.deadline import Deadline
from engine_client.protocol.frames import Frame, new_tuple
from engine_client.protocol.wire import encode_utility

__all__ = ["Caller"]


class Caller:
    """Makes the calls of one client.

    Args:
        traffic: of the client.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def begin(self, method: str, ranks: Iterable[int] | None = None, *, closed_too: bool = False) -> FanOut:
        """Begin a call to some engines, by default all; to be discarded by whoever has begun it.

        Args:
            method: names the call in messages.
            ranks: of the engines; None: all that take calls.
            closed_too: also those of them that take no more requests.

        Raises:
            EngineDeadError: there is no engine, or one that is named is dead.
            ValueError: there is no such rank.
        """
        self._traffic.ensure_alive()
        ranks = None if ranks is None else list(ranks)
        for rank in () if closed_too else ranks or ():
            ending = self._traffic.deaths.get(rank)
            if ending is not None:
                raise ending.error()
        links = self._traffic.router.links_of(ranks, closed_too=closed_too)
        if not links and ranks is None:
            raise self._traffic.last_death().error()
        fan_out = FanOut(self._traffic.calls, links, f"the utility {method!r}")
        fan_out.is_to_all, fan_out.is_to_closed = ranks is None, closed_too
        return fan_out

    def send(self, fan_out: FanOut, method: str, args: tuple[Any, ...], deadline: Deadline) -> None:
        """Send a call that was begun; wait while there is no room.

        Raises:
            EngineDeadError: there is no engine.
            TimeoutError: an engine reads nothing, and the deadline came.
            SerializationError, TypeError, ...: an argument cannot be sent; nothing was.
        """
        self._traffic.refuse_to_wait_for_myself()
        for link in fan_out.links:
            self._traffic.wait_for_room(link, deadline)
        for link in self.place(fan_out, self.encode(method, args)):
            self._traffic.wait_over(link)
        self.fail_lost(fan_out)

    def encode(self, method: str, args: tuple[Any, ...]) -> Frame:
        """Encode a call; the frame refers to the arguments' memory.

        Raises:
            SerializationError, TypeError, ...: an argument cannot be sent.
        """
        return encode_utility(0, method, args, main_importable=self._traffic.main_importable)

    def place(self, fan_out: FanOut, frame: Frame) -> list[EngineLink]:
        """Send a call to engines that have room; waits for nothing; return those that take nothing any more.

        Raises:
            EngineDeadError, ValueError: as ``begin``: an engine has died since then, or is being taken away.
        """
        gone = []
        try:
            for index in range(len(fan_out.links)):
                fan_out.register(index)
            # Who takes a rank away first says so and then looks for calls: one of the two sees the other.
            router = self._traffic.router
            closed = [link.rank for link in fan_out.links if not router.takes_calls(link)] if router.closed else []
            if closed and not fan_out.is_to_closed:
                self._leave_out(fan_out, closed)
            for call_id, link in zip(fan_out.ids, fan_out.links, strict=True):
                try:
                    self._traffic.send(link, new_tuple(Frame, (*frame[:2], call_id, *frame[3:])))
                except LinkGoneError:
                    gone.append(link)
        except BaseException:
            fan_out.discard()  # as its owner will, unless a second interrupt is quicker: no reply would end the call
            raise
        return gone

    def _leave_out(self, fan_out: FanOut, closed: Iterable[int]) -> None:
        """Go on with the other engines, if the call is not to certain ones; raise if that cannot be."""
        if not fan_out.is_to_all:
            self.begin(fan_out.what, closed)  # says what is wrong with them
        fan_out.leave_out(closed)
        if not fan_out.links:
            self._traffic.ensure_alive()
            raise self._traffic.last_death().error()

    def fail_lost(self, fan_out: FanOut) -> None:
        """End the calls to engines that died while they were sent: whoever failed the table may have come before."""
        for index, link in enumerate(fan_out.links):
            if self._traffic.ending is not None:
                fan_out.fail(index, self._traffic.ending.error())
            elif link.over.done():
                fan_out.fail(index, (link.over.result() or closed_ending()).error())
