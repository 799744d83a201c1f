"""Several ranks behind one client: requests are balanced or sent where they ask to go, calls go to all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from engine_client import EngineConfig, EngineDeadError, FinishReason
from engine_client.clients.data_parallel import DPAsyncMPClient, DPLBAsyncMPClient
from engine_client.config import ModelConfig, ParallelConfig
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


def fail_on(core: Any, *ranks: int) -> int:
    """Raise in the engines of these ranks; return the rank of the others."""
    if core.rank in ranks:
        raise KeyError(f"rank {core.rank}")
    rank: int = core.rank
    return rank


async def placed(client: Any) -> list[list[str]]:
    """Return the requests that each rank has."""
    return [info["requests"] for info in await client.call_utility_async("info", ranks=client.engine_ranks_managed)]


async def collect(client: Any, count: int) -> dict[str, list[Any]]:
    """Read until so many requests have ended; return each one's outputs in order."""
    found: dict[str, list[Any]] = {}
    ended = 0
    while ended < count:
        for output in (await client.get_output_async()).outputs:
            found.setdefault(output.request_id, []).append(output)
            ended += output.finished
    return found


def test_all_ranks_are_served_by_one_client() -> None:
    """Each rank is a process; what they answer comes together, each request's outputs in order, each from one rank."""

    async def main() -> None:
        pids = [info["pid"] for info in await client.call_utility_async("info", ranks=range(3))]
        assert len(set(pids)) == 3
        for number in range(60):
            await client.add_request_async(make_request(f"r{number}", 1 + number % 7))
        found = await collect(client, 60)
        assert {name: len(outputs) for name, outputs in found.items()} == {f"r{n}": 1 + n % 7 for n in range(60)}
        assert all(steps > 0 for steps in [i["steps"] for i in await client.call_utility_async("info", ranks=range(3))])
        assert await placed(client) == [[], [], []]

    with async_client(3) as client:
        assert type(client) is DPLBAsyncMPClient
        assert client.core_engines == [b"\0\0", b"\1\0", b"\2\0"]
        assert [status.state.name for status in client.engine_status()] == ["READY"] * 3
        client.check_health()
        run(main())


def test_a_burst_is_spread_evenly() -> None:
    """400 requests at once over four ranks: none has two more than another, whatever the ranks have seen of them."""

    async def main() -> None:
        await asyncio.gather(*(client.add_request_async(make_request(f"r{n}", LONG)) for n in range(400)))
        counts = [len(requests) for requests in await placed(client)]
        assert sum(counts) == 400
        assert max(counts) - min(counts) <= 2
        await client.abort_requests_async([f"r{n}" for n in range(400)])
        assert await placed(client) == [[], [], [], []]

    with async_client(4, SLOW) as client:
        run(main())


def test_a_request_goes_to_the_rank_that_it_asks_for() -> None:
    """``data_parallel_rank`` decides; a rank that there is not is a ValueError, and nothing is sent."""

    async def main() -> None:
        for name, rank in (("a", 1), ("b", 1), ("c", 2)):
            await client.add_request_async(make_request(name, LONG, data_parallel_rank=rank))
        stream = client.stream(make_request("s", LONG, data_parallel_rank=2))
        await stream.next()
        expected = [[], ["a", "b"], ["c", "s"]]
        assert await placed(client) == expected
        for rank, error in ((3, ValueError), (-1, ValueError), ("1", TypeError), (1.0, TypeError)):
            with pytest.raises(error, match="data_parallel_rank"):
                await client.add_request_async(make_request("wrong", data_parallel_rank=rank))
        wrong = client.stream(make_request("wrong", data_parallel_rank=7))
        with pytest.raises(ValueError, match=r"data_parallel_rank 7 is not one of the ranks \[0, 1, 2\]"):
            await wrong.next()
        assert await placed(client) == expected
        assert len(session_of(client).in_flight) == 4
        await client.abort_requests_async(["a", "c", "nobody"])
        await stream.aclose()
        assert await placed(client) == [[], ["b"], []]
        assert client.get_core_engine_for_request(make_request("x", data_parallel_rank=2)) == b"\2\0"
        with pytest.raises(ValueError, match="data_parallel_rank 3"):
            client.get_core_engine_for_request(make_request("x", data_parallel_rank=3))

    with async_client(3, SLOW) as client:
        run(main())


