"""Ranks that join and leave while a client serves.

::

    bring_up:  closed to requests ─▶ launch ─▶ READY ─▶ watched ─▶ open         on failure: killed and forgotten
    take_down: closed to requests ─▶ what it has ends ─▶ SHUTDOWN ─▶ forgotten

Ranks in lock-step change their number while the group is paused, so that all of them see it at the same step.

Invariants: I7 (every wait ends with the session), I11.

Threads: any, one call at a time; none of it may run on the reader's thread or on an event loop's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from engine_client.clients.caller import Caller
from engine_client.clients.session import Session
from engine_client.clients.starter import Starter
from engine_client.clients.traffic import LinkGoneError
from engine_client.config import ready_timeout
from engine_client.deadline import Deadline
from engine_client.errors import EngineDeadError
from engine_client.ipc.latch import Latch
from engine_client.messages import EngineCoreReadyResponse
from engine_client.protocol.framing import Kind
from engine_client.protocol.wire import PING, encode_text

__all__ = ["Elastic"]

_LOOK: Final = 0.005
"""Seconds between looks at what a leaving rank still has to do."""


class Elastic:
    """Changes the ranks of one client.

    Args:
        session: of the client.
        starter: starts its engines.
    """

    def __init__(self, session: Session, starter: Starter) -> None:
        self._session = session
        self._starter = starter
        self._caller = Caller(session)
        self._busy = threading.Lock()

    def __repr__(self) -> str:
        return f"<Elastic ranks={sorted(self._session.links)}>"

    def scale(self, size: int) -> tuple[dict[int, EngineCoreReadyResponse], list[int]]:
        """Have ranks 0 to ``size`` - 1; return what the new ones reported, and which have left.

        Raises:
            RuntimeError: another change is under way.
            StartupError: a new rank did not come up; everything is as it was.
            EngineDeadError: the client ended meanwhile.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("the number of ranks is being changed already: wait until that has ended")
        try:
            self._session.ensure_alive()
            ranks = sorted(self._session.links)
            joined = self._grow([rank for rank in range(size) if rank not in ranks])
            left = [rank for rank in ranks if rank >= size]
            self._shrink(left)
            return joined, left
        finally:
            self._busy.release()

    # -- joining -------------------------------------------------------------------------------------------------------

    def _grow(self, ranks: list[int]) -> dict[int, EngineCoreReadyResponse]:
        if not ranks:
            return {}
        responses = self.bring_up(ranks, open_now=False)
        with self._paused():
            self._set_members()
            if self._session.lock_step is not None:
                # The second answer comes behind a look at the members.
                self._call(PING, ranks)
                self._call(PING, ranks)
        self._session.router.closed.difference_update(ranks)
        return responses

    def bring_up(self, ranks: list[int], *, open_now: bool = True) -> dict[int, EngineCoreReadyResponse]:
        """Start engines and serve them; return what each reported.

        Args:
            ranks: numbers that no living engine has.
            open_now: let requests go to them.

        Raises:
            StartupError: one did not come up; none of them is left.
            EngineDeadError: the client ended meanwhile.
        """
        session = self._session
        session.router.closed.update(ranks)
        try:
            links = self._starter.launch(session, ranks)
            for rank in ranks:
                session.tell(rank, "starting")
            responses = self._starter.make_ready(links, Deadline(ready_timeout(session.options)))
            session.ensure_alive()
        except BaseException:
            self._forget(ranks)
            session.ensure_alive()
            raise
        session.group.record_descendants()
        for link in links:
            session.deaths.pop(link.rank, None)
            session.watch(link)
            session.tell(link.rank, "ready")
        if open_now:
            session.router.closed.difference_update(ranks)
        return responses

    def _forget(self, ranks: Iterable[int]) -> None:
        self._session.group.kill_now(ranks)
        for rank in ranks:
            self._session.forget(rank)

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _shrink(self, ranks: list[int]) -> None:
        if not ranks:
            return
        session = self._session
        session.router.closed.update(ranks)
        for rank in ranks:
            session.tell(rank, "leaving")
            self._wait_idle(rank)
        with self._paused():
            self._set_members(without=ranks)
        session.leaving.update(ranks)
        session.group.shutdown(Deadline(session.grace), lambda: self._ask(ranks), ranks=ranks)
        for rank in ranks:
            link = session.links.get(rank)
            if link is not None:
                link.over.wait(session.grace)  # the reader has read what it sent last
            session.forget(rank)

    def _wait_idle(self, rank: int) -> None:
        """Wait until a rank has nothing to do for this client; its death, too, ends that."""
        session = self._session
        pause = Latch()
        while session.in_flight.count(rank) or session.calls.has_rank(rank):
            session.ensure_alive()
            pause.wait(_LOOK)

    def _ask(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            link = self._session.links.get(rank)
            if link is not None:
                with suppress(LinkGoneError):  # it is gone already
                    self._session.send(link, encode_text(Kind.SHUTDOWN, "it is not needed any more"))

    # -- ranks in lock-step --------------------------------------------------------------------------------------------

    def _set_members(self, without: Iterable[int] = ()) -> None:
        if self._session.lock_step is not None:
            self._session.lock_step.set_members(set(self._session.links).difference(without))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Have a lock-step group stand still, all ranks at the same step; independent ranks just go on."""
        if self._session.lock_step is None:
            yield
            return
        members = self._members()
        if self._call("is_scheduler_paused", members):
            yield
            return
        self._call("pause_scheduler", members, "keep", False)
        try:
            yield
        finally:
            with suppress(EngineDeadError):  # whoever uses the client learns of it
                self._call("resume_scheduler", self._members())

    def _members(self) -> list[int]:
        group = self._session.lock_step
        return [] if group is None else [rank for rank in self._session.links if group.page.members() >> rank & 1]

    def _call(self, method: str, ranks: list[int], *args: object) -> object:
        """Call a utility of some ranks, which may be closed to requests."""
        fan_out = self._caller.begin(method, ranks, closed_too=True)
        try:
            self._caller.send(fan_out, method, args, Deadline(None))
            return fan_out.wait(Deadline(None))[0]
        finally:
            fan_out.discard()
