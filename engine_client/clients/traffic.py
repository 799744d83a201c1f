"""What goes to and fro while the engines of a client live: requests, aborts, calls; outputs and replies.

::

    caller ── add · abort · call ──▶ Traffic ── frame ──▶ Channel ──▶ engine
    caller ◀── OutputQueue · replies ── Traffic ◀── ReaderThread ◀── engine

An interrupt (Ctrl-C) may end a call between any two of its lines.  What a call leaves behind is therefore named before
it exists (a key, a call id), so that it can be taken back from wherever the call got to.

Invariants: I2, I7 (a caller waits for room or for an output, and both are ended by death and by close), I9.

Threads: every method from any thread, but for ``_take_*`` and ``on_drained``, which are the reader's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from engine_client.clients.aborts import Aborts
from engine_client.clients.calls import PendingCalls
from engine_client.clients.endings import OVER_TIMEOUT, Ending, closed_ending, owner_of_fork
from engine_client.clients.in_flight import InFlight, check_request
from engine_client.clients.link import EngineLink, LinkGoneError
from engine_client.clients.outputs import OutputQueue
from engine_client.clients.room import Room
from engine_client.clients.router import LinkClosedError, Router
from engine_client.clients.streams import StreamTable
from engine_client.config import ClientOptions
from engine_client.deadline import NEVER, Deadline
from engine_client.errors import ForeignProcessError, LocalProtocolError
from engine_client.ipc.latch import Latch
from engine_client.ipc.loan import Loan
from engine_client.ipc.reader import ReaderThread
from engine_client.protocol.batch import Columns, decode_columns, failed_batch
from engine_client.protocol.exception_fields import text_of
from engine_client.protocol.frames import Frame
from engine_client.protocol.wire import encode_abort, encode_add

__all__ = ["Traffic"]

_log = logging.getLogger("engine_client.session")


class Traffic:
    """The part of a session that serves callers; ``Session`` adds how it ends.

    Args:
        options: of the client.
        start: number of this front-end among those of the same engines.
    """

    _reader: ReaderThread

    def __init__(self, options: ClientOptions, start: int = 0) -> None:
        self.options = options
        self.owner_pid = os.getpid()
        self.links: dict[int, EngineLink] = {}
        self.calls = PendingCalls()
        self.in_flight = InFlight()
        self.router = Router(self.links, self.in_flight, start)
        self.streams = StreamTable()
        self.callers: set[int] = set()  # threads that are in a call, or whose last one was interrupted and not undone
        self.max_model_len: int | None = None
        self.main_importable = True
        self.outputs = OutputQueue(self.in_flight, self._on_lost)
        self.deaths: dict[int, Ending] = {}  # of ranks that others survive
        self.past: dict[int, Ending] = {}  # as ``deaths``, and stays there when the rank is back
        self.room = Room(options.high_water, lambda: self._ending is not None or self._reader.is_current())
        self.aborts = Aborts(self.in_flight, self.streams, self._send_aborts)
        self.look_around: Callable[[], None] | None = None  # called at each batch: who of those who wait is gone?
        self._consumer = 0  # the thread that last asked for outputs
        self._is_fresh = False  # of the last request that was sent nothing has come yet
        self._logged: set[str] = set()  # kinds of strange things that were logged once
        self._ended = Latch()
        self._ending: Ending | None = None
        self._closing = False

    @property
    def ending(self) -> Ending | None:
        """Return how the engines ended; None while they serve."""
        return self._ending

    def ensure_alive(self) -> None:
        """Raise if nothing can be sent any more.

        Raises:
            EngineDeadError: the engine is dead; ClosedError: the client is closed.
            ForeignProcessError: this is a forked copy of the client's process.
        """
        if self.owner_pid != os.getpid():
            self.refuse_copies()
        if self._ending is not None:
            raise self._ending.error()
        if self._closing:
            raise closed_ending().error()

    def refuse_copies(self) -> None:
        """Raise ``ForeignProcessError`` in a forked copy of the process; takes no lock, as nothing there may."""
        if self.owner_pid != os.getpid():
            raise ForeignProcessError(owner_of_fork(self.owner_pid))

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Any, key: int | None = None, stream: OutputQueue | None = None) -> None:
        """Check and send a request; wait while there is no room.

        Args:
            request: what to send.
            key: from ``in_flight.new_key``; None: a new one.
            stream: where its outputs go; None: to ``get``.

        Raises:
            TypeError, ValueError: the request cannot be served as it is.
            EngineDeadError: there is no engine.
        """
        prompt = self.check(request)
        while True:
            link = self.choose(request)
            self.wait_for_room(link)
            try:
                return self.place(link, request, prompt, key=key, stream=stream)
            except LinkClosedError:
                continue
            except LinkGoneError as error:
                self.wait_over(error.link)
                self.raise_death(error.link, stream)  # unless there is another rank to go to

    def check(self, request: Any) -> array[int] | None:
        """Raise if a request cannot be sent; return its prompt."""
        self.ensure_alive()
        return check_request(request, self.max_model_len)

    def choose(self, request: Any) -> EngineLink:
        """Return the engine for a request.

        Raises:
            ValueError: it asks for a rank that there is not.
            EngineDeadError: no engine is left that takes requests.
        """
        rank: Any = getattr(request, "data_parallel_rank", None)
        ending = self.deaths.get(rank)
        if ending is not None:
            raise ending.error()
        link = self.router.choose(request)
        if link is None:
            self.ensure_alive()
            raise self.last_death().error()
        return link

    def last_death(self) -> Ending:
        """Return the ending of the rank that died last."""
        return next(reversed(list(self.deaths.values())), None) or closed_ending()

    def place(  # noqa: PLR0913  # most of them by name
        self,
        link: EngineLink,
        request: Any,
        prompt: array[int] | None,
        *,
        key: int | None = None,
        stream: OutputQueue | None = None,
        owner: Hashable = None,
        frame: Frame | None = None,
    ) -> None:
        """Send a request that was checked, to an engine that has room; waits for nothing.

        ``owner`` is that of ``InFlight.add``; ``frame`` is what ``encode`` has returned for this key, if it was called.

        Raises:
            LinkClosedError: the engine takes no more requests since it was chosen.
            LinkGoneError: the engine takes nothing any more.
            ValueError: a request of this id is in flight.
            Exception: a field cannot be sent.
        """
        key = self.in_flight.new_key() if key is None else key
        try:
            if self.aborts.noted:
                self._abort_noted()
            if stream is not None:
                self.streams.add(key, stream)
            self.in_flight.add(request.request_id, key, link.rank, owner)
            self.router.ensure_open(link)
            self._is_fresh = True
            self.send(link, frame or self.encode(key, request, prompt))
        except Exception:
            self.in_flight.discard(key)
            self.streams.discard(key)
            raise
        except BaseException:  # an interrupt: whether it has been sent is not known, so it is taken back
            self.aborts.note({key: link.rank})
            self._abort_noted()
            raise

    def encode(self, key: int, request: Any, prompt: array[int] | None) -> Frame:
        """Encode a request that was checked; the frame refers to the memory of its fields."""
        return encode_add(key, request, prompt, main_importable=self.main_importable)

    def abort(self, request_ids: Iterable[Any]) -> None:
        """End requests without further output; what is not in flight is ignored, and so is everything after death."""
        self.refuse_copies()
        self.aborts.note(self.in_flight.keys_of([request_ids] if isinstance(request_ids, str) else request_ids))
        self._abort_noted()

    def take_back(self, key: int) -> None:
        """Abort a request whose stream has ended early."""
        if self.owner_pid == os.getpid():
            self.aborts.note(self.in_flight.ranks_of([key]))
            self.streams.discard(key)
            self._abort_noted()

    def stream_queue(self, key: int) -> OutputQueue:
        """Return a queue for the outputs of one request."""
        return OutputQueue(self.in_flight, self._on_lost, partial(self.take_back, key))

    def abort_of(self, owners: Iterable[Hashable]) -> None:
        """Abort all requests of some owners, who are gone, and give up their calls."""
        for owner in owners:
            self.calls.discard_of(owner)
            self.aborts.note(self.in_flight.mine(owner))
        self._abort_noted()

    def forget_stream(self, key: int) -> None:
        """Note that a stream is over, and with it its request: ended, never sent, or lost with its engine."""
        self.streams.discard(key)
        self.in_flight.discard(key)

    def interrupted(self) -> None:
        """Clean up after a call that an interrupt ended: abort what this thread has in flight, and drop its outputs.

        Where another thread takes the outputs, it goes on to get them: only the interrupted call itself is undone.
        Streams are calls of their own.
        """
        self.callers.add(threading.get_ident())
        self.settle()

    def settle(self) -> None:
        """Undo what an interrupt of the calling thread has left; a second interrupt leaves it to the next call."""
        me = threading.get_ident()
        if self._consumer in (0, me):
            mine = self.in_flight.mine()
            self.aborts.note({key: rank for key, rank in mine.items() if key not in self.streams})
        self._abort_noted()
        self.callers.discard(me)

    def _abort_noted(self) -> None:
        if self.aborts.noted:
            self.aborts.carry_out(can_send=self._ending is None and not self._closing)

    def _send_aborts(self, rank: int, keys: list[int]) -> None:
        link = self.links.get(rank)
        if link is not None and not link.over.done():
            with suppress(LinkGoneError):  # nobody is left who could go on with them
                self._write(link, encode_abort(keys))

    # -- outputs -------------------------------------------------------------------------------------------------------

    def consumes(self) -> None:
        """Note that the calling thread takes outputs."""
        if self.aborts.noted:
            self._abort_noted()
        self._consumer = threading.get_ident()

    def expect(self) -> None:
        """Note that the calling thread is about to wait for what an engine sends."""
        self.expect_or_read(can_read=False)

    def expect_or_read(self, *, can_read: bool) -> Loan | None:
        """Note that the calling thread is about to wait for what an engine sends; return what it shall read itself."""
        under_way = len(self.in_flight) + len(self.calls.replies)
        # Where more is under way, what comes next is seldom that answer, and threads that poll hold up those that work.
        is_answer = under_way == 1 and bool(self._is_fresh or self.calls.replies)
        return self._reader.expect(is_answer=is_answer, can_read=can_read) if under_way else None

    def refuse_to_wait_for_myself(self) -> None:
        """Raise on the reader's thread: in a done-callback of a pending call, say, or in a ``__del__``."""
        if self._reader.is_current():
            raise LocalProtocolError(
                "this would wait for ever: it was called on the thread that reads what the engine answers"
            )

    # -- sending and its end ---------------------------------------------------------------------------------------

    def wait_for_room(self, link: EngineLink, deadline: Deadline | None = None) -> None:
        """Wait while more than the high-water mark is queued; death and close end the wait."""
        if link.channel.waiting and not self.room.is_free(link):
            self.room.wait(link, deadline or NEVER)
            self.ensure_alive()

    def wait_over(self, link: EngineLink) -> None:
        """Wait until the death of an engine was dealt with, which takes no longer than the bounds of I3."""
        if not self._reader.is_current():
            link.over.wait(OVER_TIMEOUT)

    def raise_death(self, link: EngineLink, stream: OutputQueue | None = None) -> None:
        """Raise the error of a death that was dealt with, unless others and the stream have survived it: try these."""
        self.ensure_alive()
        ending: Ending | None = link.over.result() if link.over.done() else None
        if ending is None or (stream is not None and stream.has_ended):
            raise (ending or closed_ending()).error()

    def send(self, link: EngineLink, frame: Frame) -> None:
        """Send a frame behind the aborts that are noted.

        Raises:
            LinkGoneError: the engine takes nothing any more.
        """
        if self.aborts.noted:
            self._abort_noted()
        self._write(link, frame)

    def _write(self, link: EngineLink, frame: Frame) -> None:
        try:
            if not link.channel.send(frame):
                self._reader.wakeup()
            elif self.room.waiters:
                self.room.wake()  # the reader does not see what room this has made
        except BrokenPipeError:
            raise LinkGoneError(link) from None
        except BaseException:
            self._reader.wakeup()  # an interrupt may have left half a frame, which goes out all the same
            raise

    def _fail_all(self, ending: Ending) -> None:
        """Tell everybody who waits that nothing will come."""
        self.calls.fail_all(ending.error)
        self.streams.end(ending.error)
        self.outputs.end(ending.error)
        for link in list(self.links.values()):
            link.over.set_result(ending)
        self.room.wake()
        self._ended.set()

    def fail_requests(self, rank: int, ending: Ending) -> None:
        """End what a rank that others survive had in flight: streams with its error, other requests with its text."""
        keys = self.streams.fail(self.in_flight.of_rank(rank), ending.error)
        if keys:
            self.outputs.put(failed_batch(rank, keys, f"EngineDeadError: {ending.message}", time.monotonic()))

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def is_awaited(self) -> bool:
        """Tell whether somebody may wait for what engines send: a call, a stream, or who has taken all outputs."""
        return bool(self.calls.replies or self.streams.queues) or not self.outputs.has_news

    def on_drained(self, rank: int) -> None:
        """Let those go on who waited for room."""
        self.room.wake()

    def take_outputs(self, link: EngineLink, frame: Frame) -> None:
        """Give the outputs of a step to streams, and the rest to ``get``.

        Raises:
            Exception: not even the keys can be decoded.
        """
        columns = decode_columns(frame)
        self.note_outputs(link, columns)
        streams = self.streams.queues
        columns = self.streams.sort(columns) if streams else columns
        if columns.keys or self._consumer or not streams:  # statistics alone are kept if somebody takes outputs
            self.outputs.put(columns)

    def note_outputs(self, link: EngineLink, columns: Columns) -> None:
        """Note what a step's outputs say of their engine."""
        self._is_fresh = False
        link.meter.add(len(columns.tokens), columns.timestamp)
        if columns.strays:
            self._log_once("stray", "%s sent outputs nobody has asked for: %s", link.title, ", ".join(columns.strays))
        if self.look_around is not None:
            self.look_around()
        if columns.finishes:
            self.in_flight.arrived([columns.keys[row] for row, _, _ in columns.finishes])

    def _on_lost(self, columns: Columns, keys: list[int]) -> None:
        """End, in the engine too, the requests of a batch whose values cannot be decoded; on a caller's thread."""
        self.aborts.note(dict.fromkeys(keys, columns.engine_index))
        self._abort_noted()
        if (fault := columns.fault) is not None:
            self._log_once("fault", "engine core %s sent a broken value: %s", columns.engine_index, text_of(fault))

    def _log_once(self, kind: str, message: str, *args: object) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning(message, *args)
