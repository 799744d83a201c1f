"""The asyncio client of engine cores in processes of their own.

::

    add_request_async ─▶ Session ─▶ engine
    get_output_async ◀── queue ◀── ReaderThread ◀── engine
                      ▲ wakes                └─ mailbox of each event loop, once per burst

Nothing here blocks a loop: what would wait in the other client is awaited, and a large answer is decoded on a thread.
Cancelling an await takes nothing with it: outputs stay in the queue until a coroutine has them in hand.

Threads: every coroutine in any running loop, several loops in several threads at once.  No loop is remembered: a
client is made inside or outside of one, and outlives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from engine_client.clients.aio_streams import AsyncOutputStream, next_outputs
from engine_client.clients.endings import OVER_TIMEOUT
from engine_client.clients.events import EngineEvent
from engine_client.clients.fan_out import LARGE_REPLY, FanOut
from engine_client.clients.link import EngineLink, LinkGoneError
from engine_client.clients.mailbox import Mailboxes
from engine_client.clients.mp import MPClient
from engine_client.clients.router import LinkClosedError
from engine_client.clients.utilities import AsyncUtilities
from engine_client.config import ClientOptions
from engine_client.deadline import NEVER, Deadline, check_timeout
from engine_client.messages import EngineCoreOutputs, EngineCoreRequest
from engine_client.protocol.frames import Frame
from engine_client.protocol.wire import PING

__all__ = ["AsyncMPClient"]

T = TypeVar("T")

_LOOK: Final = 0.05
"""Seconds between looks for events of engines."""


class AsyncMPClient(AsyncUtilities, MPClient):
    """Runs engine cores in processes of their own; calls are coroutines.

    The constructor and ``shutdown`` block; call them from a thread (``asyncio.to_thread``) where that matters.

    Args:
        vllm_config: ``EngineConfig`` or any object with its attributes.
        executor_class: called with ``vllm_config`` in the engine process.
        log_stats: attach scheduler statistics to outputs.
        client_addresses: endpoint of engines that somebody else launched; None: launch some.
        client_count: how many front-ends these engines have.
        client_index: which of them this is.
        options: of this library.

    Raises:
        StartupError: an engine did not come up.
        HandshakeTimeout: (also a TimeoutError) not within the ready timeout.
        SerializationError: the configuration or the executor class cannot be sent.
    """

    def __init__(  # noqa: PLR0913  # the reference's parameters
        self,
        vllm_config: Any,
        executor_class: Callable[..., Any],
        log_stats: bool,
        client_addresses: Any = None,
        client_count: int = 1,
        client_index: int = 0,
        *,
        options: ClientOptions | None = None,
    ) -> None:
        self.client_count = client_count
        self.client_index = client_index
        self._mailboxes = Mailboxes()
        super().__init__(True, vllm_config, executor_class, log_stats, client_addresses, options=options)
        # No loop says when it is closed; what was asked for in one must not reach the next.
        self._look_around = partial(_take_back, self._session.abort_of, self._mailboxes)
        self._session.look_around = self._look_around

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send a request; its buffers may be changed as soon as this returns.

        Waits while more than ``ClientOptions.high_water`` bytes are queued for an engine that does not read.  Cancelled
        meanwhile, nothing was sent.

        Raises:
            TypeError, ValueError: the request cannot be served as it is; nothing was sent.
            SerializationError, PicklingError: a field cannot be sent; nothing was.
            EngineDeadError: the engine is dead.
        """
        await self._add(request, None, None)

    async def _add(self, request: Any, key: int | None, queue: Any) -> None:
        session = self._session
        prompt = session.check(request)
        key = session.in_flight.new_key() if key is None else key
        frame = session.encode(key, request, prompt)
        self._look_around()
        if queue is None:  # a stream does when it waits for its first output
            await self._mailboxes.take_turns(together=True)
        while True:
            link = session.choose(request)
            await self._wait_for_room(link, NEVER)
            try:
                owner = self._mailboxes.current()
                place = partial(session.place, link, request, prompt, key=key, stream=queue, owner=owner, frame=frame)
                return await self._send(frame, place, partial(session.take_back, key))
            except LinkClosedError:
                continue
            except LinkGoneError as error:
                await self._mailboxes.wait(error.link.over, OVER_TIMEOUT)
                session.raise_death(error.link, queue)  # unless there is another rank to go to
                if queue is None:  # the death may have failed the old key, which nobody has read yet
                    key = session.in_flight.new_key()
                    frame = session.encode(key, request, prompt)

    async def _wait_for_room(self, link: EngineLink, deadline: Deadline) -> None:
        room = self._session.room
        while not room.is_free(link):
            future = self._mailboxes.future()
            waker = self._mailboxes.waker(future)
            room.join(waker)
            try:
                if not room.is_free(link):
                    await self._mailboxes.sleep(future, deadline.remaining())
            finally:
                room.leave(waker)
            if deadline.expired():
                raise room.timeout_error(link, deadline)
            self._session.ensure_alive()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests without further output; ids that are not in flight are ignored, and so is a dead engine."""
        self._session.abort(request_ids)

    async def get_output_async(self, *, timeout: float | None = None) -> EngineCoreOutputs:
        """Wait for the next outputs; cancelled, it leaves them to the next call.

        Args:
            timeout: seconds; None waits until there are some, or the engine ends.

        Raises:
            TimeoutError: nothing came in time.
            EngineDeadError: the engine is dead, and all that it sent was returned; again at every later call.
        """
        deadline = Deadline(check_timeout(timeout))
        self._session.refuse_copies()
        self._look_around()
        self._session.consumes()
        if not self._session.outputs.has_news:
            self._session.expect()
        return await next_outputs(self._session.outputs, self._mailboxes, deadline)

    def stream(self, request: EngineCoreRequest) -> AsyncOutputStream:
        """Return an asynchronous iterator over the outputs of a request, which ``get_output_async`` does not return.

        The request is checked now and sent when the iteration begins.  Closed, dropped or cancelled before its end, the
        stream aborts it.

        Raises:
            TypeError, ValueError: the request cannot be served as it is.
            EngineDeadError: the engine is dead.
        """
        session = self._session
        session.check(request)
        key = session.in_flight.new_key()
        return AsyncOutputStream(self, session, key, request, session.stream_queue(key))

    async def engine_events_async(self) -> AsyncIterator[EngineEvent]:
        """Iterate over what becomes of the engines: first the state of each, then every change."""
        with self.engine_events() as events:
            while True:
                try:
                    event = events.poll()
                except StopIteration:
                    return
                if event is None:
                    await asyncio.sleep(_LOOK)
                else:
                    yield event

    async def call_utility_async(
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
        deadline = Deadline(check_timeout(timeout))
        fan_out = self._caller.begin(method, ranks)
        fan_out.owner = self._mailboxes.current()
        try:
            values = await self._carry_out(fan_out, method, args, deadline)
        finally:
            fan_out.discard()
        return values[0] if ranks is None else values

    async def check_health_async(self, timeout: float | None = 10.0) -> None:
        """Make sure that every engine answers; unlike ``check_health``, without holding the event loop up.

        Raises:
            EngineDeadError: one is dead, or the client is closed.
            EngineStalledError: one lives but did not answer within ``timeout`` seconds; says what it was doing.
        """
        deadline = Deadline(check_timeout(timeout))
        ping = self._caller.begin(PING)
        ping.owner = self._mailboxes.current()
        try:
            await self._carry_out(ping, PING, (), deadline)
        except TimeoutError:
            late, error = ping.late, ping.stalled_error(deadline)
            for link in self._session.give_up_on(late, error):
                await self._mailboxes.wait(link.over, OVER_TIMEOUT)
            verdict = self._session.verdict_on(late, error)
            raise verdict from verdict.__cause__
        finally:
            ping.discard()

    async def dump_stacks_async(self, timeout: float | None = 10.0) -> dict[int, str]:
        """Return, by rank, the Python stacks of all threads of each engine; as ``dump_stacks``, on a thread."""
        return await self._on_a_thread(self.dump_stacks, timeout)

    async def _carry_out(self, fan_out: FanOut, method: str, args: tuple[Any, ...], deadline: Deadline) -> list[Any]:
        for link in fan_out.links:
            await self._wait_for_room(link, deadline)
        frame = self._caller.encode(method, args)
        for link in await self._send(frame, partial(self._caller.place, fan_out, frame), fan_out.discard):
            await self._mailboxes.wait(link.over, OVER_TIMEOUT)
        self._caller.fail_lost(fan_out)
        self._session.expect()
        return await self._values(fan_out, deadline)

    async def _values(self, fan_out: FanOut, deadline: Deadline) -> list[Any]:
        for reply in fan_out.replies:
            if not await self._mailboxes.wait(reply, deadline.remaining()):
                raise fan_out.timeout_error(deadline)
        if fan_out.size < LARGE_REPLY:
            return fan_out.values()
        return await self._on_a_thread(fan_out.values)

    @staticmethod
    async def _send(frame: Frame, send: Callable[[], T], undo: Callable[[], object]) -> T:
        """Return ``send()``, which copies the buffers of a frame: on a thread, if they are large.

        Cancelled meanwhile, it is undone as soon as it has ended.
        """
        if frame.size < LARGE_REPLY:
            return send()
        sending = asyncio.get_running_loop().run_in_executor(None, send)
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            sending.add_done_callback(lambda done: (done.cancelled() or done.exception(), undo()))
            raise

    async def _on_a_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Return ``function(*args)``, which would hold up the loop; the thread is the loop's own."""
        return await self._mailboxes.sleep(asyncio.get_running_loop().run_in_executor(None, function, *args))


def _take_back(abort_of: Callable[[Iterable[Hashable]], None], mailboxes: Mailboxes) -> None:
    """Take back what event loops had under way that are closed; the reader does it, and must not keep a client."""
    abort_of(mailboxes.take_closed())
