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
from engine_client.ipc.latch import LONGEST_SLEEP
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
        on_orphaned: told that a coroutine which waited here is gone without a word.
    """

    def __init__(
        self,
        table: InFlight,
        on_lost: Callable[[Columns, list[int]], None] = lambda *_: None,
        on_orphaned: Callable[[], None] = lambda: None,
    ) -> None:
        self._table = table
        self._on_lost = on_lost
        self._on_orphaned = on_orphaned
        self.queue: SimpleQueue[_Item] = SimpleQueue()  # None has those who wait look for the end
        self.unread: deque[_Item] = deque()  # taken from the queue by calls that were interrupted
        self._make_error: Callable[[], BaseException] | None = None
        self._listeners: set[Callable[[], bool]] = set()  # of coroutines that wait; changed by one C call at a time

    def __repr__(self) -> str:
        state = "ended" if self.has_ended else "open"
        return f"<OutputQueue {state} batches={self.queue.qsize() + len(self.unread)}>"

    @property
    def has_ended(self) -> bool:
        """Tell whether nothing more will be put."""
        return self._make_error is not None

    @property
    def has_news(self) -> bool:
        """Tell whether a call would find something, if no other one were quicker."""
        return bool(self.unread) or not self.queue.empty()

    def put(self, columns: Columns) -> None:
        """Append a batch."""
        self.queue.put(columns)
        if self._listeners:
            self.tell_listeners()

    def listen(self, listener: Callable[[], bool]) -> None:
        """Have this called at each news, on the thread that brings it, until ``unlisten``, or until it returns False.

        False says that whoever waited is gone for good: its event loop was closed.
        """
        self._listeners.add(listener)

    def unlisten(self, listener: Callable[[], bool]) -> None:
        """Take a listener away; unknown ones are ignored."""
        self._listeners.discard(listener)

    def tell_listeners(self) -> None:
        """Have all listeners look for news; one of them gets them."""
        for listener in list(self._listeners):
            if not listener():
                self._listeners.discard(listener)
                self._on_orphaned()

    def end(self, make_error: Callable[[], BaseException], *, wake: bool = True) -> None:
        """Have ``get`` raise ``make_error()`` from now on, once everything that was put is read.

        Args:
            make_error: makes an error for each call.
            wake: have calls that wait already raise it, too.
        """
        self._make_error = make_error
        if wake:
            self.queue.put(None)
            self.tell_listeners()

    def get(
        self,
        deadline: Deadline,
        taken: list[Any],
        read: Callable[[], EngineCoreOutputs | None] = lambda: None,
    ) -> EngineCoreOutputs:
        """Wait for the next outputs of requests that are in flight, or statistics.

        Args:
            deadline: of the wait.
            taken: an empty list.  Whoever is interrupted, in here or before its own caller has the outputs, gives it to
                ``put_back``.
            read: finds outputs that are not here yet, or notes that the caller is about to wait for them.

        Raises:
            TimeoutError: nothing came before the deadline.
            BaseException: what ``end`` was given.
        """
        while True:
            outputs = None if self.unread or not self.queue.empty() else read()
            if outputs is None:
                outputs = self.turn(self.take(deadline, taken))
            if outputs is not None:
                return outputs

    def turn(self, columns: Columns) -> EngineCoreOutputs | None:
        """Turn a batch into outputs; None if it has none any more, and no statistics."""
        failed: list[int] = []
        if columns.rest is not None:
            columns, failed = with_values(columns)
        outputs = self._table.outputs(columns)
        if failed:
            self._on_lost(columns, failed)
        return outputs if outputs.outputs or columns.meta is not None else None

    def put_back(self, taken: list[Any]) -> None:
        """Have the next call deliver what an interrupted one had in hand."""
        self.unread.extend(taken)
        self._undo()
        self.queue.put(_NOTHING)
        self.tell_listeners()

    def take(self, deadline: Deadline, taken: list[Any]) -> Columns:
        """Wait for the next batch; it is also the one item of ``taken`` from the moment that it leaves the queue.

        Raises:
            TimeoutError, BaseException: as ``get``.
        """
        while True:
            taken.clear()
            try:
                # Each is one C call: an interrupt finds the batch in the one place or in the other.
                if self.unread:
                    self._undo()
                    taken.extend(map(deque.popleft, (self.unread,)))
                else:
                    self._raise_if_ended()
                    taken.extend(map(self.queue.get, (True,), (deadline.capped(LONGEST_SLEEP),)))
            except Empty:
                # At the end another one may have had the mark in hand, and has put it back.
                if deadline.expired() and not self.has_ended:
                    raise TimeoutError(f"no output within {deadline.timeout:g} s") from None
                continue
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
