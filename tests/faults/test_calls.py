"""Pending calls end with their engine or their client, and late replies reach nobody (BC-20, BC-21)."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import pytest

from engine_client import ClosedError, EngineDeadError
from engine_client.errors import RemoteProtocolError
from engine_client.testing.faults import frozen
from engine_client.testing.scripted import Script
from helpers.calls import async_client, call
from helpers.clients import make_request, pid_of, reader_of, scripted_client, session_of
from helpers.inside import answer_twice, write_garbage
from helpers.scenes import METHODS, Waiter, check_dead, colours, record_logs
from helpers.timing import DEADLOCK, eventually, took_at_most

DEATH_BOUND = 2.0


class Crash(Exception):
    """Raised in engines."""


def give_up(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the client's reader fail at the next frame."""

    def fail(*_: Any) -> None:
        raise SystemExit("the reader is ended")

    monkeypatch.setattr(session_of(client), "on_frames", fail)
    with pytest.raises(EngineDeadError, match="the reader is ended"):
        client.call_utility("echo", 1)


def fail_step(client: Any, _: pytest.MonkeyPatch) -> None:
    """Have the engines raise in a step; of several, one may be dead before the last has answered."""
    with suppress(EngineDeadError):
        client.call_utility("fail_step", Crash("marker"))


WAYS: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], Any], type[Exception], str]] = {
    "sigkill": (lambda client, _: os.kill(pid_of(client), signal.SIGKILL), EngineDeadError, "SIGKILL"),
    "dead message": (fail_step, EngineDeadError, "marker"),
    "shutdown": (lambda client, _: Waiter(client.shutdown, again=False), EngineDeadError, ""),
    "shutdown at once": (lambda client, _: Waiter(partial(client.shutdown, 0), again=False), EngineDeadError, ""),
    "sigterm": (lambda client, _: os.kill(pid_of(client), signal.SIGTERM), EngineDeadError, ""),
    "garbage": (lambda client, _: Waiter(lambda: client.collective_rpc(write_garbage)), EngineDeadError, "no frame"),
    "reader": (give_up, EngineDeadError, "the reader is ended"),
}


def pend(client: Any, number: int) -> list[Waiter]:
    """Return threads in calls that the engine never answers."""
    before = threading.stack_size(256 * 1024)
    try:
        waiters = [Waiter(lambda: client.call_utility("deferred")) for _ in range(number)]
    finally:
        threading.stack_size(before)
    eventually(lambda: len(client.utility_results) == number * len(session_of(client).links), DEADLOCK)
    client.call_utility("echo", 0)
    return waiters