def test_a_call_is_answered_by_all_ranks() -> None:
    """The first one's value is returned, or with ``ranks`` a list of those named, in the order of the names."""

    async def main() -> None:
        assert await client.collective_rpc_async(fail_on) == [0]
        values = await client.call_utility_async("collective_rpc", fail_on, ranks=[2, 0])
        assert values == [[2], [0]]
        assert await client.call_utility_async("echo", 1, ranks=[]) == []
        with pytest.raises(ValueError, match=r"4 is not one of the ranks"):
            await client.call_utility_async("echo", 1, ranks=[0, 4])
        await client.pause_scheduler_async()
        assert await client.call_utility_async("is_scheduler_paused", ranks=range(3)) == [True] * 3
        await client.resume_scheduler_async()
        assert await client.call_utility_async("is_scheduler_paused", ranks=range(3)) == [False] * 3
        assert client.utility_results == {}

    with async_client(3) as client:
        run(main())


def test_a_rank_that_fails_is_an_error_that_names_it() -> None:
    """The call raises what the first failed rank raised, whose rank and note tell who failed; the others serve on."""

    async def main() -> None:
        for failing in ([1], [1, 2]):
            with pytest.raises(KeyError, match="rank 1") as caught:
                await client.collective_rpc_async(fail_on, args=tuple(failing))
            assert caught.value.rank == 1  # type: ignore[attr-defined]
            (note,) = caught.value.__notes__
            assert [f"engine core {rank} (pid " in note for rank in range(3)] == [rank in failing for rank in range(3)]
            assert "of 3 engines" in note
        with pytest.raises(KeyError, match="rank 0"):
            await client.call_utility_async("collective_rpc", fail_on, None, (0,), ranks=[0, 1])
        assert await client.call_utility_async("echo", 5, ranks=range(3)) == [5, 5, 5]
        with pytest.raises(TimeoutError, match=r"by the ranks \[0, 1, 2\]"):
            await client.call_utility_async("deferred", timeout=0.05)
        assert client.utility_results == {}

    with async_client(3) as client:
        run(main())


def test_cancelled_calls_and_requests_leave_nothing_on_any_rank() -> None:
    """However far a call to all has got, later calls get their own answers, and the table is empty."""

    async def main() -> None:
        for turns in range(8):
            task = asyncio.create_task(client.call_utility_async("wait", 0.01))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert await client.call_utility_async("echo", 1, ranks=range(3)) == [1, 1, 1]
        assert client.utility_results == {}

    with async_client(3) as client:
        run(main())


def test_the_death_of_a_rank_ends_the_client_by_default() -> None:
    """As the reference does: everybody gets EngineDeadError, which names the rank, and the other ranks are ended."""

    async def main() -> None:
        await client.add_request_async(make_request("a", LONG))
        with pytest.raises(EngineDeadError, match=r"engine core 1 .*SIGKILL") as caught:
            await client.call_utility_async("die", "sigkill", ranks=[1])
        assert caught.value.rank == 1
        with pytest.raises(EngineDeadError, match="engine core 1"):
            while True:
                await client.get_output_async()
        assert not client.is_alive

    with async_client(2, SLOW) as client:
        run(main())
        for link in session_of(client).links.values():
            eventually(lambda handle=link.handle: not handle.is_alive(), DEADLOCK)  # type: ignore[misc]


