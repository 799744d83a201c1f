"""Ranks in lock-step, paused and woken in every order: none is left alone in a step, none sleeps with work (BC-38)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_client import (
    ClientOptions,
    EngineConfig,
    EngineCoreClient,
    EngineDeadError,
    FinishReason,
)
from engine_client.testing.faults import frozen
from helpers.barrier import Collective
from helpers.clients import make_request, pids_of, session_of
from helpers.scenes import Waiter
from helpers.timing import DEADLOCK, eventually

pytestmark = pytest.mark.crash

LONG = 1_000_000


@pytest.fixture(params=[2, 4])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Yield a client of ranks whose every step is collective."""
    (tmp_path / "barrier").write_bytes(bytes(8 * request.param))
    config = EngineConfig(additional_config={"barrier": str(tmp_path / "barrier")})
    config.parallel_config.data_parallel_size = request.param
    config.model_config.is_moe = True
    options = ClientOptions(on_engine_death="continue")  # which ranks in lock-step never do
    made: Any = EngineCoreClient.make_client(True, True, config, Collective, False, options=options)
    with made:
        yield made


def ranks_of(client: Any) -> range:
    return range(len(session_of(client).links))


async def ask(client: Any, method: str) -> list[Any]:
    """Return the answers of all ranks."""
    return list(await client.call_utility_async(method, ranks=ranks_of(client)))


async def facts(client: Any) -> list[Any]:
    """Return the facts of all ranks' executors."""
    found = await client.call_utility_async("collective_rpc", "facts", None, (), None, ranks=ranks_of(client))
    return [one for (one,) in found]


async def check_agreed(client: Any, *, paused: bool) -> None:
    """Check that the group is at rest, and that all ranks agree on the wave and on the pause."""
    page = session_of(client).lock_step.page
    await asyncio.to_thread(eventually, lambda: not page.is_running(), DEADLOCK)
    assert len({page.wave(rank) for rank in ranks_of(client)}) == 1
    assert await ask(client, "is_scheduler_paused") == [paused] * len(ranks_of(client))
    assert len({met for met, _, _ in await facts(client)}) == 1


class Schedule:
    """A random sequence of what users do; keeps what came of each request."""

    def __init__(self, client: Any, seed: int) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.tokens: Counter[str] = Counter()
        self.ended: dict[str, FinishReason] = {}
        self.wanted: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.paused = False

    async def read(self) -> None:
        while True:
            for output in (await self.client.get_output_async()).outputs:
                name = output.request_id
                assert name not in self.ended, name
                self.tokens[name] += len(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ended[name] = output.finish_reason

    async def add(self) -> None:
        name = f"r{len(self.wanted)}"
        self.wanted[name] = self.rng.randint(1, 6)
        rank = self.rng.choice([None, None, *ranks_of(self.client)])
        request = make_request(name, self.wanted[name], data_parallel_rank=rank, current_wave=self.rng.randint(0, 3))
        await self.client.add_request_async(request)

    async def abort(self) -> None:
        left = [name for name in self.wanted if name not in self.ended]
        names = self.rng.sample(left, min(2, len(left)))
        self.aborted.update(names)
        await self.client.abort_requests_async(names)

    async def pause(self) -> None:
        await self.client.pause_scheduler_async(self.rng.choice(["keep", "wait", "abort"]), False)
        self.paused = True
        assert await ask(self.client, "is_scheduler_paused") == [True] * len(ranks_of(self.client))

    async def resume(self) -> None:
        await self.client.resume_scheduler_async()
        self.paused = False

    async def collective(self) -> None:
        assert len(await facts(self.client)) == len(ranks_of(self.client))

    async def run(self, count: int) -> None:
        """Do so many things, then resume and let all requests come to their end."""
        reader = asyncio.ensure_future(self.read())
        doings = [self.add] * 6 + [self.abort, self.pause, self.resume, self.resume, self.collective]
        for _ in range(count):
            await asyncio.wait_for(self.rng.choice(doings)(), DEADLOCK)
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.random() * 0.004)
        await self.resume()
        left = lambda: set(self.wanted) - set(self.ended) - self.aborted  # noqa: E731  # for eventually to name
        await asyncio.to_thread(eventually, lambda: not left() or reader.done(), DEADLOCK)
        assert not reader.done(), reader.exception()
        reader.cancel()
        for name, reason in self.ended.items():
            assert reason in (FinishReason.LENGTH, FinishReason.ABORT)
            assert reason is FinishReason.ABORT or self.tokens[name] == self.wanted[name]


