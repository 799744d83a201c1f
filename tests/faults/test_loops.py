"""Asyncio clients and the event loops of their hosts: any loop, one after the other or at once, and none is held up."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pytest

from engine_client import ClosedError, EngineDeadError
from engine_client.clients.in_flight import InFlight
from engine_client.clients.outputs import OutputQueue
from engine_client.deadline import Deadline
from engine_client.testing.faults import frozen
from engine_client.testing.scripted import Script
from helpers.calls import async_client, make_array
from helpers.clients import make_request, pid_of, pids_of, session_of
from helpers.heart import Heart
from helpers.procs import run_script
from helpers.scenes import Waiter
from helpers.timing import DEADLOCK, eventually

RANKS = pytest.mark.parametrize("ranks", [1, 2])
MIB = 1 << 20
LONG = 1_000_000
REPEATS = os.environ.get("ENGINE_CLIENT_TEST_REPEATS")
"""How often stress tests repeat what they do; None: as often as the scenarios say."""

# -- BC-27 -------------------------------------------------------------------------------------------------------------

THREE_RUNS = """
import asyncio, logging, sys, time
from helpers.calls import async_client
from helpers.clients import make_request

where, ranks, nature = sys.argv[1], int(sys.argv[2]), sys.argv[3]

class Proactive(asyncio.SelectorEventLoop):
    # As the loop of Windows, it watches no descriptors.
    def add_reader(self, *args): raise NotImplementedError
    add_writer = remove_reader = remove_writer = add_reader

async def use(client, turn):
    stream = client.stream(make_request("stream", 3))
    names = {f"{name}{turn}" for name in "abcd"}
    for name in names:
        await client.add_request_async(make_request(name, 3))
    assert await client.call_utility_async("echo", turn) == turn
    await client.check_health_async(20)
    tokens = dict.fromkeys(names, 0)
    while sum(tokens.values()) < 12:
        for output in (await client.get_output_async(timeout=20)).outputs:
            tokens[output.request_id] += len(output.new_token_ids)
    assert set(tokens.values()) == {3}
    assert [output.new_token_ids async for output in stream] == [[1], [1], [1]]
    assert client.utility_results == {}

def run(coroutine):
    loop = Proactive() if nature == "watches nothing" else asyncio.new_event_loop()
    if nature == "eager":
        loop.set_task_factory(asyncio.eager_task_factory)
    loop.set_debug(nature == "debug")
    loop.slow_callback_duration = 10.0
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

async def make():
    client = async_client(ranks)
    await use(client, 0)
    return client

client = async_client(ranks) if where == "outside" else run(make())
for turn in range(3):
    run(use(client, turn))
if where == "outside":
    client.shutdown()
else:
    async def end():
        await asyncio.to_thread(client.shutdown)
    run(end())