def test_ranks_that_go_on_after_a_death_keep_their_requests() -> None:
    """Only the dead one's requests fail, streams by EngineDeadError, others by their text; new ones go elsewhere."""

    async def main() -> None:
        for rank in (0, 1):
            await client.add_request_async(make_request(f"r{rank}", LONG, data_parallel_rank=rank))
        streams = [client.stream(make_request(f"s{rank}", LONG, data_parallel_rank=rank)) for rank in (0, 1)]
        for stream in streams:
            await stream.next()
        with pytest.raises(EngineDeadError, match="engine core 1"):
            await client.call_utility_async("die", "sigkill", ranks=[1])
        with pytest.raises(EngineDeadError, match="engine core 1"):
            async for _ in streams[1]:
                pass
        ended = None
        while ended is None:
            ended = next((o for o in (await client.get_output_async()).outputs if o.finished), None)
        assert (ended.request_id, ended.finish_reason) == ("r1", FinishReason.ERROR)
        assert str(ended.stop_reason).startswith("EngineDeadError: engine core 1")
        assert (await streams[0].next()).request_id == "s0"
        for name in ("r1", "s1", "new"):
            await client.add_request_async(make_request(name, LONG))
        with pytest.raises(EngineDeadError, match="engine core 1"):
            await client.add_request_async(make_request("x", data_parallel_rank=1))
        info = await client.call_utility_async("info")
        assert sorted(info["requests"]) == ["new", "r0", "r1", "s0", "s1"]
        await client.abort_requests_async(["r0", "r1", "s1", "new"])
        await streams[0].aclose()
        assert (await client.call_utility_async("info"))["requests"] == []
        assert client.is_alive

    with async_client(2, SLOW, on_engine_death="continue") as client:
        run(main())


def test_a_client_for_a_balancer_outside_has_one_rank() -> None:
    """It starts its own rank only, which keeps its number, and refuses requests for others."""

    async def main() -> None:
        assert await client.collective_rpc_async(fail_on) == [1]
        request = make_request("a", 3)
        assert client.get_core_engine_for_request(request) == b"\1\0"
        await client.add_request_async(request)
        await client.add_request_async(make_request("b", 2, data_parallel_rank=1))
        assert {name: len(outputs) for name, outputs in (await collect(client, 2)).items()} == {"a": 3, "b": 2}
        with pytest.raises(ValueError, match=r"data_parallel_rank 0 is not one of the ranks \[1\]"):
            await client.add_request_async(make_request("c", data_parallel_rank=0))

    parallel = ParallelConfig(data_parallel_external_lb=True, data_parallel_rank=1)
    with async_client(3, config=EngineConfig(parallel_config=parallel)) as client:
        assert type(client) is DPAsyncMPClient
        assert client.engine_ranks_managed == [1]
        run(main())


def test_ranks_in_lock_step_step_together() -> None:
    """While one rank has a request the others run dummy steps, and a wave is seen to run; then all are idle."""

    async def main() -> None:
        assert not client.dp_engines_running()
        await client.add_request_async(make_request("a", 50, data_parallel_rank=1))
        await client.get_output_async()
        assert client.dp_engines_running()
        outputs = await collect(client, 1)
        assert len(outputs["a"]) == 49
        infos = await client.call_utility_async("info", ranks=[0, 1])
        assert infos[0]["dummy_steps"] > 0
        while client.dp_engines_running():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)

    with async_client(2, SLOW, config=EngineConfig(model_config=ModelConfig(is_moe=True))) as client:
        run(main())


def test_what_the_reference_calls_back_does_nothing() -> None:
    """Code that hands outputs and notifications to the client's own functions may go on to do so."""

    async def main() -> None:
        await client.process_engine_outputs(client, await outputs())
        await client.eep_process_engine_core_notification(client, ("RECONFIGURE_FINISHED", 0))
        assert client.is_alive

    async def outputs() -> Any:
        await client.add_request_async(make_request("a", 1))
        return await client.get_output_async()

    with async_client(2) as client:
        run(main())