@contextmanager
def slowed(pids: list[int], seed: int) -> Iterator[None]:
    """Stop one of these processes after the other for up to 50 ms, as long as the block takes."""
    over, rng = threading.Event(), random.Random(seed)

    def disturb() -> None:
        while not over.wait(rng.random() * 0.03):
            with frozen(rng.choice(pids)):
                time.sleep(rng.random() * 0.05)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=[pytest.mark.stress, pytest.mark.slow])])
@pytest.mark.parametrize("slow", [False, True])
def test_bc38_any_order_of_requests_pauses_and_calls(client: Any, slow: bool, count: int) -> None:
    """No rank waits alone in a step; in the end all agree on wave and pause, and each request has ended once."""
    schedule = Schedule(client, seed=count + slow)

    async def main() -> None:
        await schedule.run(count)
        await check_agreed(client, paused=False)
        assert min(met for met, _, _ in await facts(client)) > count / 10

    if slow:
        with slowed(pids_of(client), count):
            asyncio.run(main())
    else:
        asyncio.run(main())
    assert len(session_of(client).in_flight) == 0


def test_bc38_no_wake_while_paused(client: Any) -> None:
    """Requests that come during a pause, with whatever wave number, start nothing on any rank; resumed, all finish."""

    async def main() -> None:
        for _ in range(5):
            await client.pause_scheduler_async("keep", False)
            await check_agreed(client, paused=True)
            before = await facts(client)
            for rank in ranks_of(client):
                await client.add_request_async(make_request(f"r{rank}", 3, data_parallel_rank=rank, current_wave=rank))
            await asyncio.sleep(0.03)
            assert [fact[:2] for fact in await facts(client)] == [fact[:2] for fact in before]
            assert not client.dp_engines_running()
            await client.resume_scheduler_async()
            ended: set[str] = set()
            while len(ended) < len(ranks_of(client)):
                outputs = await client.get_output_async(timeout=DEADLOCK)
                ended |= {output.request_id for output in outputs.outputs if output.finished}
            await check_agreed(client, paused=False)

    asyncio.run(main())


def test_bc38_one_request_wakes_every_rank_and_all_fall_asleep(client: Any) -> None:
    """A request to one rank of an idle group, with a stale wave, has all ranks step, the same number of times."""

    async def main() -> None:
        for turn in range(20):
            rank = turn % len(ranks_of(client))
            await client.add_request_async(make_request("a", 3, data_parallel_rank=rank, current_wave=0))
            while not any(output.finished for output in (await client.get_output_async(timeout=DEADLOCK)).outputs):
                pass
            await check_agreed(client, paused=False)

    asyncio.run(main())


@pytest.mark.parametrize("busy", [False, True])
def test_bc38_the_death_of_one_rank_ends_the_group(client: Any, busy: bool) -> None:
    """Whatever the policy, all end with the cause within 2 s, also those that wait for the dead one in a step."""
    *others, dead = pids_of(client)

    async def main() -> None:
        if busy:
            for rank in ranks_of(client):
                await client.add_request_async(make_request(f"r{rank}", LONG, data_parallel_rank=rank))
            await client.get_output_async(timeout=DEADLOCK)
        os.kill(dead, signal.SIGKILL)
        while True:
            await client.get_output_async(timeout=DEADLOCK)

    waiter = Waiter(lambda: asyncio.run(main()), again=False)
    error = waiter.end(time.monotonic(), 2.0)
    assert type(error) is EngineDeadError
    assert f"engine core {len(others)} (pid {dead})" in str(error)
    assert "SIGKILL" in str(error)
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in others), 2.0)