print("OK")
"""

NATURES = ["plain", "watches nothing", "debug", *(["eager"] if sys.version_info >= (3, 12) else [])]
"""Of loops; the eager task factory came with Python 3.12."""


@pytest.mark.newer
@pytest.mark.parametrize("nature", NATURES)
@pytest.mark.parametrize(("where", "ranks"), [("outside", 1), ("inside", 2)])
def test_bc27_one_loop_after_the_other(where: str, ranks: int, nature: str) -> None:
    """Made outside or inside of a loop, a client works in three further ones, of any nature, without a warning."""
    assert run_script(THREE_RUNS, where, str(ranks), nature).check().stdout == "OK\n"


@RANKS
def test_bc27_two_loops_in_two_threads(ranks: int) -> None:
    """Loops that use one client at once get the answers to their own calls, and the outputs of their own streams."""

    async def work(client: Any, mark: int) -> int:
        async def one(number: int) -> int:
            name = f"{mark}-{number}"
            count = 0
            async for output in client.stream(make_request(name, 1 + number % 5)):
                assert output.request_id == name
                count += len(output.new_token_ids)
                assert await client.call_utility_async("echo", name) == name
            return count

        return sum(await asyncio.gather(*(one(number) for number in range(50))))

    with async_client(ranks) as client:
        waiters = [Waiter(lambda mark=mark: asyncio.run(work(client, mark)), again=False) for mark in range(2)]
        for waiter in waiters:
            waiter.join(DEADLOCK)
            assert (waiter.error, waiter.result) == (None, 150)
        assert client.utility_results == {}
        assert len(session_of(client).in_flight) == 0


async def leave(client: Any) -> list[Any]:
    """Leave everything behind that can wait: requests, a stream, calls, a read, a health check; return the tasks."""
    for number in range(5):
        await client.add_request_async(make_request(f"old{number}", LONG))
    stream = client.stream(make_request("old stream", LONG))
    await stream.next()

    async def read() -> None:
        while True:
            await client.get_output_async()

    waiting: list[Coroutine[Any, Any, Any]] = [read(), client.call_utility_async("deferred"), stream.next()]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in waiting]
    await asyncio.sleep(0.05)
    return tasks


def close_hard(main: Callable[[], Coroutine[Any, Any, list[Any]]]) -> None:
    """Run a coroutine and close its loop while the tasks that it returns still wait."""
    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(main())
    for task in tasks:
        task._log_destroy_pending = False  # noqa: SLF001  # asyncio would tell what is meant here
    loop.close()
    del tasks[:]
    gc.collect()


def run_and_forget(main: Callable[[], Coroutine[Any, Any, list[Any]]]) -> None:
    """Run a coroutine as most hosts do; what still waits is cancelled."""

    async def whole() -> None:
        await main()

    asyncio.run(whole())


@RANKS
@pytest.mark.parametrize("end", [close_hard, run_and_forget])
def test_bc27_a_loop_that_ends_in_the_middle(end: Callable[..., None], ranks: int) -> None:
    """What a loop leaves behind is aborted in the engines, and nothing of it reaches the next loop."""

    async def after(client: Any) -> None:
        await client.add_request_async(make_request("new", 20))
        names, tokens = set(), 0
        while tokens < 20:
            for output in (await client.get_output_async(timeout=DEADLOCK)).outputs:
                names.add(output.request_id)
                tokens += len(output.new_token_ids)
        assert names == {"new"}
        assert await client.call_utility_async("echo", 5) == 5

    with async_client(ranks, Script(step_seconds=0.001)) as client:
        for _ in range(3):
            end(lambda: leave(client))
            asyncio.run(after(client))
            for rank in range(ranks):
                eventually(lambda rank=rank: asyncio.run(requests_of(client, rank)) == [])
        assert len(session_of(client).in_flight) == 0
        assert client.utility_results == {}


@RANKS
@pytest.mark.parametrize("end", ["close", "last output", "death"])
def test_bc20_others_who_wait_in_a_stream_are_told_of_its_end(end: str, ranks: int) -> None:
    """Tasks in ``next`` of a stream that is closed, whose last output another one gets, or whose engine dies, end."""

    async def main(client: Any) -> set[type]:
        stream = client.stream(make_request("a", 2))
        tasks = [asyncio.ensure_future(stream.next()) for _ in range(20)]
        await asyncio.sleep(0.1)
        if end == "close":
            await stream.aclose()
        elif end == "death":
            os.kill(pid_of(client), signal.SIGKILL)
        done, waiting = await asyncio.wait(tasks, timeout=DEADLOCK)
        assert not waiting
        return {type(task.exception()) for task in done if task.exception() is not None}

    with async_client(ranks, Script(step_seconds=0.3)) as client:
        kinds = asyncio.run(main(client))
        assert kinds <= {EngineDeadError, StopAsyncIteration} if end == "death" else kinds == {StopAsyncIteration}


def test_bc20_who_looks_while_another_has_the_end_in_hand() -> None:
    """A task that looks while the mark of the end is taken and about to be put back does not sleep on."""

    class Taken(SimpleQueue):  # type: ignore[type-arg]  # not in Python 3.10
        def get(self, *_: Any) -> Any:
            super().get(False)
            raise Empty

    queue = OutputQueue(InFlight())
    queue.queue = Taken()
    queue.end(ClosedError)
    with pytest.raises(ClosedError):
        queue.take(Deadline(0), [])


async def requests_of(client: Any, rank: int) -> Any:
    """Return the ids that an engine has."""
    ((info),) = await client.call_utility_async("info", ranks=[rank])
    return info["requests"]


# -- BC-13, BC-50: cancelled and interrupted ---------------------------------------------------------------------------

BIG = np.arange(1 << 17, dtype=np.uint8)


async def next_of_stream(client: Any) -> None:
    """Read one output of a stream, and leave it to be dropped."""
    await client.stream(make_request("x", LONG)).next()


OPERATIONS: dict[str, Callable[[Any], Coroutine[Any, Any, Any]]] = {
    "add": lambda client: client.add_request_async(make_request("x", LONG)),
    "add big": lambda client: client.add_request_async(make_request("x", LONG, None, prompt_embeds=BIG)),
    "call": lambda client: client.call_utility_async("echo", 1),
    "big call": lambda client: client.call_utility_async("collective_rpc", make_array, None, (MIB,)),
    "get": lambda client: client.get_output_async(),
    "health": lambda client: client.check_health_async(),
    "stream": next_of_stream,
}


async def check_clean(client: Any) -> None:
    """Check that nothing of what was cancelled is left, and that the next calls get their own."""
    session = session_of(client)
    assert await client.call_utility_async("echo", 7, timeout=DEADLOCK) == 7
    assert (len(session.in_flight), len(session.calls), len(session.streams), len(session.room)) == (0, 0, 0, 0)
    await client.add_request_async(make_request("x", 2))
    tokens = 0
    while tokens < 2:
        for output in (await client.get_output_async(timeout=DEADLOCK)).outputs:
            assert output.request_id == "x"
            tokens += len(output.new_token_ids)
    for rank in session.links:
        assert await requests_of(client, rank) == []


def random_turns(count: int) -> list[int]:
    """Draw numbers of turns, small ones as often as large ones; print the seed, for a failure to be seen again."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    return [int(2 ** dice.uniform(0, 8.5)) - 1 for _ in range(count)]


