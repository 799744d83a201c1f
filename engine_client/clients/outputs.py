"""The batches of outputs between the reader, which brings them, and whoever asks for them.

::

    reader ── put(columns) ──▶ queue ──▶ get() ── InFlight.outputs ──▶ caller
                                 ▲        │ interrupted
                                 └ unread ◀

An interrupt (Ctrl-C) may end a call between any two of its lines.  The batch that it has in hand is then put back,
since the requests of other threads may be in it; those of the interrupted thread are aborted by its session, and so
their rows are dropped when the batch is looked at again.

Invariants: I2 (a request's last output is handed out once), I4 (the end is sticky).

Threads: ``put`` and ``end`` by one thread at a time; ``get`` from any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, Union

from engine_client.clients.in_flight import InFlight
from engine_client.deadline import Deadline
from engine_client.messages import EngineCoreOutputs
from engine_client.protocol.batch import Columns, with_values

__all__ = ["OutputQueue"]

_Item = Union[Columns, None]
_NOTHING: Final = Columns(0, 0.0, [], [], None, [], [])
"""Put into the queue to have those who wait look around."""


class OutputQueue:
    """The queue of one client.

    Args:
        table: of the requests in flight; turns batches into outputs.
        on_lost: told of a batch whose values cannot be decoded, and the keys of the requests that fail for it.
    """

    def __init__(self, table: InFlight, on_lost: Callable[[Columns, list[int]], None] = lambda *_: None) -> None:
        self._table = table
        self._on_lost = on_lost
        self.queue: SimpleQueue[_Item] = SimpleQueue()  # None has those who wait look for the end
        self.unread: deque[_Item] = deque()  # taken from the queue by calls that were interrupted
        self._make_error: Callable[[], BaseException] | None = None

    def __repr__(self) -> str:
        state = "open" if self._make_error is None else "ended"
        return f"<OutputQueue {state} batches={self.queue.qsize() + len(self.unread)}>"

    def put(self, columns: Columns) -> None:
        """Append a batch."""
        self.queue.put(columns)

    def end(self, make_error: Callable[[], BaseException], *, wake: bool = True) -> None:
        """Have ``get`` raise ``make_error()`` from now on, once everything that was put is read.

        Args:
            make_error: makes an error for each call.
            wake: have calls that wait already raise it, too.
        """
        self._make_error = make_error
        if wake:
            self.queue.put(None)

    def get(self, deadline: Deadline, taken: list[Any]) -> EngineCoreOutputs:
        """Wait for the next outputs of requests that are in flight, or statistics.

        Args:
            deadline: of the wait.
            taken: an empty list.  Whoever is interrupted, in here or before its own caller has the outputs, gives it to
                ``put_back``.

        Raises:
            TimeoutError: nothing came before the deadline.
            BaseException: what ``end`` was given.
        """
        while True:
            columns, failed = with_values(self._next(deadline, taken))
            outputs = self._table.outputs(columns)
            if failed:
                self._on_lost(columns, failed)
            if outputs.outputs or columns.meta is not None:
                return outputs

    def put_back(self, taken: list[Any]) -> None:
        """Have the next call deliver what an interrupted one had in hand."""
        self.unread.extend(taken)
        self._undo()
        self.queue.put(_NOTHING)

    def _next(self, deadline: Deadline, taken: list[Any]) -> Columns:
        """Return the next batch, which is also the one item of ``taken`` from the moment that it leaves the queue."""
        while True:
            taken.clear()
            try:
                # Each is one C call: an interrupt finds the batch in the one place or in the other.
                if self.unread:
                    self._undo()
                    taken.extend(map(deque.popleft, (self.unread,)))
                else:
                    self._raise_if_ended()
                    taken.extend(map(self.queue.get, (True,), (deadline.remaining(),)))
            except Empty:
                raise TimeoutError(f"no output within {deadline.timeout:g} s") from None
            except IndexError:
                continue  # another thread took it
            columns: _Item = taken[0]
            if columns is not None:
                return columns

    def _raise_if_ended(self) -> None:
        if self._make_error is not None and self.queue.empty():
            self.queue.put(None)  # for the next thread that waits
            raise self._make_error()

    def _undo(self) -> None:
        """Take back that batches were turned into outputs, which nobody got."""
        for columns in list(self.unread):
            if columns is not None:
                self._table.undo_outputs(columns)
