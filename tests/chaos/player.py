"""Plays a round: one thread acts, one takes outputs, and calls and streams have threads of their own.

Whatever is started has a bound.  What happens is told to the model, which knows what may; a violation in any thread
ends the round.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np

from chaos.engine import TARGET, check_memory
from chaos.model import Model, Violation, payload_of
from chaos.schedule import Action, Round
from engine_client import (
    ClientOptions,
    DPAsyncMPClient,
    EngineConfig,
    EngineDeadError,
    PoolingParams,
)
from engine_client.config import ModelConfig
from engine_client.testing.inventory import describe_process, key_of
from engine_client.testing.scripted import Script
from helpers.clients import make_request, pids_of, session_of
from helpers.colours import Driven, make_coloured
from helpers.timing import DEADLOCK, MS, eventually

__all__ = ["Player", "make_client"]

DEATH_BOUND: Final = 4_000 * MS
"""Seconds in which everybody has learnt of a death: twice what is promised, since a chaos run shares its machine."""
_LOOK: Final = 0.05
_MOST_THREADS: Final = 8
_POLICIES: Final = {"lb-continue": "continue", "lb-restart": "restart"}


def make_client(round_: Round) -> Any:
    """Return the client of a round, with the methods of ``SyncMPClient``."""
    config = EngineConfig(additional_config={"script": Script(**round_.script)})
    options = ClientOptions(
        engine_target=TARGET,
        ready_timeout=DEADLOCK,
        shutdown_timeout=2.0,
        on_engine_death=_POLICIES.get(round_.kind, "shutdown"),  # type: ignore[arg-type]
        restart_limit=1000,
        restart_delay=0.01,
        **round_.options,
    )
    if round_.kind in ("sync", "async"):
        return make_coloured(round_.kind, config, None, False, options)
    config.parallel_config.data_parallel_size = 2
    if round_.kind == "dp":
        config.parallel_config.data_parallel_external_lb = True
        config.parallel_config.data_parallel_rank = 1
        return Driven(DPAsyncMPClient(config, None, False, options=options))  # type: ignore[arg-type]  # no executor
    if round_.kind == "lock-step":
        config.model_config = ModelConfig(is_moe=True)
    return make_coloured("dp", config, None, False, options)


async def _cut_get(client: Any, seconds: float) -> Any:
    """Call for outputs, and cancel that; what it does not return, the next call must."""
    task = asyncio.ensure_future(client.asynchronous.get_output_async())
    await asyncio.sleep(seconds)
    task.cancel()
    return await task


class Player:
    """Plays one round; ``play`` raises what went wrong."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.model = Model()
        self.done: list[Action] = []  # what has begun so far
        self.client: Any = None
        self._threads: list[threading.Thread] = []
        self._problems: list[BaseException] = []
        self._names: dict[int, str] = {}  # the id that a request of this number has
        self._is_over = threading.Event()  # nobody need take outputs any more
        self._is_paused = False
        self._gets = 0  # calls for outputs that have begun
        self._cut_gets: deque[float] = deque()  # seconds after which calls for outputs are to be cancelled
        self.slowest = 0.0  # seconds until a death, or an end, was told to all; the longest of them
        self._consumer = threading.Thread(target=self._guarded(self._consume), daemon=True)

    def play(self) -> None:
        """Play the round to its end.

        Raises:
            BaseException: whatever must not have happened.
        """
        self.client = make_client(self.round)
        try:
            self._consumer.start()
            for action in self.round.actions:
                self.done.append(action)
                getattr(self, f"_do_{action.kind}")(**action.arguments)
                self._raise_problems()
            self.done.append(Action("end", {"how": self.round.end}))
            getattr(self, f"_end_by_{self.round.end}")()
            self._raise_problems()
            self.model.check_all_ended()
        finally:
            self._is_over.set()
            client, self.client = self.client, None
            if client is not None:
                client.shutdown(0)
            self._join_all()

    def engines(self) -> str:
        """Return what the engines are doing, for the report of a hang."""
        session = session_of(self.client)
        lines = [repr(session), *map(repr, session.links.values())]
        lines += [describe_process(key) for link in session.links.values() if (key := key_of(link.pid)) is not None]
        return "\n".join([*lines, *self.client.dump_stacks(5.0).values()])

    # -- threads -------------------------------------------------------------------------------------------------------

    def _guarded(self, function: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001  # the acting thread raises it
                self._problems.append(error)

        return run

    def _raise_problems(self) -> None:
        if self._problems:
            raise self._problems[0]

    def _make_room(self) -> None:
        """Wait for threads while there are too many, and no pause holds them up."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while len(self._threads) >= _MOST_THREADS and not self._is_paused:
            self._join(self._threads.pop(0))

    def _start(self, function: Callable[[], None]) -> None:
        """Do something on a thread of its own, once there is room for it."""
        self._make_room()
        thread = threading.Thread(target=self._guarded(function), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _join(self, thread: threading.Thread, bound: float = DEADLOCK) -> None:
        thread.join(bound)
        if thread.is_alive():
            raise Violation(f"a call has not ended within {bound} s")

    def _join_all(self, bound: float = DEADLOCK) -> None:
        while self._threads:
            self._join(self._threads.pop(), bound)
        if self._consumer.ident is not None:
            self._join(self._consumer, bound)

    def _consume(self) -> None:
        client = self.client
        while not self._is_over.is_set():
            asked_at = self.model.now()
            self._gets += 1
            try:
                if self._cut_gets:
                    outputs = asyncio.run(_cut_get(client, self._cut_gets.popleft()))
                else:
                    outputs = client.get_output(timeout=_LOOK)
            except (TimeoutError, asyncio.CancelledError):
                continue
            except EngineDeadError:
                self.model.died()
                return
            for output in outputs.outputs:
                self.model.took(asked_at, output)
            output = outputs = None  # their memory is not to be held until the next ones come

    def _may_be_dead(self, error: EngineDeadError) -> None:
        if not self.model.allows_death():
            raise Violation("an engine is dead, and nothing was done to it") from error

    # -- requests ------------------------------------------------------------------------------------------------------

    def _request(self, number: int, name: str, tokens: int, size: int) -> Any:
        self._names[number] = name
        self.model.sends(number, name, tokens, size, is_stream=name.startswith("s"))
        if size:
            fields = {"sampling_params": None, "pooling_params": PoolingParams(task="embed")}
            return make_request(name, prompt=None, prompt_embeds=payload_of(number, size), **fields)
        return make_request(name, tokens, [number])

    def _do_add(self, number: int, tokens: int, size: int, name: str = "") -> None:
        request = self._request(number, name or f"r{number}", tokens, size)
        try:
            self.client.add_request(request)
        except EngineDeadError as error:
            self.model.refused(request.request_id, error)

    def _do_abort(self, numbers: list[int]) -> None:
        names = [self._names[number] for number in numbers if number in self._names]
        self.model.aborts(names)
        self.client.abort_requests(names)
        self.model.aborted(names)

    def _do_renew(self, number: int, tokens: int, size: int) -> None:
        """Abort a request and use its id again at once; what another thread had in hand must be out of the way."""
        name = self._names.get(number)
        if name is None or name.startswith("s"):
            return
        self._do_abort([number])
        before = self._gets
        eventually(lambda: self._gets > before or not self._consumer.is_alive(), DEADLOCK)
        self._do_add(number, tokens, size, name)

    def _do_stream(self, number: int, tokens: int, size: int, leaves_after: int | None) -> None:
        request = self._request(number, f"s{number}", tokens, size)
        follow = self._follow if self.round.kind == "sync" else self._follow_async
        self._start(lambda: follow(request, leaves_after))

    def _follow(self, request: Any, leaves_after: int | None) -> None:
        is_closed = False
        try:
            with self.client.stream(request) as stream:
                for position, output in enumerate(stream):
                    self.model.took(0, output)
                    is_closed = position == leaves_after
                    if is_closed:
                        break
        except EngineDeadError as error:
            self.model.failed(request.request_id, error)
        else:
            self.model.stopped(request.request_id, is_closed=is_closed)

    def _follow_async(self, request: Any, leaves_after: int | None, cancelled_after: float | None = None) -> None:
        async def follow() -> bool:
            async with self.client.asynchronous.stream(request) as stream:
                position = 0
                async for output in stream:
                    self.model.took(0, output)
                    if position == leaves_after:
                        return True
                    position += 1
            return False

        async def cut() -> bool:
            task = asyncio.ensure_future(follow())
            if cancelled_after is not None:
                await asyncio.sleep(cancelled_after)
                task.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                return True

        try:
            is_closed = asyncio.run(cut())
        except EngineDeadError as error:
            self.model.failed(request.request_id, error)
        else:
            self.model.stopped(request.request_id, is_closed=is_closed)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _call(self, expected: Any, method: str, *arguments: Any, timeout: float | None = None) -> None:
        """Make a call; it returns what is expected, or raises it, or that an engine is dead."""
        try:
            found = self.client.call_utility(method, *arguments, timeout=timeout)
        except EngineDeadError as error:
            self._may_be_dead(error)
        except Exception as error:
            if not (isinstance(expected, type) and isinstance(error, expected)):
                raise
        else:
            if isinstance(expected, type) or not np.array_equal(found, expected):
                raise Violation(f"{method} returned {found!r:.100}, not {expected!r:.100}")

    def _do_call(self, size: int, seconds: float | None) -> None:
        value = payload_of(size, size) if size else "value"
        arguments = ("echo", value) if seconds is None else ("deferred", value, seconds)
        self._start(lambda: self._call(value, *arguments))

    def _do_fail(self) -> None:
        self._start(lambda: self._call(KeyError, "fail", KeyError("as asked")))

    def _do_give_up(self, seconds: float) -> None:
        self._start(lambda: self._call(TimeoutError, "deferred", timeout=seconds))

    def _do_cancel(self, what: str, seconds: float, **request: int) -> None:
        """Cancel a call, a call for outputs, or a stream; a blocking client can only give a call up."""
        if self.round.kind == "sync":
            self._do_give_up(seconds)
        elif what == "call":
            self._start(lambda: asyncio.run(self._cancel_call(seconds)))
        elif what == "outputs":
            self._cut_gets.append(seconds)  # by the thread that takes them: two would tell the model in any order
        else:
            sent = self._request(name=f"s{request['number']}", **request)
            self._start(lambda: self._follow_async(sent, None, seconds))

    async def _cancel_call(self, seconds: float) -> None:
        task = asyncio.ensure_future(self.client.asynchronous.call_utility_async("deferred"))
        await asyncio.sleep(seconds)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except EngineDeadError as error:
            self._may_be_dead(error)
        else:
            raise Violation("a call that nobody answers has ended")

    def _do_health(self) -> None:
        self._start(self._health)

    def _health(self) -> None:
        try:
            self.client.check_health(DEADLOCK)
        except EngineDeadError as error:
            self._may_be_dead(error)

    def _do_nap(self, seconds: float) -> None:
        time.sleep(seconds)

    # -- the engines ---------------------------------------------------------------------------------------------------

    def _do_pause(self, mode: str) -> None:
        self._is_paused = True
        if mode == "abort":
            self.model.pausing(True)
        try:
            self.client.pause_scheduler(mode=mode)
        except EngineDeadError as error:
            self._may_be_dead(error)
        if mode == "abort":
            self.model.pausing(False)

    def _do_resume(self) -> None:
        try:
            self.client.resume_scheduler()
        except EngineDeadError as error:
            self._may_be_dead(error)
        self._is_paused = False

    def _pid(self, rank: int) -> int:
        pids = pids_of(self.client)
        return pids[rank % len(pids)]

    def _do_stop(self, rank: int, seconds: float) -> None:
        self._make_room()  # now: those that are waited for may need the engine
        pid = self._pid(rank)

        def go_on() -> None:
            time.sleep(seconds)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._start(go_on)

    def _do_kill(self, rank: int) -> None:
        session = session_of(self.client)
        living = [link for link in session.router.open_links() if not link.over.done()]
        if len(living) > 1 or self.round.kind == "lb-restart":
            self.model.disturbed()
            for link in living[rank % max(1, len(living)) :][:1]:
                killed_at = time.monotonic()
                with suppress(ProcessLookupError):
                    os.kill(link.pid, signal.SIGKILL)
                link.over.wait(DEATH_BOUND)
                self._told(killed_at)

    def _do_recover(self) -> None:
        """Wait until every rank serves again, or is known to be dead, and have all of them run."""
        session = session_of(self.client)
        if self.round.kind == "lb-restart":
            eventually(lambda: not session.deaths and not session.router.closed, DEADLOCK)
        self._join_some()
        self.model.calm()
        self._do_resume()

    def _join_some(self) -> None:
        """Wait for the calls that a death may have ended; a stream of a paused engine may wait on."""
        threads, self._threads = self._threads, []
        self.client.resume_scheduler()
        for thread in threads:
            self._join(thread)

    def _do_scale(self, ranks: int) -> None:
        asyncio.run(self.client.asynchronous.scale_elastic_ep(ranks))
        if len(session_of(self.client).links) != ranks:
            raise Violation(f"there are {session_of(self.client).links} where {ranks} ranks were asked for")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _told(self, since: float) -> None:
        """Note that by now all know of a death, or an end, since which not too much time may have passed."""
        took = time.monotonic() - since
        self.slowest = max(self.slowest, took)
        if took > DEATH_BOUND:
            raise Violation(f"it took {took:.1f} s until everybody knew")

    def _check_dead(self, since: float | None = None) -> None:
        """Everybody learns of the end within a bound from then, or now, and whoever comes later, too."""
        since = time.monotonic() if since is None else since
        self._join_all(DEATH_BOUND)
        late: list[Callable[[], Any]] = [
            lambda: self.client.call_utility("echo", 1),
            lambda: self.client.add_request(make_request("late")),
            lambda: self.client.get_output(timeout=1),
        ]
        for call in late:
            try:
                call()
            except EngineDeadError:
                continue
            raise Violation("a call to a dead client returned")
        self._told(since)
        session = session_of(self.client)
        if self.client.utility_results or session.room:
            raise Violation(f"somebody waits for a dead client: {session!r}")

    def _end_by_shutdown(self) -> None:
        self.model.dies()
        self.client.shutdown()
        self._check_dead()

    def _end_by_settle(self) -> None:
        """Let everything end, and see that all counts return to zero."""
        eventually(lambda: self._problems or not self.model.open(), 2 * DEADLOCK)
        self._raise_problems()
        while self._threads:
            self._join(self._threads.pop())
        session = session_of(self.client)
        gc.collect()
        for what, is_left in {
            "requests in flight": lambda: len(session.in_flight),
            "calls": lambda: len(session.calls),
            "streams": lambda: len(session.streams),
            "senders": lambda: len(session.room),
            "request memory": lambda: session.writer.used,  # type: ignore[union-attr]
            "result memory": lambda: self.client.collective_rpc(check_memory)[0],
            "requests in engines": lambda: sum(
                sum(link.status.counts()) for link in session.links.values() if not link.over.done()
            ),
        }.items():
            try:
                eventually(lambda look=is_left: not look(), DEADLOCK / 2)
            except AssertionError as error:
                raise Violation(f"{what} did not return to zero: {is_left()}") from error
        self._end_by_shutdown()

    def _end_by_drop(self) -> None:
        """Drop the last reference; the leak guard around the round sees whether anything is left."""
        self._do_recover()
        self._is_over.set()
        self.model.dies()
        self._join_all()
        self.model.died()
        self.client = None

    def _end_by_kill(self) -> None:
        self.model.dies()
        killed_at = time.monotonic()
        for pid in pids_of(self.client):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.round.kind == "lb-restart":
            self.client.shutdown()  # they would come back
            killed_at = time.monotonic()
        self._check_dead(killed_at)

    def _end_by_freeze(self) -> None:
        self.model.dies()
        for pid in pids_of(self.client):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        self.client.shutdown(0.2)
        if time.monotonic() - began > 0.2 + DEATH_BOUND:
            raise Violation(f"shutdown(0.2) took {time.monotonic() - began:.1f} s")
        self._check_dead()

    def _end_by_race(self) -> None:
        self.model.dies()
        pids = pids_of(self.client)
        self._start(self.client.shutdown)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.client.shutdown()
        self._check_dead()
