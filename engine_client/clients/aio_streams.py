"""Outputs for coroutines: the next ones of a queue, and streams of single requests.

Invariants: I2 (a batch is in the queue, or in the hand of one coroutine that returns it without a further await).

Threads: as ``AsyncMPClient``.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from engine_client.clients.fan_out import LARGE_REPLY
from engine_client.clients.mailbox import Mailboxes
from engine_client.clients.outputs import OutputQueue
from engine_client.clients.streams import StreamOverError, StreamOwner, StreamState
from engine_client.deadline import Deadline, check_timeout
from engine_client.errors import EngineDeadError
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs
from engine_client.protocol.batch import Rest

__all__ = ["AsyncOutputStream", "next_outputs"]


async def next_outputs(queue: OutputQueue, mailboxes: Mailboxes, deadline: Deadline) -> EngineCoreOutputs:
    """Wait for the next outputs of a queue.

    Raises:
        TimeoutError: nothing came before the deadline.
        BaseException: what ends the queue.
    """
    await mailboxes.take_turns()
    while True:
        if queue.has_news and (outputs := await _look(queue)) is not None:
            return outputs
        future = mailboxes.future()
        waker = mailboxes.waker(future)
        queue.listen(waker)  # before the look, so that nothing comes in between unseen
        try:
            outputs = await _look(queue)
            if outputs is not None:
                return outputs
            await mailboxes.sleep(future, deadline.remaining())
        finally:
            queue.unlisten(waker)
        if deadline.expired():
            raise TimeoutError(f"no output within {deadline.timeout:g} s")


async def _look(queue: OutputQueue) -> EngineCoreOutputs | None:
    """Return outputs that are there; None if there are none."""
    while True:
        taken: list[Any] = []
        try:
            columns = queue.take(Deadline(0), taken)
        except TimeoutError:
            return None
        try:
            if columns.rest is not None:
                await _load(columns.rest)
            outputs = queue.turn(columns)
        except BaseException:  # cancelled, or an interrupt
            queue.put_back(taken)
            raise
        if outputs is not None:
            return outputs


async def _load(rest: Rest) -> None:
    """Decode large values on a thread."""
    if rest.size >= LARGE_REPLY:
        with suppress(Exception):  # whoever turns the columns into outputs meets it again, and knows what to do
            await asyncio.get_running_loop().run_in_executor(None, rest.load)


class _Client(Protocol):
    """What a stream needs of its client."""

    _mailboxes: Mailboxes

    async def _add(self, request: Any, key: int | None, queue: Any) -> None: ...


class AsyncOutputStream(StreamState):
    """Iterates, asynchronously, over the outputs of one request; from ``client.stream(request)`` of an asyncio client.

    Use it up, use it in ``async with``, or close it.  ``finish_reason`` is set by the last output.
    """

    def __init__(self, client: _Client, owner: StreamOwner, key: int, request: Any, queue: OutputQueue) -> None:
        super().__init__(client, owner, key, request.request_id, queue)
        self._asynchronous = client
        self._request = request

    def __aiter__(self) -> AsyncOutputStream:
        return self

    async def __anext__(self) -> EngineCoreOutput:
        return await self.next()

    async def __aenter__(self) -> AsyncOutputStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def next(self, timeout: float | None = None) -> EngineCoreOutput:
        """Wait for the next output.

        Args:
            timeout: seconds; None waits as long as the engine lives.

        Raises:
            StopAsyncIteration: the last one was returned, or the stream was closed.
            TimeoutError: nothing came in time; the stream can be used further.
            EngineDeadError: the engine is dead, and all that it sent was returned.
            TypeError, ValueError: as ``add_request_async``, of the first call.
        """
        deadline = Deadline(check_timeout(timeout))
        client = self._asynchronous
        try:
            await self._begin()
            while not self._is_over:
                if not self._queue.has_news:
                    self._owner.expect()
                outputs = await next_outputs(self._queue, client._mailboxes, deadline)  # noqa: SLF001  # its own part
                if outputs.outputs:
                    return self._note(outputs.outputs[0])
        except StreamOverError:
            pass  # it has ended, or was closed, meanwhile
        except EngineDeadError:
            self.disown()
            raise
        except Exception:
            raise
        except BaseException:  # cancelled, or an interrupt: what it interrupted must not go on
            self._abort()
            raise
        raise StopAsyncIteration

    async def _begin(self) -> None:
        request, self._request = self._request, None
        if request is not None and not self._is_over:
            try:
                await self._asynchronous._add(request, self._key, self._queue)  # noqa: SLF001  # as above
            except Exception:
                self.disown()
                raise

    async def aclose(self) -> None:
        """Abort the request unless it has ended; idempotent."""
        self._abort()
