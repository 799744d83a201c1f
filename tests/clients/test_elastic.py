"""The number of ranks changes while requests are served, and goes back where that cannot be done."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine_client import (
    ClientOptions,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineDeadError,
    FinishReason,
    StartupError,
)
from engine_client.clients.elastic import Elastic
from engine_client.clients.endings import Ending
from engine_client.config import ModelConfig
from engine_client.testing.inventory import descendants
from engine_client.testing.scripted import TARGET, Script
from helpers.calls import async_client, played_session
from helpers.clients import make_request, pids_of, session_of
from helpers.timing import DEADLOCK, eventually, took_at_most

LONG = 1_000_000
"""Tokens that no test waits for."""

SLOW = Script(step_seconds=0.001)


def run(coroutine: Awaitable[Any]) -> Any:
    """Run a coroutine in a loop of its own; what hangs fails."""

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, DEADLOCK)

    return asyncio.run(bounded())


def single(**options: Any) -> Any:
    """Return a client of one rank, which can have more."""
    config = EngineConfig(additional_config={"script": SLOW})
    return DPLBAsyncMPClient(config, None, False, options=ClientOptions(engine_target=TARGET, **options))  # type: ignore[arg-type]  # a scripted engine has no executor


def doomed(sign: Path, what: str, ranks: int = 2, **options: Any) -> Any:
    """Return a client whose next rank 3 raises, hangs or is slow at its start."""
    sign.write_text(what)
    config = EngineConfig(additional_config={"sign": str(sign)})
    return async_client(ranks, SLOW, config=config, engine_target="helpers.doomed:build_by_sign", **options)


async def until(condition: Any) -> None:
    """Wait, without holding the loop up, until something is true."""
    await asyncio.to_thread(eventually, condition, DEADLOCK)


async def end_of(client: Any, name: str) -> Any:
    """Return the last output of a request."""
    while True:
        for output in (await client.get_output_async()).outputs:
            if output.request_id == name and output.finished:
                return output


@pytest.mark.parametrize("is_moe", [False, True], ids=["independent", "lock-step"])
def test_no_request_is_lost_while_ranks_come_and_go(is_moe: bool) -> None:
    """One rank becomes four, two, three under load (two at first in lock-step): each request has all of its tokens."""
    sent: list[str] = []
    ended: Counter[str] = Counter()
    over = asyncio.Event()

    async def send() -> None:
        while not over.is_set():
            for _ in range(20):
                sent.append(f"r{len(sent)}")
                await client.add_request_async(make_request(sent[-1], 5))
            await asyncio.sleep(0.005)

    async def receive() -> None:
        while len(ended) < len(sent) or not over.is_set():
            with suppress(TimeoutError):
                for output in (await client.get_output_async(timeout=0.1)).outputs:
                    if output.finished:
                        assert output.finish_reason is FinishReason.LENGTH
                        ended[output.request_id] += 1

    async def main() -> None:
        tasks = [asyncio.create_task(send()), asyncio.create_task(receive())]
        blocks = client.vllm_config.cache_config.num_gpu_blocks // len(client.engine_ranks_managed)
        for size in (4, 2, 3):
            await client.scale_elastic_ep(size)
            before = len(sent)
            assert sorted(session_of(client).links) == client.engine_ranks_managed == list(range(size))
            assert client.vllm_config.cache_config.num_gpu_blocks == size * blocks
            assert client.vllm_config.parallel_config.data_parallel_size == size == len(client.core_engines)
            await until(lambda before=before: len(ended) > before + 50)
        over.set()
        await asyncio.gather(*tasks)
        infos = await client.call_utility_async("info", ranks=range(3))
        assert all(info["steps"] for info in infos)

    lock_step = EngineConfig(model_config=ModelConfig(is_moe=True))
    with async_client(2, SLOW, config=lock_step) if is_moe else single() as client:
        run(main())
        assert ended == Counter(sent)


def test_a_size_that_cannot_be_is_refused() -> None:
    """Wrong types and numbers are told, and nothing has changed; the same size changes nothing either."""

    async def main() -> None:
        for size, error in ((0, ValueError), (65, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)):
            with pytest.raises(error, match="new_data_parallel_size"):
                await client.scale_elastic_ep(size)
        await client.scale_elastic_ep(1)
        assert pids_of(client) == pids

    with single() as client:
        pids = pids_of(client)
        run(main())
        client.shutdown()
        with pytest.raises(EngineDeadError, match="closed"):
            run(client.scale_elastic_ep(2))


def test_a_rank_that_cannot_start_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """The error has the engine's own as its cause; the watchers of events learn how it ended."""

    async def main() -> None:
        with pytest.raises(StartupError, match="unique marker") as caught:
            await client.scale_elastic_ep(4)
        assert isinstance(caught.value.__cause__, ValueError)
        assert sorted(session_of(client).links) == client.engine_ranks_managed == [0, 1]
        assert {key.pid for key in descendants()} == set(pids_of(client))
        assert not session_of(client).router.closed
        with pytest.raises(ValueError, match="data_parallel_rank 3 is not one"):
            await client.add_request_async(make_request("a", data_parallel_rank=3))
        with client.engine_events() as events:
            assert [events.next(1).state for _ in range(2)] == ["ready", "ready"]

    with doomed(tmp_path / "sign", "raise") as client, client.engine_events() as watched:
        assert [watched.next(1).state for _ in range(2)] == ["ready", "ready"]
        run(main())
        seen = {rank: [e.state for e in all_of(watched) if e.rank == rank] for rank in (2,)}
        assert (seen[2][0], seen[2][-1]) == ("starting", "dead")


