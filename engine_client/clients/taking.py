"""How callers get what engines send: from the reader, or by reading it themselves.

::

    caller ─▶ get ─┬─ something waits: OutputQueue ◀── ReaderThread ◀── engine
                   ├─ the reader has lent the channel: the next frame ◀── engine, with no other thread in between
                   └─ else: OutputQueue, and the caller sleeps

A caller reads one frame, and takes it if it is what it waits for; then it leaves the channel by one C call.  Anything
else, or nothing for a while, is left to the reader, which reads again.

Invariants: I2, I7.

Threads: every method from any thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from engine_client.clients.link import EngineLink
from engine_client.clients.traffic import Traffic
from engine_client.deadline import NEVER, Deadline
from engine_client.ipc.loan import Loan
from engine_client.messages import EngineCoreOutputs
from engine_client.protocol.batch import Columns, decode_columns
from engine_client.protocol.frames import Frame, Kind

__all__ = ["Taking"]

_OUTPUTS, _REPLY = int(Kind.OUTPUTS), int(Kind.REPLY)  # looked up once, see ``frames.Kind``


class Taking(Traffic):
    """The part of a session that waits for outputs and replies."""

    def get(self, timeout: float | None, taken: list[Any] | None = None) -> EngineCoreOutputs:
        """Wait for the next outputs.

        Args:
            timeout: seconds; None waits as long as the engine lives.
            taken: an empty list, for a caller who gives it to ``put_back`` when it is interrupted.

        Raises:
            TimeoutError: nothing came within ``timeout`` seconds.
            EngineDeadError: the engine is dead and everything it sent was delivered.
        """
        if self.owner_pid != os.getpid() or self._reader.is_current():
            self.refuse_copies()
            self.refuse_to_wait_for_myself()
        self.consumes()
        deadline = NEVER if timeout is None else Deadline(timeout)
        taken = [] if taken is None else taken
        return self.outputs.get(deadline, taken, partial(self._read_outputs, deadline, taken))

    def put_back(self, taken: list[Any]) -> None:
        """Have the next ``get`` deliver what an interrupted one had in hand: other threads' requests may be in it."""
        if taken:
            self.outputs.put_back([decode_columns(item) if isinstance(item, Frame) else item for item in taken])

    def await_reply(self, ids: Sequence[int], deadline: Deadline) -> None:
        """Note that the calling thread is about to wait for the reply to a call, or read it and settle the call."""
        loan = self.expect_or_read(can_read=len(ids) == 1)
        if loan is None:
            return

        def take(_: EngineLink, frame: Frame) -> bool:
            if frame.kind != _REPLY or frame.ref not in ids:
                return False
            # Before it is taken: what comes in between has the reader settle it again, which changes nothing.
            self.calls.settle(frame.ref, result=frame)
            return loan.take([])

        self._read(loan, deadline, take)

    def _read_outputs(self, deadline: Deadline, taken: list[Any]) -> EngineCoreOutputs | None:
        """Read the next outputs if the reader has lent the channel, and they come soon."""
        taken.clear()  # of what had no outputs
        loan = self.expect_or_read(can_read=not self.streams.queues)
        if loan is None:
            return None

        def take(link: EngineLink, frame: Frame) -> bool:
            # Meanwhile there may be a stream, and the reader may have delivered what was before this.
            if frame.kind != _OUTPUTS or self.streams.queues or self.outputs.has_news:
                return False
            columns = _decode(frame)
            if columns is None or not loan.take(taken):
                return False
            taken[:] = [columns]
            self.note_outputs(link, columns)
            return True

        return self.outputs.turn(taken[0]) if self._read(loan, deadline, take) else None

    def _read(self, loan: Loan, deadline: Deadline, take: Callable[[EngineLink, Frame], bool]) -> bool:
        """Read the next frame from what is lent; return whether ``take`` took it, or have the reader read again."""
        began, is_taken = time.monotonic(), False
        me = loan.borrow()
        try:
            link = self.links.get(loan.rank)
            if me is not None and link is not None:
                frame = loan.next(deadline.capped(self._reader.poll_seconds))
                is_taken = frame is not None and take(link, frame)
        finally:
            if me is not None:
                loan.give_back(me)
            (self._reader.has_read if is_taken else self._reader.give_up)(began)
        return is_taken


def _decode(frame: Frame) -> Columns | None:
    """Decode outputs; None if that cannot be: the reader, which has the frame next, knows what to do."""
    try:
        return decode_columns(frame)
    except Exception:
        if _can_be_decoded(frame):
            raise  # this came from a signal handler
        return None


def _can_be_decoded(frame: Frame) -> bool:
    with suppress(Exception):
        decode_columns(frame)
        return True
    return False
