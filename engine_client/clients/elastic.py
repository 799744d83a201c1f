"""Ranks that join and leave while a client serves.

::

    bring_up: closed to requests ─▶ launch ─▶ READY ─▶ watched ─▶ in the others' state ─▶ open
                                        └─ fails ─▶ killed; what was before is there again
    shrink:   closed to requests ─▶ what it has ends ─▶ SHUTDOWN ─▶ forgotten

Ranks in lock-step change their number while the group is paused, so that all of them see it at the same step.

Invariants: I7 (every wait ends with the session), I11.

Threads: any, but neither the reader's nor an event loop's.  One call of ``scale`` at a time; whoever starts or ends a
rank claims it meanwhile, so that a restart and a change of the number do not meet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from engine_client.clients.caller import Caller
from engine_client.clients.endings import Ending, name_and_text
from engine_client.clients.link import EngineLink, LinkGoneError
from engine_client.clients.session import Session
from engine_client.clients.starter import Starter
from engine_client.config import ready_timeout
from engine_client.deadline import NEVER, Deadline
from engine_client.errors import EngineDeadError
from engine_client.ipc.latch import LONGEST_SLEEP, Latch
from engine_client.messages import EngineCoreReadyResponse
from engine_client.protocol.frames import Kind
from engine_client.protocol.wire import PING, encode_text

__all__ = ["Elastic"]

_LOOK: Final = 0.005
"""Seconds between looks at what a leaving rank still has to do."""

Responses = dict[int, EngineCoreReadyResponse]


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
        self._claims = threading.Condition()
        self._claimed: set[int] = set()  # guarded by _claims

    def __repr__(self) -> str:
        return f"<Elastic ranks={sorted(self._session.links)}>"

    def scale(self, size: int) -> tuple[Responses, list[int]]:
        """Have ranks 0 to ``size`` - 1, dead ones started again; return what new ones reported, and which have left.

        Raises:
            RuntimeError: another change is under way.
            StartupError: a new rank did not come up; everything is as it was.
            EngineDeadError: the client ended meanwhile.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("the number of ranks is being changed already: wait until that has ended")
        try:
            self._session.ensure_alive()
            joined = self._grow(size)
            return joined, self._shrink(size)
        finally:
            self._busy.release()

    def bring_back(self, rank: int) -> None:
        """Start a dead rank again, unless somebody else has, or has taken it away.

        Raises:
            Exception: it did not come up, or not into the others' state.
        """
        with self._claim([rank]):
            if rank in self._session.deaths:
                before = dict(self._session.deaths)
                self._bring_up([rank])
                try:
                    is_paused = self._take_part([rank])
                except BaseException:
                    self._session.group.kill_now([rank])  # which is one more death
                    raise
                self._admit([rank], before, is_paused=is_paused)

    @contextmanager
    def _claim(self, ranks: Iterable[int]) -> Iterator[None]:
        """Have some ranks to oneself; whoever else has one of them is waited for."""
        mine = set(ranks)
        with self._claims:
            while not self._claimed.isdisjoint(mine):
                self._claims.wait(LONGEST_SLEEP)
                self._session.ensure_alive()
            self._claimed |= mine
        try:
            yield
        finally:
            with self._claims:
                self._claimed -= mine
                self._claims.notify_all()

    # -- joining -------------------------------------------------------------------------------------------------------

    def _grow(self, size: int) -> Responses:
        wanted = self._missing(size)
        with self._claim(wanted):
            ranks = [rank for rank in wanted if rank in self._missing(size)]  # others may have brought some back
            if not ranks:
                return {}
            before = dict(self._session.deaths)
            responses = self._bring_up(ranks)
            try:
                is_paused = self._take_part(ranks)
            except BaseException:
                self._end(ranks)
                raise
            self._admit(ranks, before, is_paused=is_paused)
            return responses

    def _missing(self, size: int) -> list[int]:
        session = self._session
        return [rank for rank in range(size) if rank not in session.links or rank in session.deaths]

    def _bring_up(self, ranks: list[int]) -> Responses:
        """Start engines, closed to requests; return what each reported; if one fails, none of them is left."""
        session = self._session
        dead = {rank: session.links.get(rank) for rank in ranks}
        self._wait_over([link for link in dead.values() if link is not None])  # tables know it by its number
        with session.starting():
            session.router.closed.update(ranks)
            try:
                links = self._starter.launch(session, ranks)
                for link in links:
                    session.tell(link.rank, "starting", link.phase)
                deadline = Deadline(ready_timeout(session.options))
                responses = self._starter.make_ready(links, deadline, session.ensure_alive)
                session.ensure_alive()
            except BaseException as error:
                session.group.kill_now(ranks)
                for rank in ranks:
                    session.undo_start(rank, dead[rank])
                    session.tell(rank, "dead", name_and_text(error))
                session.ensure_alive()
                raise
            session.group.record_descendants()
            for link in links:
                session.watch(link)
                session.tell(link.rank, "ready")
        return responses

    def _admit(self, ranks: list[int], before: Mapping[int, Ending], *, is_paused: bool) -> None:
        """Open new ranks; the others may have been resumed since it was seen that they are paused."""
        self._session.admit(ranks, before)
        others = [link.rank for link in self._session.router.open_links() if link.rank not in ranks]
        if is_paused and others:
            with suppress(EngineDeadError):  # whoever uses the client learns of it
                if not self._call("is_scheduler_paused", others[:1]):
                    self._call("resume_scheduler", ranks)

    def _take_part(self, ranks: list[int]) -> bool:
        """Bring new ranks into the others' group, and pause them if those are; return whether it did."""
        if self._session.lock_step is None:
            others = [link.status.snapshot() for link in self._session.router.open_links()]
            was_paused = bool(others) and all(page.is_paused or page.is_sleeping for page in others)
            if was_paused:
                self._call("pause_scheduler", ranks, "keep", False)
            return was_paused
        with self._paused() as was_paused:
            self._session.lock_step.set_members(self._session.links)
            # The second answer comes behind a look at the members.
            self._call(PING, ranks)
            self._call(PING, ranks)
            if was_paused:
                self._call("pause_scheduler", ranks, "keep", False)
        return was_paused

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _shrink(self, size: int) -> list[int]:
        session = self._session
        ranks = sorted(rank for rank in list(session.links) if rank >= size)
        if not ranks:
            return []
        with self._claim(ranks):
            session.departing.update(ranks)
            session.router.draining.update(ranks)
            session.router.closed.update(ranks)
            try:
                for rank in ranks:
                    session.tell(rank, "leaving")
                self._wait_idle(ranks)
                if session.lock_step is not None:
                    with self._paused():
                        session.lock_step.set_members(set(session.links).difference(ranks))
            except BaseException:
                session.departing.difference_update(ranks)
                session.router.draining.difference_update(ranks)
                session.admit((rank for rank in ranks if rank not in session.deaths), {})
                raise
            self._end(ranks)
        return ranks

    def _wait_idle(self, ranks: list[int]) -> None:
        """Wait until ranks have nothing to do for this client; a death, too, ends that.

        They take calls until their requests have ended: one that resumes them may be needed for that.
        """
        session = self._session
        self._wait_while(lambda rank: session.in_flight.count(rank) > 0, ranks)
        session.router.draining.difference_update(ranks)
        self._wait_while(session.calls.has_rank, ranks)

    def _wait_while(self, is_busy: Callable[[int], bool], ranks: list[int]) -> None:
        pause = Latch()
        while any(is_busy(rank) and not self._session.links[rank].over.done() for rank in ranks):
            pause.wait(_LOOK)
            self._session.ensure_alive()

    def _end(self, ranks: list[int]) -> None:
        """End ranks whose end is wanted, and forget them."""
        session = self._session
        session.leaving.update(ranks)
        session.group.shutdown(Deadline(session.grace), lambda: self._ask(ranks), ranks=ranks)
        self._wait_over([session.links[rank] for rank in ranks])
        for rank in ranks:
            session.forget(rank)

    def _wait_over(self, links: list[EngineLink]) -> None:
        """Wait until the reader has dealt with the end of some engines."""
        for link in links:
            while not link.over.wait(LONGEST_SLEEP):
                self._session.ensure_alive()
            self._session.ensure_alive()

    def _ask(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with suppress(LinkGoneError):  # it is gone already
                self._session.send(self._session.links[rank], encode_text(Kind.SHUTDOWN, "it is not needed any more"))

    # -- ranks in lock-step --------------------------------------------------------------------------------------------

    @contextmanager
    def _paused(self) -> Iterator[bool]:
        """Have a lock-step group stand still, all ranks at the same step; yield whether it did already."""
        members = self._members()
        was_paused = bool(self._call("is_scheduler_paused", members))
        if not was_paused:
            self._call("pause_scheduler", members, "keep", False)
        try:
            yield was_paused
        finally:
            if not was_paused:
                with suppress(EngineDeadError):  # whoever uses the client learns of it
                    self._call("resume_scheduler", self._members())

    def _members(self) -> list[int]:
        group = self._session.lock_step
        return [] if group is None else [rank for rank in list(self._session.links) if group.page.members() >> rank & 1]

    def _call(self, method: str, ranks: list[int], *args: object) -> object:
        """Call a utility of some ranks, which may be closed to requests; return the first one's value."""
        fan_out = self._caller.begin(method, ranks, closed_too=True)
        try:
            self._caller.send(fan_out, method, args, NEVER)
            for reply in fan_out.replies:
                while not reply.wait(LONGEST_SLEEP):
                    self._session.ensure_alive()  # a client that was dropped wakes nobody
            return fan_out.wait(Deadline(0))[0]
        finally:
            fan_out.discard()