@pytest.mark.crash
@pytest.mark.parametrize(
    ("method", "number", "colour"),
    [
        ("exec", 1000, "sync"),
        pytest.param("exec", 100, "async", marks=pytest.mark.full),
        ("exec", 20, "dp"),
        ("fork", 1, "sync"),
        pytest.param("fork", 1000, "sync", marks=pytest.mark.full),
        pytest.param("fork", 20, "dp", marks=pytest.mark.full),
        pytest.param("spawn", 1, "sync", marks=pytest.mark.full),
        pytest.param("forkserver", 1, "sync", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_bc20_every_pending_call_ends_with_its_engine(
    way: str, method: str, number: int, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the engine, its stream, the client or its reader ends: EngineDeadError within 2 s, and ever after."""
    client = scripted_client(start_method=method, colour=colour)
    reader = reader_of(client)
    waiters = pend(client, number)
    act, kind, text = WAYS[way]
    began = time.monotonic()
    acting = act(client, monkeypatch)
    errors = [waiter.end(began, DEATH_BOUND) for waiter in waiters]
    assert all(isinstance(error, kind) for error in errors), {repr(error) for error in errors}
    assert all(text in str(error) for error in errors) or way == "garbage"
    assert len({id(error) for error in errors}) == number
    if way == "garbage":
        assert all(isinstance(error.__cause__, RemoteProtocolError) for error in errors if error)
    if isinstance(acting, Waiter):
        acting.join(DEADLOCK)
    assert len(session_of(client).calls) == 0
    check_dead(client)
    eventually(lambda: not reader.is_alive(), DEATH_BOUND)
    if "shutdown" in way:
        with pytest.raises(ClosedError):
            client.call_utility("echo", 1)


@colours
def test_bc20_an_error_of_one_call_touches_no_other(colour: str) -> None:
    """Calls that fail, now and later, leave those alone that wait beside them."""
    with scripted_client(colour=colour) as client:
        waiting = [Waiter(partial(client.call_utility, "deferred", n, 0.3), again=False) for n in range(20)]
        failing = [Waiter(partial(client.call_utility, "deferred", KeyError(n), 0.1)) for n in range(20)]
        for _ in range(20):
            with pytest.raises(Crash, match="marker"):
                client.call_utility("fail", Crash("marker"))
        for number, waiter in enumerate(failing):
            waiter.join(DEADLOCK)
            assert repr(waiter.error) == f"KeyError({number})"
        for number, waiter in enumerate(waiting):
            waiter.join(DEADLOCK)
            assert (waiter.error, waiter.result) == (None, number)
        assert client.utility_results == {}


@pytest.mark.crash
@pytest.mark.parametrize("way", ["exit3", "step"])
def test_bc20_reply_and_death_in_one_read(way: str) -> None:
    """A reply that comes with the death still reaches its caller; the call beside it gets EngineDeadError."""
    client = scripted_client()
    (waiting,) = pend(client, 1)
    gate, held = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        gate.wait(DEADLOCK)

    try:
        reader_of(client).call(hold)
        assert held.wait(DEADLOCK)
        answered = Waiter(partial(client.call_utility, "echo", "mine"), again=False)
        eventually(lambda: len(client.utility_results) == 2)
        if way == "step":
            last = Waiter(partial(client.call_utility, "fail_step", Crash("marker")), again=False)
        else:
            last = Waiter(partial(client.call_utility, "die", "exit3"), again=False)
        (link,) = session_of(client).links.values()
        eventually(lambda: not link.handle.is_alive(), DEADLOCK)
        assert waiting.is_alive()
        assert answered.is_alive()
    finally:
        began = time.monotonic()
        gate.set()
    assert answered.end(began, DEATH_BOUND) is None
    assert answered.result == "mine"
    text = "marker" if way == "step" else "exit code 3"
    error = last.end(began, DEATH_BOUND)
    assert error is None if way == "step" else isinstance(error, EngineDeadError)
    error = waiting.end(began, DEATH_BOUND)
    assert isinstance(error, EngineDeadError)
    assert text in str(error)
    check_dead(client, text)


@pytest.mark.crash
def test_bc20_a_call_from_inside_a_callback_of_a_dying_one() -> None:
    """It raises EngineDeadError at once, and keeps no other waiter from its error."""
    client = scripted_client()
    session = session_of(client)
    errors: list[BaseException] = []

    def again(_: Any) -> None:
        try:
            client.call_utility("echo", 1)
        except BaseException as error:  # noqa: BLE001  # it is what the test is about
            errors.append(error)

    for _ in range(5):
        (reply,) = call(session, "deferred").replies
        reply.add_done_callback(again)
    waiters = [Waiter(lambda: client.call_utility("deferred")) for _ in range(5)]
    eventually(lambda: len(client.utility_results) == 10)
    os.kill(pid_of(client), signal.SIGKILL)
    began = time.monotonic()
    for waiter in waiters:
        assert isinstance(waiter.end(began, DEATH_BOUND), EngineDeadError)
    eventually(lambda: len(errors) == 5, DEATH_BOUND)
    assert {type(error) for error in errors} == {EngineDeadError}
    check_dead(client, "SIGKILL")


@pytest.mark.parametrize("end", ["close", "last output"])
def test_bc20_others_who_wait_in_a_stream_are_told_of_its_end(end: str) -> None:
    """Threads in ``next`` of a stream that another one closes, or whose last output another one gets, are let go."""
    with scripted_client(Script(step_seconds=0.3)) as client:
        stream = client.stream(make_request("a", 2))
        waiters = [Waiter(stream.next) for _ in range(10)]
        time.sleep(0.1)
        began = time.monotonic()
        if end == "close":
            stream.close()
        errors = [waiter.end(began, DEATH_BOUND) for waiter in waiters]
        assert {type(error) for error in errors} == {StopIteration}
        assert sum(waiter.result is not None for waiter in waiters) <= 2
        assert client.call_utility("info")["requests"] == []


# -- BC-21 -------------------------------------------------------------------------------------------------------------


class Tally:
    """How calls ended whose answer, a value or a ``KeyError`` of it, races with their end."""

    def __init__(self) -> None:
        self.counts = {"answered": 0, "failed": 0, "late": 0}
        self.wrong: list[Any] = []

    @contextmanager
    def of(self, mine: str, *late: type[BaseException]) -> Iterator[Callable[[Any], None]]:
        """Count one call, which hands its answer to what this gives; ``late``: what it raises when it is too late."""
        answers: list[Any] = []
        try:
            yield answers.append
        except late:
            self.counts["late"] += 1
        except KeyError as error:
            self.counts["failed"] += 1
            self.wrong += [error] if error.args != (mine,) else []
        else:
            self.counts["answered"] += 1
            self.wrong += [answers] if answers != [mine] else []

    def check(self, number: int) -> None:
        """Check that so many calls were made, that each got its own answer, and that they ended in all ways."""
        assert self.wrong == []
        assert sum(self.counts.values()) == number
        assert min(self.counts.values()) > 0, self.counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "colour"),
    [
        ("exec", "sync"),
        pytest.param("exec", "async", marks=pytest.mark.full),
        ("exec", "dp"),
        *(pytest.param(method, "sync", marks=pytest.mark.full) for method in METHODS[1:]),
    ],
)
def test_bc21_answers_around_the_moment_of_the_timeout(
    method: str, colour: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Five hundred calls whose timeout and answer race: each gets its own answer or TimeoutError, nobody another's."""
    record_logs(caplog)
    tally = Tally()

    def work(number: int) -> None:
        rng = random.Random(number)
        for index in range(50):
            mine = f"{number}-{index}"
            value: Any = mine if index % 2 else KeyError(mine)
            with tally.of(mine, TimeoutError) as answer:
                answer(client.call_utility("deferred", value, 0.03, timeout=rng.uniform(0.025, 0.045)))
            if (echoed := client.call_utility("echo", mine)) != mine:
                tally.wrong.append(echoed)

    with scripted_client(start_method=method, colour=colour) as client:
        reader = reader_of(client)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLOCK)
        time.sleep(0.1)  # the last late answers
        tally.check(500)
        assert client.call_utility("echo", "after") == "after"
        assert client.utility_results == {}
        assert reader.is_alive()
    assert all("gave up" in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_bc21_answers_around_the_moment_of_the_cancellation(ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    """The same where ``asyncio.wait_for`` or ``cancel`` ends the waiting task; nothing is said of it in the log."""
    tally = Tally()

    async def wait(client: Any, value: Any, seconds: float, *, is_cancelled: bool) -> Any:
        call = client.call_utility_async("deferred", value, 0.03)
        if not is_cancelled:
            return await asyncio.wait_for(call, seconds)
        task = asyncio.ensure_future(call)
        asyncio.get_running_loop().call_later(seconds, task.cancel)
        return await task

    async def work(client: Any, number: int) -> None:
        rng = random.Random(number)
        for index in range(50):
            mine = f"{number}-{index}"
            value: Any = mine if index % 2 else KeyError(mine)
            # The second is another one in Python 3.10.
            with tally.of(mine, TimeoutError, asyncio.TimeoutError, asyncio.CancelledError) as answer:
                answer(await wait(client, value, rng.uniform(0.025, 0.045), is_cancelled=index % 5 == 0))
            assert await client.call_utility_async("echo", mine) == mine

    async def main(client: Any) -> None:
        await asyncio.wait_for(asyncio.gather(*(work(client, number) for number in range(10))), DEADLOCK)
        await asyncio.sleep(0.1)  # the last late answers
        assert await client.call_utility_async("echo", "after") == "after"

    caplog.set_level(logging.DEBUG)
    with async_client(ranks) as client:
        asyncio.run(main(client))
        gc.collect()  # an exception that was never retrieved is told of
        tally.check(500)
        assert client.utility_results == {}
        assert reader_of(client).is_alive()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all("gave up" in line for line in said), said


@colours
@pytest.mark.parametrize("value", ["late", KeyError("late")], ids=["success", "failure"])
def test_bc21_a_late_answer_is_dropped(value: Any, colour: str, caplog: pytest.LogCaptureFixture) -> None:
    """After the timeout at 100 ms the answer at 300 ms reaches nobody; only a failure leaves a line in the log."""
    logged = record_logs(caplog)
    with scripted_client(colour=colour) as client:
        with took_at_most(0.29), pytest.raises(TimeoutError, match=r"0\.1 s"):
            client.call_utility("deferred", value, 0.3, timeout=0.1)
        assert client.utility_results == {}
        assert client.call_utility("echo", "mine") == "mine"
        assert client.call_utility("deferred", "own", 0.4) == "own"
        assert len(logged()) == (len(session_of(client).links) if isinstance(value, KeyError) else 0)
        assert client.utility_results == {}


def test_bc21_the_counter_of_calls_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the last number that the wire can carry the numbers begin anew, and each call gets its own answer."""
    with scripted_client() as client:
        for start in (2**31, 2**32, 2**63, 2**64):
            monkeypatch.setattr(session_of(client).calls, "_next", count(start - 3))
            with pytest.raises(TimeoutError):
                client.call_utility("deferred", "late", 0.1, timeout=0.02)
            for index in range(6):
                assert client.call_utility("echo", (start, index)) == (start, index)
        assert client.utility_results == {}


@colours
def test_bc21_given_up_while_it_is_sent(colour: str) -> None:
    """A call that times out while the engine reads nothing leaves no half of it, and the next one its own answer."""
    big = bytes(4 << 20)
    with scripted_client(high_water=1 << 20, arena_limit=0, colour=colour) as client:
        with frozen(pid_of(client)):
            for _ in range(3):
                with took_at_most(2.0), pytest.raises(TimeoutError):
                    client.call_utility("echo", big, timeout=0.1)
            assert client.utility_results == {}
        assert client.call_utility("echo", "mine", timeout=20) == "mine"
        assert client.utility_results == {}


@colours
def test_bc21_two_answers_to_one_call(colour: str) -> None:
    """The first one counts; the second reaches nobody, and no later call."""
    with scripted_client(colour=colour) as client:
        client.collective_rpc(answer_twice)
        for number in range(100):
            assert client.call_utility("echo", number) == number
        waiters = [Waiter(partial(client.call_utility, "deferred", n, 0.1), again=False) for n in range(20)]
        for number, waiter in enumerate(waiters):
            waiter.join(DEADLOCK)
            assert waiter.result == number
        assert reader_of(client).is_alive()
        assert client.utility_results == {}