def all_of(events: Any) -> list[Any]:
    """Return the events that are there."""
    found = []
    while (event := events.poll()) is not None:
        found.append(event)
    return found


def test_shutdown_does_not_wait_for_a_rank_that_is_being_built(tmp_path: Path) -> None:
    """A new rank would take a minute: the client is shut down within its bound, with it, and the change ends."""

    async def main() -> None:
        growth = asyncio.create_task(client.scale_elastic_ep(4))
        await until(lambda: len(descendants()) == 4)
        with took_at_most(2.0):
            await asyncio.to_thread(client.shutdown)
        assert not descendants()
        with took_at_most(1.0), pytest.raises(EngineDeadError, match="closed"):
            await growth

    with doomed(tmp_path / "sign", "hang") as client:
        run(main())


def test_a_rank_that_is_being_built_ends_with_the_client(tmp_path: Path) -> None:
    """Another rank dies meanwhile, and the client with it: the new one is gone, and the change tells of that death."""

    async def main() -> None:
        growth = asyncio.create_task(client.scale_elastic_ep(4))
        await until(lambda: len(descendants()) == 4)
        os.kill(pids_of(client)[0], signal.SIGKILL)
        with took_at_most(3.0), pytest.raises(EngineDeadError, match=r"engine core 0 .*SIGKILL"):
            await growth
        await until(lambda: not descendants())

    with doomed(tmp_path / "sign", "hang") as client:
        run(main())


def test_a_rank_that_leaves_finishes_what_it_has() -> None:
    """It gets nothing new, its stream goes on, a second change is refused; shutdown does not wait for it."""

    async def main() -> None:
        stream = client.stream(make_request("a", LONG, data_parallel_rank=1))
        await stream.next()
        change = asyncio.create_task(client.scale_elastic_ep(1))
        await until(lambda: [s.condition for s in client.engine_status()] == ["ready", "leaving"])
        with pytest.raises(ValueError, match=r"data_parallel_rank 1 is not one of the ranks \[0\]"):
            await client.add_request_async(make_request("b", data_parallel_rank=1))
        with pytest.raises(RuntimeError, match="already"):
            await client.scale_elastic_ep(3)
        for n in range(20):
            await client.add_request_async(make_request(f"r{n}", LONG))
        assert (await stream.next()).request_id == "a"
        assert len((await client.call_utility_async("info", ranks=[0]))[0]["requests"]) == 20
        assert not change.done()
        with took_at_most(2.0):
            await asyncio.to_thread(client.shutdown, 1.0)
        with took_at_most(1.0), pytest.raises(EngineDeadError, match="closed"):
            await change

    with async_client(2, SLOW) as client:
        run(main())


@pytest.mark.crash
@pytest.mark.parametrize("policy", ["continue", "restart"])
def test_the_death_of_a_rank_that_leaves_ends_the_wait_for_it(policy: str) -> None:
    """Nobody takes outputs meanwhile: it is gone all the same, is not started again, and its request has failed."""

    async def main() -> None:
        await client.add_request_async(make_request("a", LONG, data_parallel_rank=1))
        change = asyncio.create_task(client.scale_elastic_ep(1))
        await until(lambda: client.engine_status()[1].condition == "leaving")
        os.kill(pids_of(client)[1], signal.SIGKILL)
        await change
        output = await end_of(client, "a")
        assert output.finish_reason is FinishReason.ERROR
        assert "engine core 1" in str(output.stop_reason)
        await until(lambda: not [t for t in threading.enumerate() if "restart" in t.name])
        assert sorted(session_of(client).links) == [0]
        await client.scale_elastic_ep(2)
        assert await client.call_utility_async("echo", 1, ranks=[0, 1]) == [1, 1]

    with async_client(2, SLOW, on_engine_death=policy, restart_delay=0.0) as client:
        run(main())


