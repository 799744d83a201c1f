"""Everything behind a multi-process client that must outlive it: engines, channels, the reader, the tables.

What callers do with it is in ``Traffic``, how ranks come and go in ``Membership``; here is how it begins and ends.

A client owns one session, and a finalizer of the client owns it too; the session knows neither, so that dropping the
last reference to a client ends its session (I6).

Invariants: I2, I3, I4 (``_ending`` is set once and never changes), I6, I8 (no callback, join or blocking send under
``_lock``).

Threads: the methods of the first part are called by any thread; ``on_*`` by the reader.  ``_lock`` is re-entrant, since
a finalizer may run on a thread that holds it, and is held for assignments only.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from engine_client.clients.delivery import deliver
from engine_client.clients.endings import EXIT_TIMEOUT, JOIN_TIMEOUT, Ending, closed_ending, death_of
from engine_client.clients.link import EngineLink
from engine_client.clients.membership import Membership
from engine_client.clients.stalls import StallWatch
from engine_client.config import ClientOptions, shutdown_grace
from engine_client.deadline import Deadline
from engine_client.errors import RemoteProtocolError
from engine_client.ipc.arena import MAX_PARTIES, ArenaWriter, create_memory
from engine_client.ipc.group import Group
from engine_client.ipc.handle import ChildHandle
from engine_client.ipc.latch import Latch
from engine_client.ipc.reader import ReaderThread, is_reader_thread
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.lifecycle import Action, Event
from engine_client.protocol.wire import encode_text

__all__ = ["Session"]

_log = logging.getLogger("engine_client.session")

_STOP_MARGIN: Final = 0.7
"""Seconds after the grace that a stop may take in all: what is left is killed, and the reader ends."""
_LEAST_JOIN: Final = 0.05
"""Seconds that the reader gets to end, however late it is."""


class Session(Membership):
    """Owns the engines of one client, their channels, the request memory and the reader; ``close`` ends all of them.

    Args:
        options: of the client.
        on_end: told, on whichever thread, as soon as nothing more can be sent.
        start: number of this front-end among those of the same engines.
    """

    def __init__(self, options: ClientOptions, on_end: Callable[[], None] = lambda: None, start: int = 0) -> None:
        super().__init__(options, start)
        self.grace = shutdown_grace(options)  # of a finalizer
        self.writer: ArenaWriter | None = None
        self.cancel_exit_hook: Callable[[], object] = lambda: None
        self._on_end = on_end
        self._reader = ReaderThread(self, f"engine-client-reader-{os.getpid()}", options.spin_us)
        self._stalls = StallWatch(options.stall_limit, self._reader.look_at, self._die)
        self._released = Latch()
        self.is_guest = False  # the engines are another process's, which ends them
        self.lock_step: Group | None = None  # of ranks that step together, and end together
        self.on_loss: Callable[[int, Ending], None] = lambda rank, ending: None  # told of a rank that others survive
        self._running: set[int] = set()  # ranks whose process has not ended; reader thread only
        self._reader_awaited = self._quiet = self._releasing = False
        _sessions.add(self)

    def __repr__(self) -> str:
        pids = ",".join(str(link.pid) for link in self.links.values())
        return f"<Session {self.state} pids={pids} in_flight={len(self.in_flight)} pending={len(self.calls)}>"

    # -- any thread ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Return ``running``, ``closing``, ``closed``, ``dead`` or ``forked``."""
        if self.owner_pid != os.getpid():
            return "forked"
        if self._ending is None:
            return "closing" if self._closing else "running"
        return "closed" if self._ending.closed else "dead"

    def acquire(self, ranks: list[int], *, lock_step: bool) -> None:
        """Make what all engines share: the memory for requests, and what ranks in lock-step vote with.

        Raises:
            OSError: memory or descriptors have run out.
        """
        # Nothing can fail between the two.  Whoever starts with one rank may have many later.
        self.writer = ArenaWriter(create_memory("engine-requests"), limit=self.options.arena_limit, parties=MAX_PARTIES)
        if lock_step:
            self.lock_step = Group(ranks)

    def adopt(self, link: EngineLink) -> None:
        """Own an engine that was just launched."""
        self.links[link.rank] = link
        assert isinstance(link.handle, ChildHandle)  # since it was launched here
        self.group.add(link.rank, link.handle, link.status.strays)
        medium = "the pipe" if self.writer is None else self.writer.medium
        threshold = self.options.arena_threshold
        _log.info("%s: buffers of %d bytes and more travel through %s", link.title, threshold, medium)

    def serve(self) -> None:
        """Start the reader, once all engines are ready."""
        for link in self.links.values():
            self.watch(link)
        self._reader.start()

    def watch(self, link: EngineLink) -> None:
        """Have the reader serve an engine that is ready."""
        self._reader.call(partial(self._running.add, link.rank))
        self._reader.add(link.rank, link.channel, None if link.handle.sentinel < 0 else link.handle.sentinel)
        self._stalls.watch(link)

    # -- the end, by the user ------------------------------------------------------------------------------------------

    def close(self, grace: float, *, quiet: bool = False) -> None:
        """End the engines and release everything; idempotent, from any thread, finalizers included.

        Who calls it while another one is at it joins in: the shorter grace counts.  On the reader thread of another
        client, where only the garbage collector calls it, it leaves the work to this one's.

        Args:
            grace: seconds for the polite end; then they are killed.
            quiet: do not wake those who wait, who can be daemon threads at the interpreter's end only: they would have
                nobody to tell and print a traceback.
        """
        if self.owner_pid != os.getpid():
            return
        if self._reader.is_alive() and is_reader_thread() and not self._reader.is_current():
            self._reader.call(partial(self.close, grace, quiet=quiet))
            return
        limit = Deadline(grace + _STOP_MARGIN)
        with self._lock:
            is_over, was_quiet = self._ending is not None, self._quiet
            self._closing = True
            self._quiet = quiet and (was_quiet or not is_over)
        if was_quiet and not quiet and self._ending is not None:
            self._fail_all(self._ending)  # whom a finalizer has left asleep
        try:
            if not is_over and not self.is_guest:
                self.group.shutdown(Deadline(grace), self._ask)
                if self._reader.is_alive() and not self._reader.is_current():
                    self._reader.call(self._end_if_all_have)  # no exit comes of those that were dead before
                    self._ended.wait(limit.capped(JOIN_TIMEOUT))  # until it has read what the engines sent last
        finally:
            self.abandon(limit)
        self.await_starts(limit)
        if not self._reader.is_current():
            self._released.wait(limit.capped(JOIN_TIMEOUT))  # another thread may be at it
            if not self._reader_awaited:  # once: it may be stuck in somebody's callback
                self._reader_awaited = True
                self._reader.stop(limit.capped(JOIN_TIMEOUT))  # it may have released all by itself, and be about to end

    def abandon(self, limit: Deadline | None = None) -> None:
        """Kill the engines and release everything, without a word to them; the reader is waited for up to a limit."""
        self._closing = True
        self._end(closed_ending())
        self._release(limit or Deadline(JOIN_TIMEOUT))

    def _ask(self) -> None:
        for link in list(self.links.values()):
            self._reader.call(partial(link.life.happened, Event.CLOSE))
            with suppress(BrokenPipeError):  # it is gone already
                if not link.channel.send(encode_text(Kind.SHUTDOWN, "the client asked")):
                    self._reader.wakeup()

    def _end(self, ending: Ending) -> bool:
        """Set the ending, once, and tell every waiter; return whether this was the first."""
        with self._lock:
            if self._ending is not None:
                return False
            self._ending = ending
        self._on_end()
        self.events.end()
        if self._quiet:
            self.outputs.end(ending.error, wake=False)
            self.streams.end(ending.error, wake=False)
            self._ended.set()
        else:
            self._fail_all(ending)
        return True

    def _release(self, limit: Deadline) -> None:
        """Give everything back, once; after an interrupt the next call goes on with it."""
        with self._lock:
            if self._releasing:
                return
            self._releasing = True
        try:
            self.group.kill_now()
            self._reader.stop(max(_LEAST_JOIN, limit.capped(JOIN_TIMEOUT)))
            for link in list(self.links.values()):
                link.close()
            self.group.close()
            if self.writer is not None:
                self.writer.close()
            if self.lock_step is not None:
                self.lock_step.close()
            self.cancel_exit_hook()
            self._released.set()
        finally:
            self._releasing = self._released.is_set()

    def forget_after_fork(self) -> None:
        """Close this process's copies of the descriptors, in a forked child; the parent's are untouched."""
        self.group.after_fork_in_child()
        self._reader.after_fork_in_child()
        for link in list(self.links.values()):
            link.close_after_fork()
        if self.writer is not None:
            self.writer.close_after_fork()
        if self.lock_step is not None:
            self.lock_step.close()

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def on_frames(self, rank: int, frames: list[Frame]) -> None:
        """Deliver frames; one that cannot be used fails what it belongs to, never the reader."""
        link = self.links[rank]
        for frame in frames:
            try:
                limit = deliver(self, link, frame, is_quiet=self._quiet, grace=self.grace)
                if limit is not None:
                    self._reader.set_deadline(rank, limit)
            except Exception as error:  # noqa: BLE001  # a batch that cannot be decoded: whose was it?
                self._die(rank, RemoteProtocolError(f"a frame cannot be used: {type(error).__name__}: {error}"))
                return

    def on_end(self, rank: int, error: BaseException | None) -> None:
        """Take the end of a stream: at once when it is broken, else when the process ends, which is due now."""
        link = self.links[rank]
        link.life.happened(Event.EOF if error is None else Event.VIOLATION)
        if error is not None or link.handle.sentinel < 0:  # else nothing may tell: it was gone before it was watched
            self._die(rank, error)
        elif link.farewell is None:
            self._reader.set_deadline(rank, Deadline(EXIT_TIMEOUT))

    def on_exit(self, rank: int) -> None:
        """Take the end of a process."""
        self.links[rank].life.happened(Event.EXIT)
        self._running.discard(rank)
        self._die(rank, None)

    def on_deadline(self, rank: int) -> None:
        """Take that a process did not end though its stream did."""
        if self.links[rank].life.happened(Event.DEADLINE) is not Action.IGNORE:  # another's, who had this number before
            self._die(rank, None)

    def on_look(self, rank: int, late: float) -> None:
        """End an engine that has been busy with one thing for too long, or say when to look again."""
        self._stalls.look(self.links[rank], late)

    def on_reader_failed(self, error: BaseException) -> None:
        """Take the end of the reader itself; whatever it was, nobody may wait for it any longer."""
        link = next(iter(self.links.values()))
        ending = Ending(f"{link.title} is given up, since this client failed to read it: {error!r:.1000}", cause=error)
        if self._end(closed_ending() if self._closing else ending):
            _log.error("%s", ending.message)
        if not self._closing:
            self._release(Deadline(JOIN_TIMEOUT))

    def _die(self, rank: int, fault: BaseException | None) -> None:
        """Declare an engine dead, tell everybody, and clean up; or note the end that ``close`` is waiting for."""
        if self._closing:
            self._end_if_all_have()
            return
        link = self.links[rank]
        if link.over.done():
            return
        if link.handle.is_alive() and not (link.is_foreign and link.farewell is not None):
            if link.last_words is None and fault is None:
                fault = RemoteProtocolError("it closed its channel and did not end")
            self.group.kill_now([rank])
        ending = death_of(link, link.handle.exitcode, fault)
        if rank in self.leaving or self._survives(rank):
            self._lose(link, ending)
        elif self._end(ending):
            _log.log(logging.INFO if ending.in_order else logging.ERROR, "%s", ending.message)
            self._release(Deadline(JOIN_TIMEOUT))

    def give_up_on(self, links: list[EngineLink], error: BaseException) -> list[EngineLink]:
        """Declare engines dead that do not answer, if the options say so; return those whose end is now due."""
        if not self.options.kill_unresponsive or self.is_guest:
            return []
        for link in links:
            self._reader.call(partial(self._stalls.end, link, error))
        return links

    def _end_if_all_have(self) -> None:
        if not self._running or not self._reader.is_alive():
            self._end(closed_ending())

    def _survives(self, rank: int) -> bool:
        """Tell whether the client goes on without a rank."""
        if self.options.on_engine_death == "shutdown" or self.lock_step is not None:
            return False
        others = (link for link in self.router.open_links() if link.rank != rank)
        return self.options.on_engine_death == "restart" or any(others)

    def _lose(self, link: EngineLink, ending: Ending) -> None:
        """Go on without a rank: what it had fails, everything else stays as it is."""
        rank = link.rank
        was_wanted = rank not in self.leaving
        with self._lock:
            if was_wanted:
                self.deaths[rank] = self.past[rank] = ending
            self.router.closed.add(rank)  # before its requests fail: see ``place``
        if was_wanted:
            _log.error("%s", ending.message)
            self.tell(rank, "dead", ending.message)
        self._running.discard(rank)
        self._reader.remove(rank)
        self.fail_requests(rank, ending)
        if self.writer is not None and not (link.is_foreign and link.handle.is_alive()):  # who goes on may release it
            self.writer.reclaim(rank)
        if was_wanted and self.group.reap(rank):
            self.group.forget(rank)
        link.close()
        link.over.set_result(ending)
        self.calls.fail_rank(rank, ending.error)  # after that: see ``Caller.fail_lost``
        self.room.wake()
        if was_wanted:
            self.on_loss(rank, ending)

    # -- ranks that come and go ----------------------------------------------------------------------------------------

    def give_up(self, ending: Ending) -> None:
        """End with a rank that stays dead, if no other serves."""
        if self.state == "running" and not self.router.open_links() and self._end(ending):
            self._release(Deadline(JOIN_TIMEOUT))

    def await_end(self, timeout: float) -> bool:
        """Wait for the end, at most ``timeout`` seconds; return whether it has come."""
        return self._ended.wait(timeout) or self.state != "running"


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
