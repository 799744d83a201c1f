"""The asyncio client: nothing is lost when an await is cancelled, and any loop will do."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from engine_client import EngineDeadError, FinishReason
from engine_client.testing.faults import frozen
from engine_client.testing.scripted import Script
from helpers.calls import async_client, give_bytes, make_array, make_bytes
from helpers.clients import make_request, session_of
from helpers.timing import DEADLOCK, MS, eventually, took_at_most

LONG = 1_000_000
"""Tokens that no test waits for."""


def run(coroutine: Awaitable[Any]) -> Any:
    """Run a coroutine in a loop of its own; what hangs fails."""

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, DEADLOCK)

    return asyncio.run(bounded())


def pid(client: Any) -> int:
    """Return the pid of its only engine."""
    (link,) = session_of(client).links.values()
    pid: int = link.pid
    return pid


async def collect(client: Any, count: int) -> dict[str, list[Any]]:
    """Read until so many requests have ended; return each one's outputs in order."""
    found: dict[str, list[Any]] = {}
    ended = 0
    while ended < count:
        for output in (await client.get_output_async()).outputs:
            found.setdefault(output.request_id, []).append(output)
            ended += output.finished
    return found


async def running(client: Any) -> list[str]:
    """Return the requests that the engine has."""
    requests: list[str] = (await client.call_utility_async("info"))["requests"]
    return requests


def test_a_request_goes_there_and_back() -> None:
    """Outputs come in order and end with the finish reason; an aborted request says no more, and its id is free."""

    async def main() -> None:
        await client.add_request_async(make_request("a", 5))
        outputs = (await collect(client, 1))["a"]
        assert [output.new_token_ids for output in outputs] == [[1]] * 5
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        await client.add_request_async(make_request("a", LONG))
        await client.get_output_async()
        await client.abort_requests_async(["a", "unknown"])
        with pytest.raises(TimeoutError, match=r"0\.05 s"):
            await client.get_output_async(timeout=0.05)
        await client.add_request_async(make_request("a", 2))
        assert len((await collect(client, 1))["a"]) == 2
        with pytest.raises(ValueError, match="max_model_len"):
            await client.add_request_async(make_request("too long", prompt=range(5000)))

    with async_client() as client:
        run(main())


def test_calls_return_raise_and_time_out() -> None:
    """A result, the engine's exception, an unknown name, no answer in time: each is the caller's and leaves nothing."""

    async def main() -> None:
        assert await client.call_utility_async("echo", {"x": 1}) == {"x": 1}
        assert await client.call_utility_async("echo", 7, ranks=[0]) == [7]
        with pytest.raises(KeyError, match="marker"):
            await client.call_utility_async("fail", KeyError("marker"))
        with pytest.raises(AttributeError):
            await client.call_utility_async("no_such")
        with pytest.raises(TimeoutError, match=r"'deferred' was not answered within 0\.05 s"):
            await client.call_utility_async("deferred", timeout=0.05)
        with pytest.raises(TypeError):
            await client.call_utility_async("echo", threading.Lock())
        assert client.utility_results == {}
        await client.pause_scheduler_async()
        assert await client.is_scheduler_paused_async()
        await client.resume_scheduler_async()
        assert not await client.is_scheduler_paused_async()

    with async_client() as client:
        run(main())


def test_a_cancelled_get_leaves_the_outputs_to_the_next() -> None:
    """However far it has got, a cancelled ``get_output_async`` takes no token with it, and the order stays."""

    async def main() -> None:
        await client.add_request_async(make_request("a", count))
        found: list[Any] = []
        cancelled = 0
        while not found or not found[-1].finished:
            task = asyncio.create_task(client.get_output_async())
            for _ in range((cancelled + len(found)) % 5):
                await asyncio.sleep(0)
            if len(found) % 3 == 0:
                await asyncio.sleep(0.0005)
            task.cancel()
            try:
                found += (await task).outputs
            except asyncio.CancelledError:
                cancelled += 1
        assert [output.new_token_ids for output in found] == [[1]] * count
        assert cancelled > 20

    count = 300
    with async_client(script=Script(step_seconds=0.001)) as client:
        run(main())