@pytest.mark.crash
def test_ranks_come_and_go_while_another_one_dies(tmp_path: Path) -> None:
    """Under "continue" the change goes on; one that asks for the dead rank's number has it started again."""

    async def main() -> None:
        growth = asyncio.create_task(client.scale_elastic_ep(4))
        await until(lambda: len(descendants()) == 4)
        os.kill(pids_of(client)[1], signal.SIGKILL)
        await growth
        await until(lambda: client.engine_status()[1].condition == "dead")
        with pytest.raises(EngineDeadError, match="engine core 1"):
            await client.call_utility_async("echo", 1, ranks=[1])
        blocks = client.vllm_config.cache_config.num_gpu_blocks
        await client.scale_elastic_ep(3)
        assert await client.call_utility_async("echo", 1, ranks=range(3)) == [1] * 3
        assert [status.condition for status in client.engine_status()] == ["ready"] * 3
        assert client.vllm_config.cache_config.num_gpu_blocks == blocks // 4 * 3

    with doomed(tmp_path / "sign", "slow", on_engine_death="continue") as client:
        run(main())


@pytest.mark.crash
def test_a_dead_rank_is_replaced_once_its_death_was_dealt_with() -> None:
    """Tables know an engine by its number: what is done for the dead one must not meet the new one."""

    async def main() -> None:
        session, going = session_of(client), threading.Event()
        reap = session.group.reap

        def reap_slowly(rank: int) -> bool:
            has_ended = reap(rank)
            going.wait(DEADLOCK)
            return has_ended

        session.group.reap = reap_slowly  # type: ignore[method-assign]
        os.kill(pids_of(client)[1], signal.SIGKILL)
        await until(lambda: 1 in session.deaths)
        change = asyncio.create_task(client.scale_elastic_ep(2))
        await asyncio.sleep(0.5)
        going.set()
        await change
        assert await client.call_utility_async("echo", 1, ranks=[0, 1]) == [1, 1]
        os.kill(pids_of(client)[1], signal.SIGKILL)
        await until(lambda: client.engine_status()[1].condition == "dead")

    with async_client(2, on_engine_death="continue") as client:
        run(main())


def test_whoever_starts_or_ends_a_rank_has_it_to_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies while a change waits for another rank's restart is left to its own."""
    with played_session(2, on_engine_death="continue") as (session, _):
        elastic = Elastic(session, None)  # type: ignore[arg-type]  # nothing is started
        begun: list[list[int]] = []
        monkeypatch.setattr(elastic, "_bring_up", lambda ranks: begun.append(ranks) or {})
        monkeypatch.setattr(elastic, "_take_part", lambda ranks: None)
        session.deaths[1] = Ending("it died")
        with elastic._claim([1]):  # noqa: SLF001  # as a restart does
            change = threading.Thread(target=elastic.scale, args=(3,))
            change.start()
            change.join(0.2)
            assert not begun
            session.deaths.clear()
            session.deaths[0] = Ending("it died, too")
        change.join(DEADLOCK)
        assert begun == [[2]]
        session.deaths.clear()


def test_calls_to_all_ranks_succeed_while_ranks_leave() -> None:
    """A call goes to those that stay, or is answered by one before it leaves."""

    async def ask(values: list[int]) -> None:
        while not over:
            values.append(await client.call_utility_async("echo", 1))
            assert values[-1] == 1

    async def main() -> None:
        answers: list[int] = []
        tasks = [asyncio.create_task(ask(answers)) for _ in range(4)]
        for size in (3, 1, 3, 1):
            await client.scale_elastic_ep(size)
        over.append(True)
        await asyncio.gather(*tasks)
        assert answers
        assert client.utility_results == {}

    over: list[bool] = []
    with single() as client:
        run(main())


def test_new_ranks_are_paused_as_the_others_are() -> None:
    """In a paused client nothing steps, wherever a request goes; resumed, all do."""

    async def main() -> None:
        await client.pause_scheduler_async(mode="keep")
        await until(lambda: client.engine_status()[0].is_paused)
        await client.scale_elastic_ep(2)
        assert await client.call_utility_async("is_scheduler_paused", ranks=[0, 1]) == [True, True]
        await client.add_request_async(make_request("a", 2, data_parallel_rank=1))
        await client.resume_scheduler_async()
        assert (await end_of(client, "a")).finish_reason is FinishReason.LENGTH

    with single() as client:
        run(main())


