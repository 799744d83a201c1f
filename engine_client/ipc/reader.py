"""The client's one background thread: reads every channel, watches every process, flushes what waits.

::

    channels ──┐                       ┌─▶ handler.on_frames(rank, frames)
    sentinels ─┼─▶ selector ─ thread ──┼─▶ handler.on_end(rank, error)      after the last frame
    wakeup ────┘                       ├─▶ handler.on_exit(rank)            after the pipe was read to its end
                                       └─▶ handler.on_drained(rank)         a backlog was flushed

Order: data wins over the end of the stream, and that over the process's end (invariant I3), so outputs that an engine
sent before it crashed are delivered before its death is.

Invariants: I1 (the one reader of its channels), I3, I10 (whatever ends this thread is reported to the handler).

Threads: ``ReaderThread`` owns its thread.  The methods of its first part may be called from any thread; the handler is
called on the reader's.  An idle thread blocks without a timeout.
"""

from __future__ import annotations

import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from engine_client.deadline import Deadline
from engine_client.ipc.channel import Channel
from engine_client.ipc.loan import Loan, can_lend
from engine_client.ipc.moderation import Moderated
from engine_client.ipc.polling import Exchange
from engine_client.ipc.wakeup import Wakeup
from engine_client.protocol.frames import Frame

__all__ = ["ReaderHandler", "ReaderThread", "is_reader_thread"]


_TICK: Final = 5e-3
"""Seconds in which nobody has read, before the thread does so again."""


class ReaderHandler(Protocol):
    """Who is told what the reader sees.  Called on the reader's thread; exceptions end the reader (I10)."""

    def on_frames(self, rank: int, frames: list[Frame]) -> None:
        """Take frames that arrived, in order."""

    def on_end(self, rank: int, error: BaseException | None) -> None:
        """Note that no more frames will come; ``error`` when the stream was broken."""

    def on_exit(self, rank: int) -> None:
        """Note that the process has ended and its pipe is read to the end."""

    def on_deadline(self, rank: int) -> None:
        """Note that the deadline set for this rank has passed."""

    def on_look(self, rank: int, late: float) -> None:
        """Look how this rank is doing, since it is time to; ``late`` seconds have passed since then."""

    def on_drained(self, rank: int) -> None:
        """Note that everything that waited for this rank is written."""

    def is_awaited(self) -> bool:
        """Tell whether somebody may wait for what comes; False if what came before is not taken yet."""

    def on_reader_failed(self, error: BaseException) -> None:
        """Note that the thread ends because of ``error``."""


_here = threading.local()


def is_reader_thread() -> bool:
    """Tell whether the caller is any client's reader."""
    return getattr(_here, "reader", None) is not None