def test_a_get_that_is_cancelled_while_it_decodes_gives_the_batch_back() -> None:
    """A batch with large values, which a thread decodes meanwhile, is there for the next call."""

    async def main() -> None:
        await client.call_utility_async("set_echo_tensor", True)
        for size in (8, 2 << 20):
            await client.add_request_async(make_request("a", 1, prompt_embeds=bytes(size)))
            await asyncio.to_thread(eventually, lambda: session_of(client).outputs.queue.qsize() > 0, DEADLOCK)
            for turns in range(4):
                task = asyncio.create_task(client.get_output_async())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    break
            outputs = await client.get_output_async() if task.cancelled() else task.result()
            assert outputs.outputs[0].pooling_output == bytes(size)
            assert outputs.outputs[0].finished

    with async_client() as client:
        run(main())


def test_a_cancelled_add_has_sent_nothing() -> None:
    """Cancelled while it waits for room, a request is in neither process, and its id is free."""

    async def main() -> None:
        with frozen(pid(client)):
            await client.add_request_async(make_request("big", LONG, prompt_embeds=bytes(4 << 20)))
            waiting = [asyncio.create_task(client.add_request_async(make_request(name, 2))) for name in ("a", "b")]
            done, _ = await asyncio.wait(waiting, timeout=0.1)
            assert not done
            waiting[0].cancel()
            await asyncio.wait(waiting[:1])
            assert waiting[0].cancelled()
            assert len(session_of(client).in_flight) == 1
        await waiting[1]
        await client.abort_requests_async(["big"])
        await client.add_request_async(make_request("a", 3))
        found = await collect(client, 2)
        assert {name: len(outputs) for name, outputs in found.items() if name != "big"} == {"a": 3, "b": 2}
        assert await running(client) == []
        assert len(session_of(client).room) == 0

    with async_client(high_water=1 << 20, arena_limit=0) as client:
        run(main())


