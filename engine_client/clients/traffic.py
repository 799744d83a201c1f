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
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

from engine_client.clients.calls import PendingCalls, Reply
from engine_client.clients.endings import Ending, closed_ending, owner_of_fork
from engine_client.clients.in_flight import InFlight, check_request
from engine_client.clients.link import EngineLink
from engine_client.clients.outputs import OutputQueue
from engine_client.config import ClientOptions
from engine_client.deadline import Deadline
from engine_client.errors import EngineDeadError, ForeignProcessError, LocalProtocolError, RemoteCallError
from engine_client.ipc.latch import Latch
from engine_client.ipc.reader import ReaderThread
from engine_client.messages import EngineCoreOutputs
from engine_client.protocol.batch import Columns, decode_columns
from engine_client.protocol.exception_fields import text_of
from engine_client.protocol.wire import Frame, decode_reply, encode_abort, encode_add, encode_utility

__all__ = ["EXIT_TIMEOUT", "JOIN_TIMEOUT", "Traffic"]

_log = logging.getLogger("engine_client.session")

EXIT_TIMEOUT: Final = 1.0
"""Seconds that an engine has to end after its last word or the end of its stream, before it is killed."""

JOIN_TIMEOUT: Final = 2.0
"""Seconds to wait for the reader and for a concurrent close."""