@RANKS
@pytest.mark.parametrize("count", [0, pytest.param(int(REPEATS or 1000), marks=pytest.mark.stress)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bc50_cancelled_at_every_turn_of_the_loop(operation: str, count: int, ranks: int) -> None:
    """A task that is cancelled after any number of turns leaves tables, memory and engines as they were.

    At each of the first turns, at a few later ones, and then at ``count`` random ones.  What is cancelled is one
    ``add_request``, which is one request here: siblings are requests of their own, so those already sent stay until
    their caller aborts them (``test_bc50_of_four_siblings_one_cannot_be_encoded``).
    """
    moments = [*range(12), 20, 40, 80, 160, *random_turns(count)]

    async def main(client: Any) -> None:
        for turns in moments:
            task = asyncio.ensure_future(OPERATIONS[operation](client))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled() or task.exception() is None, task.exception()
            if not task.cancelled() and operation.startswith("add"):
                await client.abort_requests_async(["x"])
            del task
            await check_clean(client)
        for rank in range(ranks):  # each engine keeps its last request
            async for _ in client.stream(make_request("last", 1, data_parallel_rank=rank)):
                pass
        await asyncio.to_thread(eventually, lambda: session_of(client).writer.used == 0)

    with async_client(ranks, Script(step_seconds=0.001)) as client:
        asyncio.run(main(client))


@RANKS
def test_bc50_cancelled_while_there_is_no_room(ranks: int) -> None:
    """Of senders that wait for a stopped engine, those that are cancelled send nothing; what others send arrives."""

    def add(name: str) -> Any:
        return client.add_request_async(make_request(name, 1, None, prompt_embeds=BIG))

    async def main() -> None:
        with ExitStack() as stack:
            for pid in pids_of(client):
                stack.enter_context(frozen(pid))
            for number in range(8 * ranks):  # beyond the mark, and what the sockets hold
                await asyncio.wait_for(add(f"first{number}"), DEADLOCK)
                if all(link.channel.backlog > BIG.nbytes for link in session_of(client).links.values()):
                    break
            waiting = [asyncio.ensure_future(add(f"r{number}")) for number in range(100)]
            calls = [asyncio.ensure_future(client.call_utility_async("echo", BIG)) for _ in range(20)]
            await asyncio.sleep(0.1)
            assert len(session_of(client).room) == 120
            for task in [*waiting[::2], *calls]:
                task.cancel()
            await asyncio.gather(*waiting[::2], *calls, return_exceptions=True)
        await asyncio.gather(*waiting[1::2])
        ended: set[str] = set()
        while len(session_of(client).in_flight):
            outputs = (await client.get_output_async(timeout=DEADLOCK)).outputs
            ended |= {output.request_id for output in outputs if output.finished}
        assert {name for name in ended if name.startswith("r")} == {f"r{number}" for number in range(1, 100, 2)}
        await check_clean(client)

    with async_client(ranks, high_water=BIG.nbytes, arena_limit=0) as client:
        asyncio.run(main())


STORM = """
import asyncio, random, signal, sys, time
import numpy as np
from engine_client.testing.scripted import Script
from helpers.calls import async_client
from helpers.clients import make_request, session_of

ranks, rounds, seed = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rng = random.Random(seed)
big = np.arange(1 << 20, dtype=np.uint8)
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))

async def busy(client):
    async def read():
        while True:
            await client.get_output_async()
    async def stream(number):
        async for _ in client.stream(make_request(f"stream{number}", 10**6)):
            pass
    async def call():
        while True:
            assert (await client.call_utility_async("echo", big)).nbytes == big.nbytes
    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 3e-2))
    for number in range(4):
        await client.add_request_async(make_request(f"old{number}", 10**6))
    await asyncio.gather(read(), stream(1), stream(2), call())

async def use(client, number):
    await client.add_request_async(make_request("old1", 2))
    await client.add_request_async(make_request("stream1", 3))
    tokens = {"old1": 0, "stream1": 0}
    while sum(tokens.values()) < 5:
        for output in (await client.get_output_async(timeout=20)).outputs:
            tokens[output.request_id] += len(output.new_token_ids)
    assert tokens == {"old1": 2, "stream1": 3}
    assert await client.call_utility_async("echo", number, timeout=20) == number
    for rank in range(ranks):
        info, = await client.call_utility_async("info", ranks=[rank], timeout=20)
        assert info["requests"] == [], info["requests"]
    session = session_of(client)
    assert (len(session.in_flight), len(session.calls), len(session.streams)) == (0, 0, 0)

with async_client(ranks, Script(step_seconds=2e-4)) as client:
    for number in range(rounds):
        try:
            asyncio.run(busy(client))
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("no interrupt")
        asyncio.run(use(client, number))
print("OK")
"""


@RANKS
@pytest.mark.parametrize("rounds", [15, pytest.param(200, marks=[pytest.mark.stress, pytest.mark.slow])])
def test_bc13_ctrl_c_ends_a_run_and_leaves_the_next_one_clean(rounds: int, ranks: int) -> None:
    """After Ctrl-C at random moments of ``asyncio.run`` the next run sees nothing of what it interrupted."""
    result = run_script(STORM, str(ranks), str(rounds), str(random.random()), timeout=110, flags=())
    # What it says on stderr is asyncio's: of an interrupt in the middle of a callback, or of a task.
    assert (result.returncode, result.stdout, result.left) == (0, "OK\n", []), result


# -- BC-57 -------------------------------------------------------------------------------------------------------------


async def bustle(client: Any, ranks: int, seconds: float) -> tuple[Heart, list[float]]:
    """Stream 5,000 outputs per second to 50 consumers, and every 200 ms a tensor of 64 MiB and a request of 16."""
    heart, firsts = Heart(), dict[int, float]()
    payload = np.zeros(16 * MIB, np.uint8)

    async def consume(number: int) -> None:
        async with client.stream(make_request(f"r{number}", LONG)) as stream:
            async for _ in stream:
                firsts.setdefault(number, time.monotonic())

    async def fetch() -> None:
        while True:
            (array,) = (
                await client.call_utility_async("collective_rpc", make_array, None, (64 * MIB,), None, ranks=[0])
            )[0]
            assert array.nbytes == 64 * MIB
            await asyncio.sleep(0.2)

    async def send() -> None:
        for number in range(LONG):
            request = make_request(f"big{number}", 1, None, prompt_embeds=payload)
            async for _ in client.stream(request):
                pass
            await asyncio.sleep(0.2)

    tasks = [asyncio.ensure_future(consume(number)) for number in range(50)]
    await asyncio.sleep(0.2)
    others = [asyncio.ensure_future(fetch()), asyncio.ensure_future(send())]
    await heart.beat(seconds)
    for task in [*tasks, *others]:
        task.cancel()
    results = await asyncio.gather(*tasks, *others, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results
    return heart, list(firsts.values())


@pytest.mark.timing
@pytest.mark.parametrize(
    ("ranks", "seconds", "runs", "good"),
    [(1, 2.0, 5, 1), (2, 2.0, 5, 1), pytest.param(1, 20.0, 3, 2, marks=pytest.mark.stress)],
)
def test_bc57_a_loop_goes_on_beside_large_and_many_outputs(ranks: int, seconds: float, runs: int, good: int) -> None:
    """A heartbeat is late by less than 25 ms in 99 of 100 beats and by 150 ms at most; no consumer starves.

    Other programs run on the machine, so not every run has to be good; most of the long ones have.
    """
    faults: list[str] = []
    for _ in range(runs):
        with async_client(ranks, Script(step_seconds=0.01)) as client:
            heart, firsts = asyncio.run(bustle(client, ranks, seconds))
        assert len(firsts) == 50
        assert max(firsts) - min(firsts) < 1.0
        fault = heart.check()
        faults += [] if fault is None else [fault]
        good -= fault is None
        if not good:
            return
    pytest.fail("; ".join(faults))


@pytest.mark.timing
def test_bc57_what_is_not_read_is_bounded_by_its_request() -> None:
    """In a stream that is never read waits what its request produces, less than 1 KB a token; dropped, it is let go.

    No option limits it, and docs/ names no figure: the request's ``max_tokens`` is the bound.
    """
    tokens = 3000

    async def main(client: Any) -> None:
        before = tracemalloc.get_traced_memory()[0]
        idle = client.stream(make_request("idle", tokens))
        await idle.next()
        await asyncio.to_thread(eventually, lambda: asyncio.run(requests_of(client, 0)) == [], DEADLOCK)
        waiting = tracemalloc.get_traced_memory()[0] - before
        assert waiting < 1000 * tokens
        await asyncio.sleep(0.2)
        assert tracemalloc.get_traced_memory()[0] - before - waiting < 100_000, "it grows without its request"
        await idle.aclose()
        del idle
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 200_000
        assert waiting > 200 * tokens, "nothing waited, so nothing is shown"

    with async_client() as client:
        asyncio.run(client.call_utility_async("echo", 1))
        tracemalloc.start()
        try:
            asyncio.run(main(client))
        finally:
            tracemalloc.stop()


def test_bc57_one_who_does_not_read_slows_nobody() -> None:
    """A stream that is never read holds no other one up, and what waits for it is let go when it is closed."""

    async def main(client: Any) -> None:
        idle = client.stream(make_request("idle", 20_000))
        await idle.next()
        began = time.monotonic()
        for number in range(20):
            count = 0
            async for output in client.stream(make_request(f"r{number}", 50)):
                count += len(output.new_token_ids)
            assert count == 50
        assert time.monotonic() - began < 10
        await idle.aclose()
        assert await client.call_utility_async("echo", 1) == 1
        assert (await client.call_utility_async("info"))["requests"] == []

    with async_client() as client:
        asyncio.run(main(client))
        assert len(session_of(client).in_flight) == 0