def test_a_cancelled_call_leaves_nothing_and_poisons_nothing() -> None:
    """Its late answer is dropped, later calls get their own, and no entry stays in the table."""

    async def main() -> None:
        for turns in range(6):
            task = asyncio.create_task(client.call_utility_async("echo", "cancelled"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.result() == "cancelled"
        late = asyncio.create_task(client.call_utility_async("wait", 0.1))
        await asyncio.sleep(0.01)
        late.cancel()
        assert await asyncio.gather(*(client.call_utility_async("echo", n) for n in range(20))) == list(range(20))
        assert client.utility_results == {}

    with async_client() as client:
        run(main())


def test_a_cancelled_call_that_waits_for_room_sends_nothing() -> None:
    """It leaves no entry in the table and nobody among those who wait."""

    async def main() -> None:
        with frozen(pid(client)):
            await client.add_request_async(make_request("big", 1, prompt_embeds=bytes(4 << 20)))
            with pytest.raises(TimeoutError, match=r"reads nothing.*0\.05 s"):
                await client.call_utility_async("echo", 1, timeout=0.05)
            task = asyncio.create_task(client.call_utility_async("echo", 1))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            assert client.utility_results == {}
            assert len(session_of(client).room) == 0
        assert await client.call_utility_async("echo", 2) == 2

    with async_client(high_water=1 << 20, arena_limit=0) as client:
        run(main())


def test_a_second_run_goes_on_with_the_client() -> None:
    """What was asked for in a loop that is closed is aborted in the engine; the next loop sees nothing of it."""

    async def first() -> None:
        await client.add_request_async(make_request("a", LONG))
        await client.get_output_async()

    async def second() -> None:
        await client.add_request_async(make_request("b", 4))
        found = await collect(client, 1)
        assert {name: len(outputs) for name, outputs in found.items()} == {"b": 4}
        assert await running(client) == []
        await client.add_request_async(make_request("a", 2))
        assert len((await collect(client, 1))["a"]) == 2

    with async_client(script=Script(step_seconds=0.001)) as client:
        for _ in range(2):
            run(first())
            run(second())
        run(first())
        eventually(lambda: len(session_of(client).in_flight) == 0, DEADLOCK)  # by the batches that come, if by nothing


def test_a_client_made_inside_of_a_loop_outlives_it() -> None:
    """Made, used and shut down in three loops; after ``shutdown`` every call says that it is closed."""

    async def make() -> Any:
        made = async_client()
        assert await made.call_utility_async("echo", 1) == 1
        return made

    async def use() -> None:
        assert await client.call_utility_async("echo", 2) == 2

    async def end() -> None:
        await asyncio.to_thread(client.shutdown)
        for call in (client.get_output_async, lambda: client.call_utility_async("echo", 1)):
            with pytest.raises(EngineDeadError, match="closed"):
                await call()
        with pytest.raises(EngineDeadError, match="closed"):
            await client.add_request_async(make_request("a"))
        await client.abort_requests_async(["a"])

    client = asyncio.run(make())
    try:
        run(use())
        run(end())
    finally:
        client.shutdown()


def test_loops_in_several_threads_use_one_client_at_once() -> None:
    """Each gets its own streams and answers whole; what ``get_output_async`` returns goes to one of them, once."""

    async def work(number: int) -> list[str]:
        found: list[str] = []
        for index in range(10):
            assert await client.call_utility_async("echo", (number, index)) == (number, index)
            await client.add_request_async(make_request(f"{number}-{index}", 3))
            outputs = [output async for output in client.stream(make_request(f"stream {number}-{index}", 5))]
            assert [output.request_id for output in outputs] == [f"stream {number}-{index}"] * 5
            assert outputs[-1].finished
        quiet = False
        while not quiet:
            try:
                found += [o.request_id for o in (await client.get_output_async(timeout=0.3)).outputs]
            except TimeoutError:
                quiet = True
        return found

    results: list[list[str]] = []
    with async_client() as client:
        threads = [threading.Thread(target=lambda n=n: results.append(run(work(n)))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLOCK)
    assert len(results) == 4
    found = sorted(name for names in results for name in names)
    assert found == sorted(f"{n}-{i}" for n in range(4) for i in range(10) for _ in range(3))


def test_outputs_that_are_always_ready_starve_nobody() -> None:
    """While one coroutine takes thousands of batches that are there, another one goes on every few milliseconds."""

    async def main() -> None:
        taken = 0
        beats: list[tuple[float, int]] = []
        over = asyncio.Event()

        async def beat() -> None:
            while not over.is_set():
                beats.append((time.monotonic(), taken))
                await asyncio.sleep(0)

        await client.add_request_async(make_request("a", count))
        await asyncio.to_thread(eventually, lambda: session_of(client).outputs.queue.qsize() >= count, DEADLOCK)
        beating = asyncio.create_task(beat())
        await asyncio.sleep(0)
        while taken < count:
            taken += len((await client.get_output_async()).outputs)
        over.set()
        await beating
        beats.append((time.monotonic(), taken))
        pauses = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in itertools.pairwise(beats)]
        # Where other programs hold this one up, time passes in which nothing is taken either.
        assert not [pause for pause in pauses if pause[0] > 50 * MS and pause[1] > count // 4]
        assert len(beats) > 5

    count = 20_000
    with async_client() as client:
        run(main())


async def _delays(action: Callable[[], Awaitable[Any]]) -> float:
    """Return by how many seconds a beat of 10 ms was late at most, while and shortly after something was awaited."""
    late: list[float] = []
    over = asyncio.Event()

    async def beat() -> None:
        while not over.is_set():
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            late.append(time.monotonic() - due)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0.03)
    await action()
    await asyncio.sleep(0.03)
    over.set()
    await beating
    return max(late)


def _compute() -> None:
    """Do what any thread may do for a while."""
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass


async def _is_held_up(action: Callable[[], Awaitable[Any]]) -> bool:
    """Tell whether something holds the loop up for 50 ms each time, beyond what other threads and programs do."""
    for _ in range(5):
        usual = await _delays(lambda: asyncio.to_thread(_compute))
        if await _delays(action) < usual + 50 * MS:
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_array, make_bytes])
def test_a_huge_result_holds_up_no_other_task(make: Any) -> None:
    """While 256 MiB arrive, as an array or as bytes, a beat of 10 ms is not late by 50."""

    async def get() -> None:
        [value] = await client.collective_rpc_async(make, args=(256 << 20,))
        assert len(value) == 256 << 20
        assert value[-1] == 7

    async def main() -> None:
        await client.collective_rpc_async(make, args=(1,))  # imports what it needs
        assert not await _is_held_up(get)

    with async_client() as client:
        run(main())


