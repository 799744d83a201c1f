"""The outputs of single requests, apart from those that ``get_output`` returns.

::

    reader ── batch ──▶ StreamTable.sort ──┬─▶ queue of a stream ──▶ OutputStream
                                           └─▶ the rest, for get_output

A stream ends with its request: the output that has a finish reason is its last.  Closed, dropped, cancelled or
interrupted before, it aborts the request, and nothing of that reaches anybody; aborted by its id, it just ends.

Invariants: I2 (each output goes to one taker).

Threads: ``sort`` and ``end`` are the reader's; a stream is used by one thread at a time, and closed from any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol

from engine_client.clients.outputs import OutputQueue
from engine_client.deadline import Deadline, check_timeout
from engine_client.errors import EngineDeadError
from engine_client.messages import EngineCoreOutput, FinishReason
from engine_client.protocol.batch import Columns, split

__all__ = ["OutputStream", "StreamOverError", "StreamOwner", "StreamState", "StreamTable"]


class StreamTable:
    """The streams of one client, by the keys of their requests."""

    def __init__(self) -> None:
        self.queues: dict[int, OutputQueue] = {}  # for others to look at only
        self._make_error: Callable[[], BaseException] | None = None

    def __len__(self) -> int:
        return len(self.queues)

    def __repr__(self) -> str:
        return f"<StreamTable {len(self)} streams>"

    def __contains__(self, key: int) -> bool:
        return key in self.queues

    def add(self, key: int, queue: OutputQueue) -> None:
        """Have the outputs of a request go to this queue."""
        self.queues[key] = queue
        if self._make_error is not None:  # the end came in between
            queue.end(self._make_error)

    def discard(self, key: int) -> None:
        """Forget a stream; unknown ones are ignored."""
        self.queues.pop(key, None)

    def stop(self, key: int) -> None:
        """End a stream whose request is aborted, whoever waits in it; unknown ones are ignored."""
        queue = self.queues.get(key)
        if queue is not None:
            queue.end(StreamOverError)  # before it is forgotten: what an interrupt keeps from it is done again
        self.discard(key)

    def sort(self, columns: Columns) -> Columns:
        """Give the streams their rows; return what is left of the batch."""
        queues = self.queues
        rows = [row for row, key in enumerate(columns.keys) if key in queues] if queues else []
        if not rows:
            return columns
        parts, rest = split(columns, rows)
        for part in parts:
            queue = queues.get(part.keys[0])
            if queue is not None:
                queue.put(part)
        return rest

    def fail(self, keys: Iterable[int], make_error: Callable[[], BaseException]) -> list[int]:
        """End the streams of some requests with an error each; return the keys that have none."""
        others = []
        for key in keys:
            queue = self.queues.get(key)
            if queue is None:
                others.append(key)
            else:
                queue.end(make_error)
        return others

    def end(self, make_error: Callable[[], BaseException], *, wake: bool = True) -> None:
        """End all streams, with an error each, once what was put is read."""
        self._make_error = make_error
        for queue in list(self.queues.values()):
            queue.end(make_error, wake=wake)


class StreamOwner(Protocol):
    """What a stream needs of its session."""

    def take_back(self, key: int) -> None:
        """Abort a request whose stream has ended early."""

    def expect(self) -> None:
        """Note that the calling thread is about to wait for what an engine sends."""

    def forget_stream(self, key: int) -> None:
        """Note that a stream is over."""


class StreamOverError(Exception):
    """The stream has ended while somebody waited for its next output."""


class StreamState:
    """What both colours of a stream have.

    Args:
        client: kept alive, as whatever is iterated over.
        owner: the client's session.
        key: of the request.
        request_id: the user's name of it.
        queue: of its outputs.
    """

    def __init__(self, client: object, owner: StreamOwner, key: int, request_id: str, queue: OutputQueue) -> None:
        self.request_id = request_id
        self.finish_reason: FinishReason | None = None
        self._client = client
        self._owner = owner
        self._key = key
        self._queue = queue
        self._is_over = False
        self._is_settled = False  # whether the request has ended, or was aborted

    def __repr__(self) -> str:
        state = self.finish_reason.name if self.finish_reason is not None else "closed" if self._is_over else "open"
        return f"<{type(self).__name__} {self.request_id!r} {state}>"

    def __del__(self) -> None:
        # An attribute of one whose construction was interrupted may be missing.
        if not getattr(self, "_is_settled", True):
            self._abort()

    def _abort(self) -> None:
        self._is_over = True
        if not self._is_settled:
            self._owner.take_back(self._key)
            self._tell_others()
            self._is_settled = True  # last: what interrupts this leaves it to the next call, or to ``__del__``

    def _note(self, output: EngineCoreOutput) -> EngineCoreOutput:
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.disown()
        return output

    def disown(self) -> None:
        """Note that there is nothing to abort: the request has ended, was never sent, or its engine is dead."""
        self._is_over = self._is_settled = True
        self._owner.forget_stream(self._key)
        self._tell_others()

    def _tell_others(self) -> None:
        """End the waits of others in this stream, who would get nothing any more."""
        if not self._queue.has_ended:
            self._queue.end(StreamOverError)


class OutputStream(StreamState):
    """Iterates over the outputs of one request; from ``client.stream(request)``.

    Use it up, use it as a context manager, or close it.  ``finish_reason`` is set by the last output.
    """

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> EngineCoreOutput:
        return self.next()

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def next(self, timeout: float | None = None) -> EngineCoreOutput:
        """Wait for the next output.

        Args:
            timeout: seconds; None waits as long as the engine lives.

        Raises:
            StopIteration: the last one was returned, or the stream was closed.
            TimeoutError: nothing came in time; the stream can be used further.
            EngineDeadError: the engine is dead, and all that it sent was returned.
        """
        deadline = Deadline(check_timeout(timeout))
        taken: list[Any] = []
        while not self._is_over:
            try:
                if not self._queue.has_news:
                    self._owner.expect()
                outputs = self._queue.turn(self._queue.take(deadline, taken))
                if outputs is not None and outputs.outputs:
                    return self._note(outputs.outputs[0])
            except StreamOverError:
                break
            except EngineDeadError:
                self.disown()
                raise
            except Exception:
                raise
            except BaseException:  # an interrupt: what it interrupted must not go on
                self._abort()
                raise
        raise StopIteration

    def close(self) -> None:
        """Abort the request unless it has ended; idempotent."""
        self._abort()