class ReaderThread:
    """Owns a thread, a selector and a wakeup; ends by ``stop``.

    Args:
        handler: told of everything; it must not reference the client, which is to be collectable while this runs.
        name: of the thread.
        spin_us: microseconds for which the thread polls, and does not sleep, once somebody waits (``expect``); None: as
            long as that pays.
    """

    def __init__(self, handler: ReaderHandler, name: str, spin_us: float | None = 0.0) -> None:
        self._handler = handler
        self._exchange = Exchange(spin_us)
        self._loan: Loan | None = None  # set and ended by the thread
        self._can_lend = can_lend()
        self._selector = selectors.DefaultSelector()  # reader thread only, once it runs
        try:
            self._wakeup = Wakeup()
        except OSError:
            self._selector.close()  # somebody may keep the error, and this object with it
            raise
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = False
        self._requests: deque[Callable[[], None]] = deque()  # append and popleft are atomic by documentation
        # -- reader thread only, once it runs --
        self._channels: dict[int, Channel] = {}
        self._sentinels: dict[int, int] = {}
        self._deadlines: dict[int, Deadline] = {}
        self._looks: dict[int, Deadline] = {}
        self._waits = Moderated(self._selector, handler.is_awaited)
        self._selector.register(self._wakeup.fileno(), selectors.EVENT_READ, ("wakeup", -1))

    def __repr__(self) -> str:
        state = "stopping" if self._stopping else "running" if self._thread.is_alive() else "not running"
        return f"<ReaderThread {self._thread.name} {state} ranks={sorted(self._channels)}>"

    # -- any thread ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, rank: int, channel: Channel, sentinel: int | None) -> None:
        """Watch an engine's channel and, where the process is ours, its sentinel."""
        self.call(lambda: self._add(rank, channel, sentinel))

    def remove(self, rank: int) -> None:
        """Stop watching an engine; at once on this thread, whose caller may close the channel next."""
        if self.is_current():
            self._forget(rank)
        else:
            self.call(lambda: self._forget(rank))

    def set_deadline(self, rank: int, deadline: Deadline) -> None:
        """Have ``on_deadline(rank)`` called unless the rank is removed before."""
        self.call(lambda: self._deadlines.setdefault(rank, deadline))

    def look_at(self, rank: int, deadline: Deadline) -> None:
        """Have ``on_look(rank)`` called, once, unless the rank is removed before; the last deadline counts."""
        self.call(lambda: self._looks.update({rank: deadline}))

    def wakeup(self) -> None:
        """Make the thread look for backlogs to flush."""
        self._wakeup.wakeup()

    def expect(self, *, is_answer: bool, can_read: bool = False) -> Loan | None:
        """Have the thread poll for what comes next: the caller is about to wait for it.

        Args:
            is_answer: to what the caller has asked, while nothing else is under way.  A stream, which comes by itself,
                is not polled for, but where that is asked for: it wakes the thread for many tokens at once.
            can_read: the caller would read it itself, if it may.

        Returns:
            What the caller shall read, for ``poll_seconds``, before it says ``give_up`` and waits.

        While the caller runs, or another thread, this one cannot poll: they would take turns in the interpreter, and
        its lock is handed over in milliseconds.  So it begins when somebody waits, and ends with the first frame.
        """
        exchange, loan = self._exchange, self._loan
        if exchange.is_polled_for(is_answer=is_answer):
            can_read = can_read and is_answer
            if loan is not None and can_read:
                return loan
            if exchange.expect(can_read=can_read):
                self._wakeup.wakeup()
                return None
        if loan is not None:
            self._wakeup.wakeup()
        return None

    @property
    def poll_seconds(self) -> float:
        """Return for how long a caller polls."""
        return self._exchange.polling.spin

    def has_read(self, began: float) -> None:
        """Note that a caller has read what it has waited for since this monotonic second."""
        self._exchange.answered(began)

    def give_up(self, began: float) -> None:
        """Have the thread read again: a caller, which has waited since then, has not read what it waits for."""
        self._exchange.polling.waited(time.monotonic() - began)
        self._wakeup.wakeup()

    def is_alive(self) -> bool:
        """Tell whether the thread runs."""
        return self._thread.is_alive()

    def is_current(self) -> bool:
        """Tell whether the caller is the reader itself."""
        # Not by the thread's number, which another one has as soon as this has ended.
        return getattr(_here, "reader", None) is self

    def stop(self, timeout: float) -> None:
        """End the thread and release its descriptors; idempotent; does not wait when called by the thread itself.

        It ends because it blocks in one place only, and the wakeup interrupts that.
        """
        self._stopping = True
        self._wakeup.wakeup()
        if self._thread.ident is None:
            self._release()
        elif self.is_current():
            self._end_loan()  # the caller may close the channel next
        else:
            self._thread.join(timeout)

    def after_fork_in_child(self) -> None:
        """Close the copies that a forked child has inherited; the thread does not exist there."""
        self._selector.close()
        self._wakeup.close()

    def call(self, request: Callable[[], Any]) -> None:
        """Have the thread call this between two rounds."""
        self._requests.append(request)
        self._wakeup.wakeup()

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _here.reader = self
        # Left to the main thread: what it waits in is interrupted only by a signal that comes to it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while not self._stopping:
                self._serve(self._wait())
        except BaseException as error:  # noqa: BLE001  # I10: whatever ends this thread is reported, not printed
            self._handler.on_reader_failed(error)
        finally:
            self._release()

    def _release(self) -> None:
        if self._loan is not None:
            self._loan.end()
        self._selector.close()
        self._wakeup.close()
        self._channels.clear()

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        limits = [deadline.remaining() or 0.0 for deadline in (*self._deadlines.values(), *self._looks.values())]
        if self._loan is None:
            self._want_writes()
        else:
            limits.append(_TICK)
        return self._waits.select(min(limits, default=None), self._exchange.spin_left())

    def _lend(self, rank: int) -> Loan | None:
        """Stand aside for callers who ask in quick succession: until anything happens but that they read."""
        channel = self._channels.get(rank)
        if self._can_lend and channel is not None and len(self._channels) == 1 and channel.can_be_lent():
            self._selector.unregister(channel.fileno())
            self._loan = Loan(rank, channel)
        return self._loan

    def _end_loan(self) -> int | None:
        """Watch what was lent again; return its rank, if there was a loan."""
        loan, self._loan = self._loan, None  # before it ends: whoever comes now does not even try
        if loan is None:
            return None
        loan.end()
        rank, channel = loan.rank, loan.channel
        if self._channels.get(rank) is channel and channel.fileno() >= 0:
            self._selector.register(channel.fileno(), selectors.EVENT_READ, ("channel", rank))
        return rank

    def _look_after_loan(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read again, and first of all what is left, if anything has happened, or nobody has read for a while."""
        if self._loan is not None and (events or self._requests or self._loan.is_idle()):
            rank = self._end_loan()
            if rank in self._channels:
                self._read(rank)

    def _serve(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Serve one round: channels first, then sentinels, then deadlines."""
        if any(key.data[0] == "wakeup" for key, _ in events):
            self._wakeup.clear()  # first: one that comes after a loan was made in this round is there for the next
        self._look_after_loan(events)
        exits: list[int] = []
        for key, mask in events:
            what, rank = key.data
            if what == "sentinel":
                exits.append(rank)
            elif rank in self._channels:
                if mask & selectors.EVENT_WRITE:
                    self._flush(rank)
                if mask & selectors.EVENT_READ:
                    self._read(rank, lends=True)
        while self._requests:
            self._requests.popleft()()
        for rank in exits:
            self._exit(rank)
        # Nothing may keep the last frames' buffers alive until the next ones come.
        del events
        self._tell_time()

    def _tell_time(self) -> None:
        """Tell what it is time for."""
        for rank in [rank for rank, deadline in self._deadlines.items() if deadline.expired()]:
            del self._deadlines[rank]
            self._handler.on_deadline(rank)
        for rank in [rank for rank, deadline in self._looks.items() if deadline.expired()]:
            due = self._looks.pop(rank, None)
            if due is not None:  # else it was removed just now
                self._handler.on_look(rank, time.monotonic() - due.at)

    def _add(self, rank: int, channel: Channel, sentinel: int | None) -> None:
        self._channels[rank] = channel
        self._selector.register(channel.fileno(), selectors.EVENT_READ, ("channel", rank))
        if sentinel is not None:
            self._sentinels[rank] = sentinel
            self._selector.register(sentinel, selectors.EVENT_READ, ("sentinel", rank))

    def _forget(self, rank: int) -> None:
        if self._loan is not None and self._loan.rank == rank:
            self._end_loan()
        channel = self._channels.pop(rank, None)
        sentinel = self._sentinels.pop(rank, None)
        self._deadlines.pop(rank, None)
        self._looks.pop(rank, None)
        for fd in (channel.fileno() if channel else -1, -1 if sentinel is None else sentinel):
            with suppress(KeyError, ValueError):  # unregistered at the end of its stream, or closed
                self._selector.unregister(fd)

    def _want_writes(self) -> None:
        for rank, channel in self._channels.items():
            wanted = bool(channel.waiting)
            if wanted != channel.is_watched and not channel.ended and channel.fileno() >= 0:
                mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
                self._selector.modify(channel.fileno(), mask, ("channel", rank))
                channel.is_watched = wanted

    def _flush(self, rank: int) -> None:
        try:
            drained = self._channels[rank].flush()
        except BrokenPipeError:
            drained = True  # the reading side tells what happened; those who wait for room must look again
        if drained:
            self._handler.on_drained(rank)

    def _read(self, rank: int, *, lends: bool = False) -> None:
        channel = self._channels[rank]
        frames = channel.receive()
        if frames:
            # Before anybody is woken, who would find it reading; and open once these frames are delivered.
            loan = self._lend(rank) if self._exchange.arrived() and lends else None
            self._handler.on_frames(rank, frames)
            if loan is not None and loan is self._loan:
                loan.open()
        if channel.ended and rank in self._channels:
            self._selector.unregister(channel.fileno())
            self._handler.on_end(rank, channel.fault)

    def _exit(self, rank: int) -> None:
        """Read what the dead process left, to the last byte, then report its end."""
        sentinel = self._sentinels.pop(rank, None)
        if sentinel is None:
            return
        self._selector.unregister(sentinel)
        self._end_loan()  # which may have been made in this very round
        channel = self._channels.get(rank)
        while channel is not None and not channel.ended and channel.fileno() >= 0:
            before = channel.received
            self._read(rank)
            if channel.received == before:
                break  # a descendant still holds the other end; all that was sent is read
        self._handler.on_exit(rank)