@pytest.mark.slow
def test_a_huge_output_holds_up_no_other_task() -> None:
    """The same of 256 MiB in the output of a request, whether or not that is a stream."""

    async def get() -> None:
        await client.add_request_async(make_request("a", 1))
        (output,) = (await client.get_output_async()).outputs
        assert len(output.pooling_output) == 256 << 20

    async def iterate() -> None:
        async for output in client.stream(make_request("s", 1)):
            assert len(output.pooling_output) == 256 << 20

    async def main() -> None:
        await client.collective_rpc_async(give_bytes, args=(256 << 20,))
        for action in (get, iterate):
            assert not await _is_held_up(action)

    with async_client() as client:
        run(main())


def test_those_who_wait_in_any_loop_hear_of_a_death() -> None:
    """Outputs, calls and those who wait for room end with EngineDeadError, and so does every later call."""

    async def wait() -> list[Any]:
        waiting = [client.get_output_async(), client.get_output_async(), client.call_utility_async("deferred")]
        tasks = [asyncio.ensure_future(coroutine) for coroutine in waiting]
        await asyncio.sleep(0.05)
        started.append(None)
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def after() -> None:
        for call in (
            client.get_output_async,
            lambda: client.call_utility_async("echo", 1),
            lambda: client.add_request_async(make_request("a")),
        ):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await call()
        await client.abort_requests_async(["a"])

    started: list[None] = []
    results: list[Any] = []
    with async_client() as client:
        threads = [threading.Thread(target=lambda: results.extend(run(wait()))) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(started) == 3, DEADLOCK)
        with pytest.raises(EngineDeadError):
            run(client.call_utility_async("die", "sigkill"))
        with took_at_most(5.0):
            for thread in threads:
                thread.join(DEADLOCK)
        assert len(results) == 9
        assert all(isinstance(error, EngineDeadError) for error in results)
        assert len(set(map(id, results))) == 9
        run(after())
        assert not client.is_alive


def test_a_sender_that_waits_for_room_hears_of_a_death() -> None:
    """An engine that is killed while it reads nothing ends the wait."""

    async def main() -> None:
        with frozen(pid(client)):
            await client.add_request_async(make_request("big", 1, prompt_embeds=bytes(4 << 20)))
            task = asyncio.create_task(client.add_request_async(make_request("a")))
            await asyncio.sleep(0.05)
            (link,) = session_of(client).links.values()
            link.handle.kill()
            with pytest.raises(EngineDeadError):
                await task

    with async_client(high_water=1 << 20, arena_limit=0) as client:
        run(main())


def test_an_engine_that_takes_nothing_any_more_tells_how_it_died() -> None:
    """Requests and calls that meet the broken pipe itself report the death as everybody does."""

    async def main() -> None:
        (link,) = session_of(client).links.values()
        link.handle.kill()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            while True:
                await client.add_request_async(make_request("a"))
                await client.abort_requests_async(["a"])
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await client.call_utility_async("echo", 1)
        assert client.utility_results == {}

    with async_client() as client:
        run(main())


def test_a_dropped_client_ends_its_engine() -> None:
    """Neither a loop that was closed nor coroutines that have ended keep a client alive."""

    async def use(client: Any) -> None:
        await client.add_request_async(make_request("a", LONG))
        await client.get_output_async()
        await client.call_utility_async("echo", 1)

    client = async_client()
    run(use(client))
    (link,) = session_of(client).links.values()
    handle = link.handle
    del client, link
    gc.collect()
    eventually(lambda: not handle.is_alive(), DEADLOCK)


@pytest.mark.parametrize("what", ["request", "call"])
def test_a_large_send_leaves_the_loop_to_others_and_can_be_cancelled(what: str) -> None:
    """While 128 MiB are copied other tasks run; cancelled meanwhile, the request is aborted and the call given up."""
    big = np.ones(128 << 20, np.uint8)

    async def main() -> None:
        with async_client() as client:
            if what == "request":
                sending = asyncio.ensure_future(
                    client.add_request_async(make_request("big", LONG, None, prompt_embeds=big))
                )
            else:
                sending = asyncio.ensure_future(client.call_utility_async("echo", big))
            turns = 0
            while not sending.done() and turns < 3:
                await asyncio.sleep(0)
                turns += 1
            assert turns == 3
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            session = session_of(client)
            while (  # noqa: ASYNC110  # there is no event for it
                (await client.call_utility_async("info"))["requests"] or len(session.in_flight) or len(session.calls)
            ):
                await asyncio.sleep(0.01)

    run(main())
