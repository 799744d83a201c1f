"""Everything behind a multi-process client that must outlive it: engines, channels, the reader, the tables.

::

    caller ── add · abort · call ──▶ Session ── frame ──▶ Channel ──▶ engine
    caller ◀── outputs queue · futures ── Session ◀── ReaderThread ◀── engine

A client owns one session, and a finalizer of the client owns it too; the session knows neither, so that dropping the
last reference to a client ends its session (I6).

Invariants: I2, I3, I4 (``_ending`` is set once and never changes), I6, I7 (a caller waits for room or for an output,
and both are ended by death and by close), I8 (no callback, join or blocking send under ``_lock``).

Threads: the methods of the first part are called by any thread; ``on_*`` by the reader.  ``_lock`` is re-entrant, since
a finalizer may run on a thread that holds it, and is held for assignments only.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

from engine_client.clients.calls import PendingCalls
from engine_client.clients.endings import Ending, closed_ending, death_of, owner_of_fork
from engine_client.clients.in_flight import InFlight, check_request
from engine_client.clients.link import EngineLink
from engine_client.config import ClientOptions, shutdown_grace
from engine_client.deadline import Deadline
from engine_client.errors import EngineDeadError, ForeignProcessError, RemoteCallError, RemoteProtocolError
from engine_client.ipc.arena import ArenaWriter
from engine_client.ipc.process_group import ProcessGroup
from engine_client.ipc.reader import ReaderThread
from engine_client.messages import EngineCoreOutputs
from engine_client.protocol.batch import Columns, decode_columns
from engine_client.protocol.framing import Kind
from engine_client.protocol.wire import (
    Frame,
    decode_dead,
    decode_reply,
    decode_text,
    encode_abort,
    encode_add,
    encode_text,
    encode_utility,
)

__all__ = ["Session"]

_log = logging.getLogger("engine_client.session")

_EXIT_TIMEOUT: Final = 1.0
"""Seconds that an engine has to end after its last word or the end of its stream, before it is killed."""

_JOIN_TIMEOUT: Final = 2.0
"""Seconds to wait for the reader and for a concurrent close."""


class Session:
    """Owns the engines of one client, their channels, the request memory and the reader; ``close`` ends all of them.

    Args:
        options: of the client.
        on_end: told, on whichever thread, as soon as nothing more can be sent.
    """

    def __init__(self, options: ClientOptions, on_end: Callable[[], None] = lambda: None) -> None:
        self.options = options
        self.owner_pid = os.getpid()
        self.links: dict[int, EngineLink] = {}
        self.group = ProcessGroup()
        self.writer: ArenaWriter | None = None
        self.calls = PendingCalls()
        self.in_flight = InFlight()
        self.max_model_len: int | None = None
        self.main_importable = True
        self._on_end = on_end
        self._outputs: SimpleQueue[Columns | None] = SimpleQueue()  # None marks the end; who finds it puts it back
        self._reader = ReaderThread(self, f"engine-client-reader-{os.getpid()}")
        self._room = threading.Event()
        self._room.set()
        self._ended = threading.Event()
        self._released = threading.Event()
        self._doomed: set[int] = set()  # keys to abort with the next frame, at the latest
        self._consumer = 0  # the thread that last asked for outputs
        self._strays_logged = False
        self._running: set[int] = set()  # ranks whose process has not ended; reader thread only
        # -- guarded by _lock --
        self._lock = threading.RLock()
        self._ending: Ending | None = None
        self._closing = False
        self._releasing = False
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

    @property
    def ending(self) -> Ending | None:
        """Return how the engines ended; None while they serve."""
        return self._ending

    def adopt(self, link: EngineLink) -> None:
        """Own an engine that was just launched."""
        self.links[link.rank] = link
        self.group.add(link.rank, link.handle)

    def serve(self) -> None:
        """Start the reader, once all engines are ready."""
        for link in self.links.values():
            self._running.add(link.rank)
            self._reader.add(link.rank, link.channel, link.handle.sentinel)
        self._reader.start()

    def ensure_alive(self) -> None:
        """Raise if nothing can be sent any more.

        Raises:
            EngineDeadError: the engine is dead; ClosedError: the client is closed.
            ForeignProcessError: this is a forked copy of the client's process.
        """
        if self.owner_pid != os.getpid():
            raise ForeignProcessError(owner_of_fork(self.owner_pid))
        if self._ending is not None:
            raise self._ending.error()
        if self._closing:
            raise closed_ending().error()

    def add(self, request: Any) -> None:
        """Check and send a request.

        Raises:
            TypeError, ValueError: the request cannot be served as it is.
            EngineDeadError: there is no engine.
        """
        self.ensure_alive()
        prompt = check_request(request, self.max_model_len)
        link = self._route(request)
        self._wait_for_room(link)
        key = self.in_flight.add(request.request_id)
        try:
            self._send(link, encode_add(key, request, prompt, main_importable=self.main_importable))
        except Exception:
            self.in_flight.discard(key)
            raise
        except BaseException:  # an interrupt: whether it has been sent is not known, so it is taken back
            self._doom([key])
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
        keys = self.in_flight.abort([request_ids] if isinstance(request_ids, str) else request_ids)
        self._doom(keys)

    def interrupted(self) -> None:
        """Clean up after a call that an interrupt ended: abort what this thread has in flight, and drop its outputs.

        Where another thread takes the outputs, it goes on to get them: only the interrupted call itself is undone.
        """
        if self._consumer in (0, threading.get_ident()):
            self._doom(self.in_flight.mine())

    def _doom(self, keys: Iterable[int]) -> None:
        """Abort by key.  Safe to interrupt: the keys are noted first, and go out with the next frame at the latest."""
        self._doomed.update(keys)
        for key in list(self._doomed):
            self.in_flight.discard(key)
        with suppress(EngineDeadError):  # nobody is left who could go on with them
            if self._doomed and self._ending is None and not self._closing:
                self._send_doomed()

    def call(self, method: str, args: tuple[Any, ...]) -> tuple[int, Future[Any]]:
        """Send a utility call; return its id and its future.

        Raises:
            EngineDeadError: there is no engine.
            SerializationError, TypeError, ...: an argument cannot be sent; nothing was.
        """
        self.ensure_alive()
        link = next(iter(self.links.values()))
        self._wait_for_room(link)
        call_id, future = self.calls.new()
        try:
            self._send(link, encode_utility(call_id, method, args, main_importable=self.main_importable))
        except BaseException:
            self.calls.discard(call_id)
            raise
        if self._ending is not None:  # it died in between: whoever failed the table may have come before us
            self.calls.settle(call_id, error=self._ending.error())
        return call_id, future

    def get(self, timeout: float | None) -> EngineCoreOutputs:
        """Wait for the next outputs.

        Raises:
            TimeoutError: nothing came within ``timeout`` seconds.
            EngineDeadError: the engine is dead and everything it sent was delivered.
        """
        deadline = Deadline(timeout)
        self._consumer = threading.get_ident()
        while True:
            if self.owner_pid != os.getpid():
                raise ForeignProcessError(owner_of_fork(self.owner_pid))
            try:
                columns = self._outputs.get(timeout=deadline.remaining())
            except Empty:
                raise TimeoutError(f"no output within {timeout:g} s") from None
            if columns is None:
                self._outputs.put(None)
                assert self._ending is not None  # it is set before the end is marked
                raise self._ending.error()
            outputs = self.in_flight.outputs(columns)
            if outputs.outputs or columns.meta is not None:
                return outputs

    def _wait_for_room(self, link: EngineLink) -> None:
        """Wait while more than the high-water mark is queued; death and close end the wait."""
        while link.channel.backlog > self.options.high_water:
            self._room.clear()
            if link.channel.backlog > self.options.high_water and self._ending is None:
                self._room.wait()
            self.ensure_alive()

    def _send(self, link: EngineLink, frame: Frame) -> None:
        if self._doomed:
            self._send_doomed()
        self._write(link, frame)

    def _send_doomed(self) -> None:
        keys = list(self._doomed)
        for link in self.links.values():
            self._write(link, encode_abort(keys))
        self._doomed.difference_update(keys)

    def _write(self, link: EngineLink, frame: Frame) -> None:
        try:
            if not link.channel.send(frame):
                self._reader.wakeup()
        except BrokenPipeError:
            if not self._reader.is_current():
                # The engine is gone, and the reader is about to say how; it needs no longer than the bounds of I3.
                self._ended.wait(_EXIT_TIMEOUT + _JOIN_TIMEOUT)
            raise (self._ending or closed_ending()).error() from None

    # -- the end, by the user ------------------------------------------------------------------------------------------

    def close(self, grace: float) -> None:
        """End the engines and release everything; idempotent, from any thread, finalizers included.

        Args:
            grace: seconds for the polite end; then they are killed.
        """
        if self.owner_pid != os.getpid():
            return
        first = False
        try:
            with self._lock:
                first = not self._closing and self._ending is None
                self._closing = True
            if not first:
                if not self._reader.is_current():
                    self._released.wait(grace + _JOIN_TIMEOUT)
                return
            self.group.shutdown(Deadline(grace), self._ask)
            if self._reader.is_alive() and not self._reader.is_current():
                self._ended.wait(_JOIN_TIMEOUT)  # until it has read what the engines sent last
        finally:
            if first:
                self.abandon()

    def abandon(self) -> None:
        """Kill the engines and release everything, without a word to them."""
        self._closing = True
        self._end(closed_ending())
        self._release()

    def _ask(self) -> None:
        for link in self.links.values():
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
        self.calls.fail_all(ending.error)
        self._outputs.put(None)
        self._room.set()
        self._ended.set()
        return True

    def _release(self) -> None:
        """Give everything back, once."""
        with self._lock:
            if self._releasing:
                return
            self._releasing = True
        self.group.kill_now()
        self._reader.stop(_JOIN_TIMEOUT)
        for link in self.links.values():
            link.close()
        self.group.close()
        if self.writer is not None:
            self.writer.close()
        self._released.set()

    def forget_after_fork(self) -> None:
        """Close this process's copies of the descriptors, in a forked child; the parent's are untouched."""
        self.group.after_fork_in_child()
        for link in self.links.values():
            link.close_after_fork()

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def on_frames(self, rank: int, frames: list[Frame]) -> None:
        """Deliver frames; one that cannot be used fails what it belongs to, never the reader."""
        for frame in frames:
            try:
                self._take(self.links[rank], frame)
            except Exception as error:  # noqa: BLE001, PERF203  # a batch that cannot be decoded: whose was it?
                self._die(rank, RemoteProtocolError(f"a frame cannot be used: {type(error).__name__}: {error}"))
                return

    def _take(self, link: EngineLink, frame: Frame) -> None:
        kind = frame.kind
        if kind == Kind.OUTPUTS:
            self._take_outputs(link, frame)
        elif kind == Kind.REPLY:
            self._take_reply(frame)
        elif kind == Kind.DEAD:
            self._take_last_words(link, frame)
        elif kind == Kind.GOODBYE:
            link.farewell = str(decode_text(frame))
            self._reader.set_deadline(link.rank, Deadline(shutdown_grace(self.options)))
        else:
            raise RemoteProtocolError(f"a {Kind(kind).name} message from a running engine")

    def _take_outputs(self, link: EngineLink, frame: Frame) -> None:
        columns, failed = decode_columns(frame)
        if failed:
            self._doomed.update(failed)
            with suppress(EngineDeadError):  # its end is about to be read
                self._send_doomed()
        if columns.strays and not self._strays_logged:
            self._strays_logged = True
            _log.warning("%s sent outputs of requests nobody has asked for: %s", link.title, ", ".join(columns.strays))
        self._outputs.put(columns)

    def _take_reply(self, frame: Frame) -> None:
        try:
            failed, value = decode_reply(frame)
        except BaseException as error:  # noqa: BLE001  # the value's own code ran; its caller gets what it raised
            kind = type(error).__name__
            fault = RemoteCallError(f"the reply cannot be decoded: {kind}: {error}", kind)
            fault.__cause__ = error
            failed, value = True, fault
        if failed:
            self.calls.settle(frame.ref, error=value)
        else:
            self.calls.settle(frame.ref, result=value)

    def _take_last_words(self, link: EngineLink, frame: Frame) -> None:
        try:
            link.last_words = decode_dead(frame)
        except Exception as error:  # noqa: BLE001  # a cause that cannot be decoded is still a death
            link.last_words = RemoteCallError(f"its last words cannot be decoded: {error}"), "serving"
        self._reader.set_deadline(link.rank, Deadline(_EXIT_TIMEOUT))

    def on_end(self, rank: int, error: BaseException | None) -> None:
        """Take the end of a stream: at once when it is broken, else when the process ends, which is due now."""
        if error is not None:
            self._die(rank, error)
        elif self.links[rank].farewell is None:
            self._reader.set_deadline(rank, Deadline(_EXIT_TIMEOUT))

    def on_exit(self, rank: int) -> None:
        """Take the end of a process."""
        self._running.discard(rank)
        self._die(rank, None)

    def on_deadline(self, rank: int) -> None:
        """Take that a process did not end though its stream did."""
        self._die(rank, None)

    def on_drained(self, rank: int) -> None:
        """Let those go on who waited for room."""
        self._room.set()

    def on_reader_failed(self, error: BaseException) -> None:
        """Take the end of the reader itself."""
        self._die(next(iter(self.links)), error)

    def _die(self, rank: int, fault: BaseException | None) -> None:
        """Declare the engine dead, tell everybody, and clean up; or note the end that ``close`` is waiting for."""
        if self._closing:
            if not self._running or not self._reader.is_alive():
                self._end(closed_ending())
            return
        link = self.links[rank]
        if link.handle.is_alive():
            self.group.kill_now()
        ending = death_of(link, link.handle.exitcode, fault)
        if self._end(ending):
            _log.log(logging.INFO if ending.in_order else logging.ERROR, "%s", ending.message)
            self._release()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_sessions):
        session.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