class Traffic:
    """The part of a session that serves callers; ``Session`` adds how it ends.

    Args:
        options: of the client.
    """

    _reader: ReaderThread

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.owner_pid = os.getpid()
        self.links: dict[int, EngineLink] = {}
        self.calls = PendingCalls()
        self.in_flight = InFlight()
        self.callers: set[int] = set()  # threads that are in a call, or whose last one was interrupted and not undone
        self.max_model_len: int | None = None
        self.main_importable = True
        self._outputs = OutputQueue(self.in_flight, self._on_lost)
        self._waiters: set[SimpleQueue[None]] = set()  # one of each thread that waits for room
        self._doomed: set[int] = set()  # keys to abort with the next frame, at the latest
        self._consumer = 0  # the thread that last asked for outputs
        self._logged: set[str] = set()  # kinds of strange things that were logged once
        self._ended = Latch()
        self._ending: Ending | None = None
        self._closing = False

    def ensure_alive(self) -> None:
        """Raise if nothing can be sent any more.

        Raises:
            EngineDeadError: the engine is dead; ClosedError: the client is closed.
            ForeignProcessError: this is a forked copy of the client's process.
        """
        self.refuse_copies()
        if self._ending is not None:
            raise self._ending.error()
        if self._closing:
            raise closed_ending().error()

    def refuse_copies(self) -> None:
        """Raise ``ForeignProcessError`` in a forked copy of the process; takes no lock, as nothing there may."""
        if self.owner_pid != os.getpid():
            raise ForeignProcessError(owner_of_fork(self.owner_pid))

    def add(self, request: Any) -> None:
        """Check and send a request.

        Raises:
            TypeError, ValueError: the request cannot be served as it is.
            EngineDeadError: there is no engine.
        """
        self.ensure_alive()
        prompt = check_request(request, self.max_model_len)
        link = self._route(request)
        self._wait_for_room(link, Deadline(None))
        key = self.in_flight.new_key()
        try:
            if self._doomed:
                self._abort_doomed()
            self.in_flight.add(request.request_id, key)
            self._send(link, encode_add(key, request, prompt, main_importable=self.main_importable))
        except Exception:
            self.in_flight.discard(key)
            raise
        except BaseException:  # an interrupt: whether it has been sent is not known, so it is taken back
            self._doomed.add(key)
            self._abort_doomed()
            raise

    def _route(self, request: Any) -> EngineLink:
        rank = getattr(request, "data_parallel_rank", None)
        if rank is None:
            return next(iter(self.links.values()))
        link = self.links.get(rank)
        if link is None:
            raise ValueError(f"data_parallel_rank {rank} is not one of the ranks {sorted(self.links)} of this client")
        return link

    def abort(self, request_ids: Iterable[Any]) -> None:
        """End requests without further output; what is not in flight is ignored, and so is everything after death."""
        self.refuse_copies()
        keys = self.in_flight.keys_of([request_ids] if isinstance(request_ids, str) else request_ids)
        self._doomed.update(keys)
        self._abort_doomed()

    def interrupted(self) -> None:
        """Clean up after a call that an interrupt ended: abort what this thread has in flight, and drop its outputs.

        Where another thread takes the outputs, it goes on to get them: only the interrupted call itself is undone.
        """
        self.callers.add(threading.get_ident())
        self.settle()

    def settle(self) -> None:
        """Undo what an interrupt of the calling thread has left; a second interrupt leaves it to the next call."""
        me = threading.get_ident()
        if self._consumer in (0, me):
            self._doomed.update(self.in_flight.mine())
        self._abort_doomed()
        self.callers.discard(me)

    def _abort_doomed(self) -> None:
        """Forget and abort the requests noted in ``_doomed``; an interrupt leaves them noted until that is sent."""
        for key in list(self._doomed):
            self.in_flight.discard(key)
        with suppress(EngineDeadError):  # nobody is left who could go on with them
            if self._doomed and self._ending is None and not self._closing:
                self._send_doomed()

    def call(
        self,
        method: str,
        args: tuple[Any, ...],
        deadline: Deadline | None = None,
        call_id: int | None = None,
    ) -> tuple[int, Reply]:
        """Send a utility call; return its id and its reply, for ``wait``.

        Args:
            method, args: what to call.
            deadline: of waiting for room; None waits as long as the engine lives.
            call_id: from ``calls.new_id``, for a caller who must be able to discard the call whatever interrupts it.

        Raises:
            EngineDeadError: there is no engine.
            TimeoutError: the engine reads nothing, and the deadline came.
            SerializationError, TypeError, ...: an argument cannot be sent; nothing was.
        """
        self.ensure_alive()
        self._refuse_to_wait_for_myself()
        link = next(iter(self.links.values()))
        self._wait_for_room(link, deadline or Deadline(None))
        if call_id is None:
            call_id = self.calls.new_id()
        try:
            _, reply = self.calls.new(call_id)
            self._send(link, encode_utility(call_id, method, args, main_importable=self.main_importable))
        except BaseException:
            self.calls.discard(call_id)
            raise
        if self._ending is not None:  # it died in between: whoever failed the table may have come before us
            self.calls.settle(call_id, error=self._ending.error())
        return call_id, reply

    def wait(self, reply: Reply, deadline: Deadline, what: str = "a call") -> Any:
        """Wait for the reply to a call, decode it, and return its value.

        It is decoded by whoever waits for it and not by the reader: decoding may import modules, and the one who waits
        may be in the middle of importing them.

        Raises:
            TimeoutError: no reply before the deadline.
            EngineDeadError: the engine is dead.
            RemoteCallError: the reply cannot be decoded.
            Exception: what the utility raised.
        """
        if not reply.wait(deadline.remaining()):
            raise TimeoutError(f"{what} was not answered within {deadline.timeout:g} s")
        frame = reply.result()
        try:
            failed, value = decode_reply(frame)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the value's own code ran; SystemExit, say, ends nothing here
            raise _stand_in("the reply cannot be decoded: ", error) from error
        if not failed:
            return value
        raise value if isinstance(value, Exception) else _stand_in("", value)

    def get(self, timeout: float | None, taken: list[Any] | None = None) -> EngineCoreOutputs:
        """Wait for the next outputs.

        Args:
            timeout: seconds; None waits as long as the engine lives.
            taken: an empty list, for a caller who gives it to ``put_back`` when it is interrupted.

        Raises:
            TimeoutError: nothing came within ``timeout`` seconds.
            EngineDeadError: the engine is dead and everything it sent was delivered.
        """
        self.refuse_copies()
        self._refuse_to_wait_for_myself()
        if self._doomed:
            self._abort_doomed()
        self._consumer = threading.get_ident()
        return self._outputs.get(Deadline(timeout), [] if taken is None else taken)

    def put_back(self, taken: list[Any]) -> None:
        """Have the next ``get`` deliver what an interrupted one had in hand: other threads' requests may be in it."""
        if taken:
            self._outputs.put_back(taken)

    def _refuse_to_wait_for_myself(self) -> None:
        """Raise on the reader's thread: in a done-callback of a pending call, say, or in a ``__del__``."""
        if self._reader.is_current():
            raise LocalProtocolError(
                "this would wait for ever: it was called on the thread that reads what the engine answers"
            )

    def _wait_for_room(self, link: EngineLink, deadline: Deadline) -> None:
        """Wait while more than the high-water mark is queued; death and close end the wait."""
        if link.channel.backlog <= self.options.high_water or self._reader.is_current():
            return
        waiter: SimpleQueue[None] = SimpleQueue()  # an Event would not survive every interrupt, and this keeps all news
        try:
            self._waiters.add(waiter)
            while link.channel.backlog > self.options.high_water and self._ending is None:
                waiter.get(timeout=deadline.remaining())
        except Empty:
            raise TimeoutError(f"{link.title} reads nothing: no room within {deadline.timeout:g} s") from None
        finally:
            self._waiters.discard(waiter)
        self.ensure_alive()

    def _wake_waiters(self) -> None:
        for waiter in list(self._waiters):
            waiter.put(None)

    def _send(self, link: EngineLink, frame: Frame) -> None:
        if self._doomed:
            self._abort_doomed()
        self._write(link, frame)

    def _send_doomed(self) -> None:
        keys = list(self._doomed)
        for link in self.links.values():
            self._write(link, encode_abort(keys))
        self._doomed.difference_update(keys)

    def _write(self, link: EngineLink, frame: Frame) -> None:
        try:
            all_sent = link.channel.send(frame)
        except BrokenPipeError:
            if not self._reader.is_current():
                # The engine is gone, and the reader is about to say how; it needs no longer than the bounds of I3.
                self._ended.wait(EXIT_TIMEOUT + JOIN_TIMEOUT)
        except BaseException:
            self._reader.wakeup()  # an interrupt may have left half a frame, which goes out all the same
            raise
        else:
            if not all_sent:
                self._reader.wakeup()
            return
        raise (self._ending or closed_ending()).error()  # not from the BrokenPipeError: it has a cause of its own

    def _fail_all(self, ending: Ending) -> None:
        """Tell everybody who waits that nothing will come."""
        self.calls.fail_all(ending.error)
        self._outputs.end(ending.error)
        self._wake_waiters()
        self._ended.set()

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def on_drained(self, rank: int) -> None:
        """Let those go on who waited for room."""
        self._wake_waiters()

    def _take_outputs(self, link: EngineLink, frame: Frame) -> None:
        columns = decode_columns(frame)
        if columns.strays:
            names = ", ".join(columns.strays)
            self._log_once("stray", "%s sent outputs of requests nobody has asked for: %s", link.title, names)
        self._outputs.put(columns)

    def _on_lost(self, columns: Columns, keys: list[int]) -> None:
        """End, in the engine too, the requests of a batch whose values cannot be decoded; on a caller's thread."""
        self._doomed.update(keys)
        self._abort_doomed()
        if columns.fault is not None:
            rank = columns.engine_index
            text = text_of(columns.fault)
            self._log_once("fault", "engine core %s sent a value that cannot be decoded: %s", rank, text)

    def _log_once(self, kind: str, message: str, *args: object) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning(message, *args)


def _stand_in(prefix: str, error: BaseException) -> RemoteCallError:
    kind = type(error).__name__
    stand_in = RemoteCallError(f"{prefix}{kind}: {text_of(error)}", kind, getattr(error, "remote_traceback", ""))
    stand_in.__cause__ = error
    return stand_in