def test_ranks_that_join_a_client_which_is_resumed_meanwhile_are_resumed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were paused as the others, and were not yet among those whom the user resumed."""

    async def main() -> None:
        await client.pause_scheduler_async(mode="keep")
        await until(lambda: client.engine_status()[0].is_paused)
        elastic = client._elastic  # noqa: SLF001  # to come between two of its steps
        take_part = elastic._take_part  # noqa: SLF001  # as above

        def take_part_and_resume(ranks: list[int]) -> bool:
            was_paused: bool = take_part(ranks)
            asyncio.run_coroutine_threadsafe(client.resume_scheduler_async(), loop).result(DEADLOCK)
            return was_paused

        monkeypatch.setattr(elastic, "_take_part", take_part_and_resume)
        loop = asyncio.get_running_loop()
        await client.scale_elastic_ep(2)
        assert await client.call_utility_async("is_scheduler_paused", ranks=[0, 1]) == [False, False]

    with single() as client:
        run(main())


@pytest.mark.parametrize("is_moe", [False, True], ids=["independent", "lock-step"])
def test_ranks_that_leave_take_calls_until_they_are_done(is_moe: bool) -> None:
    """A paused client is scaled down: the change waits; resumed, the leaving ranks go on, and nothing is lost."""

    async def main() -> None:
        for rank in range(3):
            await client.add_request_async(make_request(f"r{rank}", 300, data_parallel_rank=rank))
        await client.get_output_async()
        await client.pause_scheduler_async(mode="keep")
        change = asyncio.create_task(client.scale_elastic_ep(1))
        await until(lambda: [s.condition for s in client.engine_status()][1:] == ["leaving"] * 2)
        assert await client.call_utility_async("echo", 1, ranks=[2, 0]) == [1, 1]
        await client.resume_scheduler_async()
        await end_of_all(client, ["r0", "r1", "r2"])
        await change
        assert sorted(session_of(client).links) == [0]
        assert not session_of(client).router.draining

    config = EngineConfig(model_config=ModelConfig(is_moe=is_moe))
    with async_client(3, SLOW, config=config) as client:
        run(main())


def test_large_buffers_reach_a_rank_that_joined_a_single_one() -> None:
    """The request memory has room for the readers to come."""

    async def main() -> None:
        await client.scale_elastic_ep(2)
        payload = bytes(range(256)) * 4096
        assert await client.call_utility_async("echo", payload, ranks=[1]) == [payload]

    with single() as client:
        run(main())


def test_a_cancelled_change_holds_up_neither_the_loop_nor_the_client() -> None:
    """The loop ends at once although the change goes on; dropped, the client is collected, and the change ends."""

    async def main(client: Any) -> None:
        await client.add_request_async(make_request("a", LONG, data_parallel_rank=1))
        change = asyncio.create_task(client.scale_elastic_ep(1))
        await until(lambda: client.engine_status()[1].condition == "leaving")
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await change

    client = async_client(2, SLOW)
    with took_at_most(5.0):
        run(main(client))
    assert [t for t in threading.enumerate() if "scale" in t.name]
    reference = weakref.ref(client)
    del client
    gc.collect()
    assert reference() is None
    eventually(lambda: not [t for t in threading.enumerate() if "scale" in t.name], DEADLOCK)
    assert not descendants()


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=[pytest.mark.stress, pytest.mark.slow])])
def test_repeated_changes_leave_nothing(rounds: int) -> None:
    """Descriptors, threads, processes and the entries of tables are as many after as before."""

    def held() -> Any:
        session = session_of(client)
        tables = (session.links, session.deaths, session.router.closed, session.leaving, session.calls)
        members = repr(session.group).count(":")
        of_process = (len(os.listdir("/proc/self/fd")), threading.active_count(), len(descendants()))
        return (*(len(table) for table in tables), members, *of_process)

    async def main() -> None:
        counts = []
        for _ in range(rounds):
            await client.scale_elastic_ep(3)
            names = [f"r{n}" for n in range(6)]
            for name in names:
                await client.add_request_async(make_request(name, 2))
            await end_of_all(client, names)
            await client.scale_elastic_ep(1)
            await until(lambda: not [t for t in threading.enumerate() if "scale" in t.name])  # it ends a moment later
            gc.collect()
            counts.append(held())
        assert len(set(counts[1:])) == 1, counts

    with single() as client:
        run(main())


async def end_of_all(client: Any, names: list[str]) -> None:
    """Read until all of these requests have ended."""
    waiting = set(names)
    while waiting:
        waiting -= {output.request_id for output in (await client.get_output_async()).outputs if output.finished}
