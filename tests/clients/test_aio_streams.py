"""Streams of single requests for coroutines: in order to the end, and aborted wherever they are left before it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine_client import EngineDeadError, FinishReason
from engine_client.testing.scripted import Script
from helpers.calls import async_client
from helpers.clients import make_request, session_of
from helpers.timing import DEADLOCK, eventually

LONG = 1_000_000
"""Tokens that no test waits for."""

SLOW = Script(step_seconds=0.001)


def run(coroutine: Awaitable[Any]) -> Any:
    """Run a coroutine in a loop of its own; what hangs fails."""

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, DEADLOCK)

    return asyncio.run(bounded())


async def running(client: Any) -> list[str]:
    """Return the requests that the engine has."""
    requests: list[str] = (await client.call_utility_async("info"))["requests"]
    return requests


def is_forgotten(client: Any) -> bool:
    """Tell whether the client has no request in flight, and no stream."""
    session = session_of(client)
    return (len(session.in_flight), len(session.streams), len(session.aborts.noted)) == (0, 0, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_streams_end_with_their_finish_reason_and_keep_apart(ranks: int) -> None:
    """Many at once get their own outputs in order, and ``get_output_async`` those of the other requests."""

    async def read(number: int) -> None:
        stream = client.stream(make_request(f"s{number}", number + 1))
        assert stream.finish_reason is None
        outputs = [output async for output in stream]
        assert [output.request_id for output in outputs] == [f"s{number}"] * (number + 1)
        assert [output.finished for output in outputs] == [False] * number + [True]
        assert stream.finish_reason is FinishReason.LENGTH
        assert "LENGTH" in repr(stream)
        with pytest.raises(StopAsyncIteration):
            await stream.next()
        await stream.aclose()

    async def main() -> None:
        for number in range(5):
            await client.add_request_async(make_request(f"r{number}", 20))
        await asyncio.gather(*map(read, range(20)))
        counts: dict[str, int] = {}
        while sum(counts.values()) < 100:
            for output in (await client.get_output_async()).outputs:
                counts[output.request_id] = counts.get(output.request_id, 0) + 1
        assert counts == {f"r{number}": 20 for number in range(5)}
        assert is_forgotten(client)

    with async_client(ranks) as client:
        run(main())


async def close(stream: Any) -> None:
    await stream.aclose()
    await stream.aclose()
    assert "closed" in repr(stream)
    with pytest.raises(StopAsyncIteration):
        await stream.next()


async def leave(stream: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with stream:
            raise ZeroDivisionError


async def cancel(stream: Any) -> None:
    async def go_on() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(go_on())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    with pytest.raises(StopAsyncIteration):
        await stream.next()


async def time_out(stream: Any) -> None:
    async def go_on() -> None:
        async for _ in stream:
            pass

    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(go_on(), 0.01)


@pytest.mark.parametrize("end", [close, leave, cancel, time_out])
def test_a_stream_that_is_left_early_aborts_its_request_alone(end: Callable[[Any], Awaitable[None]]) -> None:
    """Closed, left by an exception, cancelled or out of time: the engine stops, others go on, and the id is free."""

    async def main() -> None:
        await client.add_request_async(make_request("other", LONG))
        stream = client.stream(make_request("a", LONG))
        for _ in range(3):
            assert (await stream.next()).new_token_ids == [1]
        await end(stream)
        assert await running(client) == ["other"]
        for _ in range(3):
            assert [o.request_id for o in (await client.get_output_async()).outputs] == ["other"]
        assert len([output async for output in client.stream(make_request("a", 2))]) == 2
        await client.abort_requests_async(["other"])
        assert is_forgotten(client)

    with async_client(script=SLOW) as client:
        run(main())


def test_a_dropped_stream_aborts_its_request() -> None:
    """Whoever forgets a stream, or leaves its loop by ``break``, need not close it."""

    async def main() -> None:
        async for output in client.stream(make_request("a", LONG)):
            assert output.request_id == "a"
            break
        gc.collect()
        assert await running(client) == []
        assert is_forgotten(client)

    with async_client(script=SLOW) as client:
        run(main())


def test_nothing_is_sent_before_the_iteration_begins() -> None:
    """A stream is checked when it is made; closed or dropped before anybody asked for an output, it was never sent."""

    async def main() -> None:
        with pytest.raises(ValueError, match="empty"):
            client.stream(make_request("a", prompt=()))
        with pytest.raises(TypeError):
            client.stream(make_request(7))  # type: ignore[arg-type]
        unused = client.stream(make_request("a", LONG))
        await unused.aclose()
        with pytest.raises(StopAsyncIteration):
            await unused.next()
        unused = client.stream(make_request("a", LONG))
        del unused
        gc.collect()
        assert await running(client) == []
        assert is_forgotten(client)

    with async_client(script=SLOW) as client:
        run(main())


def test_a_stream_whose_request_cannot_be_sent_is_over() -> None:
    """An id that is in use raises from the first step of the iteration, and disturbs the one who has it in nothing."""

    async def main() -> None:
        first = client.stream(make_request("a", 5))
        await first.next()
        second = client.stream(make_request("a", 5))
        with pytest.raises(ValueError, match="already running"):
            await second.next()
        with pytest.raises(StopAsyncIteration):
            await second.next()
        assert len([output async for output in first]) == 4
        assert is_forgotten(client)

    with async_client() as client:
        run(main())


def test_a_step_that_times_out_can_be_repeated() -> None:
    """``next`` with a timeout raises TimeoutError, and loses nothing."""

    async def main() -> None:
        stream = client.stream(make_request("a", 3))
        found, late = 0, 0
        while stream.finish_reason is None:
            try:
                await stream.next(timeout=0.01)
                found += 1
            except TimeoutError:
                late += 1
        assert found == 3
        assert late > 0

    with async_client(script=Script(step_seconds=0.05)) as client:
        run(main())


def test_a_large_output_arrives_whole() -> None:
    """What a thread decodes is the same, and a stream that is cancelled meanwhile aborts its request."""

    async def main() -> None:
        await client.call_utility_async("set_echo_tensor", True)
        payload = bytes(range(256)) * 8192
        outputs = [o async for o in client.stream(make_request("a", 3, prompt_embeds=payload))]
        assert [o.pooling_output for o in outputs] == [payload] * 3
        stream = client.stream(make_request("b", LONG, prompt_embeds=payload))
        await stream.next()
        for turns in range(4):
            task = asyncio.create_task(stream.next())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                break
        await stream.aclose()
        assert await running(client) == []
        assert is_forgotten(client)

    with async_client(script=SLOW) as client:
        run(main())


def test_a_stream_ends_with_its_engine() -> None:
    """All that was sent comes first, then EngineDeadError, and then the stream is over; so is one that begins late."""

    async def main() -> None:
        stream, late = client.stream(make_request("a", LONG)), client.stream(make_request("b", 3))
        await stream.next()
        with pytest.raises(EngineDeadError):
            await client.call_utility_async("die", "sigkill")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for output in stream:
                assert output.new_token_ids == [1]
        with pytest.raises(StopAsyncIteration):
            await stream.next()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await late.next()
        with pytest.raises(EngineDeadError):
            client.stream(make_request("c"))
        assert len(session_of(client).streams) == 0

    with async_client(script=SLOW) as client:
        run(main())


@pytest.mark.parametrize("end", ["close", "abort", "read to the end"])
def test_those_who_wait_in_a_stream_that_is_over_are_let_go(end: str) -> None:
    """Closed, aborted or read to its end by another task, a stream ends for all who iterate over it."""

    async def main() -> None:
        stream = client.stream(make_request("a", 20 if end == "read to the end" else LONG))
        await stream.next()

        async def count() -> int:
            return len([output async for output in stream])

        tasks = [asyncio.create_task(count()) for _ in range(3)]
        if end == "close":
            await asyncio.sleep(0.05)
            await stream.aclose()
        elif end == "abort":
            await asyncio.sleep(0.05)
            await client.abort_requests_async(["a"])
        counts = await asyncio.gather(*tasks)
        assert end != "read to the end" or sum(counts) == 19
        assert await running(client) == []

    with async_client(script=Script(step_seconds=0.02)) as client:
        run(main())


def test_a_stream_whose_loop_is_closed_is_aborted() -> None:
    """Left waiting by a loop that ended without a word, it is aborted in the engine by the next batch."""

    async def begin() -> Any:
        stream = client.stream(make_request("a", LONG))
        await stream.next()
        kept.append(stream)

    async def look() -> None:
        assert await running(client) == []

    kept: list[Any] = []
    with async_client(script=SLOW) as client:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()
        eventually(lambda: is_forgotten(client), DEADLOCK)
        run(look())
        assert len(kept) == 1


def test_a_waiting_stream_whose_loop_is_closed_is_aborted() -> None:
    """It listens for news when its loop is closed under it; whoever brings the next news finds that out."""

    async def begin() -> None:
        stream = client.stream(make_request("a", LONG))
        await stream.next()
        kept.append(asyncio.ensure_future(forever(stream)))
        await asyncio.sleep(0)

    async def forever(stream: Any) -> None:
        async for _ in stream:
            pass

    kept: list[Any] = []
    with async_client(script=SLOW) as client:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # it is told of the task below
        loop.run_until_complete(begin())
        loop.close()
        eventually(lambda: is_forgotten(client), DEADLOCK)
        kept[0]._log_destroy_pending = False  # noqa: SLF001  # as it is meant; nothing else says so
        kept.clear()
        gc.collect()
