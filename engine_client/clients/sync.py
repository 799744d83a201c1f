"""The blocking client of an engine core in its own process.

::

    add_request ─▶ Session ─▶ engine        get_output ◀── queue ◀── ReaderThread ◀── engine

Threads: every method from any thread.  A ``KeyboardInterrupt`` that ends a call aborts what was in flight, so that the
next call sees nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import get_ident
from types import FrameType
from typing import Any

from engine_client.clients.mp import MPClient
from engine_client.clients.streams import OutputStream
from engine_client.clients.utilities import SyncUtilities
from engine_client.config import ClientOptions
from engine_client.deadline import NEVER, Deadline, check_timeout
from engine_client.messages import EngineCoreOutputs, EngineCoreRequest

__all__ = ["SyncMPClient"]


class SyncMPClient(SyncUtilities, MPClient):
    """Runs the engine core in a process of its own; calls block.

    Use it as a context manager, or call ``shutdown``; dropping the last reference does the same.

    Args:
        vllm_config: ``EngineConfig`` or any object with its attributes.
        executor_class: called with ``vllm_config`` in the engine process.
        log_stats: attach scheduler statistics to outputs.
        options: of this library.

    Raises:
        StartupError: the engine did not come up.
        HandshakeTimeout: (also a TimeoutError) not within the ready timeout.
        SerializationError: the configuration or the executor class cannot be sent.
    """

    def __init__(
        self,
        vllm_config: Any,
        executor_class: Callable[..., Any],
        log_stats: bool,
        *,
        options: ClientOptions | None = None,
    ) -> None:
        super().__init__(False, vllm_config, executor_class, log_stats, options=options)
        self.is_dp = vllm_config.parallel_config.data_parallel_size > 1

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; its buffers may be changed as soon as this returns.

        Waits while more than ``ClientOptions.high_water`` bytes are queued for an engine that does not read.

        Raises:
            TypeError, ValueError: the request cannot be served as it is; nothing was sent.
            SerializationError, PicklingError: a field cannot be sent; nothing was.
            EngineDeadError: the engine is dead.
        """
        begun, me = False, get_ident()
        try:
            begun = self._begin()
            self._session.add(request)
            self._end(begun)
        except Exception:
            self._end(begun)
            raise
        except BaseException:  # an interrupt: what it interrupted must not reach the next call
            self._session.callers.add(me)  # in one C call, so that a second interrupt does not come before it
            self._session.interrupted()
            raise

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests without further output; ids that are not in flight are ignored, and so is a dead engine."""
        self._session.abort(request_ids)

    def get_output(self, *, timeout: float | None = None) -> EngineCoreOutputs:
        """Wait for the next outputs.

        Args:
            timeout: seconds; None waits until there are some, or the engine ends.

        Raises:
            TimeoutError: nothing came in time.
            EngineDeadError: the engine is dead, and all that it sent was returned; again at every later call.
        """
        begun, me = False, get_ident()
        taken: list[Any] = []
        try:
            begun = self._begin()
            outputs = self._session.get(None if timeout is None else check_timeout(timeout), taken)
            self._end(begun)
            return outputs  # noqa: TRY300  # not behind the try: an interrupt that comes meanwhile is one of this call
        except Exception:
            self._end(begun)
            raise
        except BaseException:  # as in add_request
            self._session.callers.add(me)
            self._session.put_back(taken)
            self._session.interrupted()
            raise

    def stream(self, request: EngineCoreRequest) -> OutputStream:
        """Send a request and return an iterator over its outputs, which ``get_output`` does not return.

        Closed or dropped before its end, or interrupted, it aborts the request.

        Raises:
            as ``add_request``.
        """
        session = self._session
        key = session.in_flight.new_key()
        queue = session.stream_queue(key)
        stream = OutputStream(self, session, key, request.request_id, queue)
        begun, me = False, get_ident()
        try:
            begun = self._begin()
            session.add(request, key, queue)
            self._end(begun)
            return stream  # noqa: TRY300  # as in get_output
        except Exception:
            stream.disown()
            self._end(begun)
            raise
        except BaseException:  # as in add_request; the stream takes its request back
            session.callers.add(me)
            session.take_back(key)
            session.interrupted()
            raise

    def call_utility(
        self, method: str, *args: Any, timeout: float | None = None, ranks: Iterable[int] | None = None
    ) -> Any:
        """Call a utility of every engine and return the result of the first.

        Args:
            method: its registered name.
            args: positional arguments; must be picklable.
            timeout: seconds; None waits until the engines answer or end.
            ranks: call these engines only, and return a list with the result of each.

        Raises:
            Exception: whatever the utility raised, with the engine's traceback; a note says which ranks have failed.
            AttributeError: there is no such utility.
            TimeoutError: no answer in time; a later one is dropped.
            EngineDeadError: the engine is dead.
        """
        begun, me = False, get_ident()
        try:
            begun = self._begin()
            deadline = NEVER if timeout is None else Deadline(check_timeout(timeout))
            values = self._call_utility(method, args, deadline, ranks)
            self._end(begun)
            return values[0] if ranks is None else values
        except Exception:
            self._end(begun)
            raise
        except BaseException:  # as in add_request
            self._session.callers.add(me)
            self._session.interrupted()
            raise

    def _call_utility(
        self, method: str, args: tuple[Any, ...], deadline: Deadline, ranks: Iterable[int] | None
    ) -> list[Any]:
        fan_out = self._caller.begin(method, ranks)
        try:
            self._caller.send(fan_out, method, args, deadline)
            self._session.await_reply(fan_out.ids, deadline)
            return fan_out.wait(deadline)
        finally:
            fan_out.discard()

    # -- a call and its interrupts -------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Note that the calling thread is in a call; first undo what an interrupt of its last one has left.

        The note is made before there is anything to undo, so that it is there whatever happens, be it one interrupt in
        what handles another.

        Returns:
            False if the thread is in a call already: this one is made by a signal handler, or by a finalizer.
        """
        callers, me = self._session.callers, get_ident()
        if me in callers:
            if _is_in_a_call(self, sys._getframe(1)):  # noqa: SLF001  # inspect offers the same, and takes 10 ms to load
                return False
            self._session.settle()
        callers.add(me)
        return True

    def _end(self, begun: bool) -> None:
        """Note that the calling thread's call is over, by a result or an error."""
        if begun:
            self._session.callers.discard(get_ident())


_CALLS = {getattr(SyncMPClient, name).__code__ for name in ("add_request", "get_output", "stream", "call_utility")}


def _is_in_a_call(client: SyncMPClient, inner: FrameType) -> bool:
    """Tell whether a call of a client is under way, outside of the innermost one."""
    frame = inner.f_back
    while frame is not None:
        if frame.f_code in _CALLS and frame.f_locals.get("self") is client:
            return True
        frame = frame.f_back
    return False
