"""Requests spread over data-parallel ranks as they should, whatever is known of the ranks (BC-18)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from engine_client.testing.faults import frozen
from engine_client.testing.scripted import Script
from helpers.calls import async_client
from helpers.clients import make_request, pids_of, session_of
from helpers.guests import guest_client, launched
from helpers.timing import DEADLOCK, eventually

RANKS = 4
LONG = 1_000_000


@pytest.fixture
def client() -> Iterator[Any]:
    """Yield a client of four ranks that are equal and take a while for each step."""
    with async_client(RANKS, Script(step_seconds=0.002)) as made:
        yield made


@contextmanager
def never(client: Any) -> Iterator[None]:
    """Have the ranks tell nothing, for the length of the block: they are stopped."""
    with ExitStack() as stack:
        for pid in pids_of(client):
            stack.enter_context(frozen(pid))
        yield


@contextmanager
def stale(client: Any, seconds: float) -> Iterator[None]:
    """Have the client see, for the length of the block, what the ranks told up to so many seconds ago."""
    with pytest.MonkeyPatch.context() as patch:
        for link in session_of(client).links.values():
            patch.setattr(link.status, "counts", Late(link.status.counts, seconds))
        yield


class Late:
    """Returns a value that is asked for only now and then."""

    def __init__(self, ask: Callable[[], Any], seconds: float) -> None:
        self.ask = ask
        self.seconds = seconds
        self.value, self.at = ask(), time.monotonic()

    def __call__(self) -> Any:
        if time.monotonic() - self.at >= self.seconds:
            self.value, self.at = self.ask(), time.monotonic()
        return self.value


class Burst:
    """Requests that are sent at once; ``chosen`` counts them by rank."""

    def __init__(self, client: Any, size: int, tokens: int) -> None:
        self.client = client
        self.names = [f"r{n}" for n in range(size)]
        self.tokens = tokens
        self.chosen: Counter[int] = Counter()

    async def send(self) -> None:
        for name in self.names:  # no await in between that yields: nothing of them is read meanwhile
            await self.client.add_request_async(make_request(name, self.tokens))
        # Those that have ended are in the table, too, until their ends are taken.
        self.chosen = Counter(dict.fromkeys(range(RANKS), 0))
        self.chosen.update(session_of(self.client).in_flight.keys_of(self.names).values())
        assert sum(self.chosen.values()) == len(self.names)

    async def end(self) -> None:
        """Abort every second request, and read the others to their end if they have one."""
        await self.client.abort_requests_async(self.names[::2])
        left = set(self.names[1::2])
        if self.tokens == LONG:
            await self.client.abort_requests_async(list(left))
            left.clear()
        while left:
            outputs = await self.client.get_output_async(timeout=DEADLOCK)
            left -= {output.request_id for output in outputs.outputs if output.finished}

    @property
    def difference(self) -> int:
        """Return how many requests more the most loaded rank got than the least loaded one."""
        return max(self.chosen.values()) - min(self.chosen.values())


def check_empty(client: Any) -> None:
    """Check that neither the client nor a page counts a request any more."""
    session = session_of(client)
    assert len(session.in_flight) == 0
    assert [session.in_flight.count(rank) for rank in range(RANKS)] == [0] * RANKS
    eventually(lambda: all(status.running == status.waiting == 0 for status in client.engine_status()))


@pytest.mark.parametrize("size", [8, 64, 400, 1000])
def test_bc18_a_burst_is_spread_evenly_whatever_the_pages_say(client: Any, size: int) -> None:
    """Four ranks that tell nothing differ by at most 1; ranks that tell, now or long ago, by at most 2 or 5 percent."""
    burst = Burst(
        client, size, LONG
    )  # none ends while others are sent: a busy machine may run one rank more than another
    with never(client):
        asyncio.run(burst.send())
        assert burst.difference <= 1, burst.chosen
        session_of(client).abort(burst.names)
    for seconds in (0.0, 0.1, 1.0):
        with stale(client, seconds):
            asyncio.run(both(burst))
        assert burst.difference <= (2 if size == 400 else max(2, size / 20)), (seconds, burst.chosen)
    check_empty(client)


@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_bc18_a_burst_is_even_though_its_first_requests_end_before_its_last_are_sent(client: Any, tokens: int) -> None:
    """400 at once differ by at most 2, also where ranks that a busy machine runs first have nothing left to do."""

    async def main() -> Counter[int]:
        served: Counter[int] = Counter()
        requests = [make_request(f"r{n}", tokens) for n in range(400)]
        await asyncio.gather(*map(client.add_request_async, requests))
        while sum(served.values()) < len(requests):
            outputs = await client.get_output_async(timeout=DEADLOCK)
            served[outputs.engine_index] += sum(output.finished for output in outputs.outputs)
        return served

    for step_seconds in (0.0, 0.002):
        asyncio.run(client.call_utility_async("set_script", {"step_seconds": step_seconds}))
        for _ in range(3):
            served = asyncio.run(main())
            assert max(served.values()) - min(served[rank] for rank in range(RANKS)) <= 2, served
    check_empty(client)


async def both(burst: Burst) -> None:
    await burst.send()
    await burst.end()


def test_bc18_twenty_bursts_do_not_drift(client: Any) -> None:
    """Burst after burst, half of each aborted, no rank gets more than its share; in the end all counts are zero."""

    async def main() -> Counter[int]:
        total: Counter[int] = Counter()
        for _ in range(20):
            burst = Burst(client, 30, 20)
            await both(burst)
            assert burst.difference <= 2, burst.chosen
            total += burst.chosen
        return total

    with stale(client, 0.1):
        total = asyncio.run(main())
    assert max(total.values()) - min(total.values()) <= 4, total
    check_empty(client)


def test_bc18_a_slow_rank_gets_clearly_fewer(client: Any) -> None:
    """Under a steady load, a rank that takes ten times as long for a step gets less than half of what others get."""
    chosen: Counter[int] = Counter()
    slow = 2

    async def work(number: int) -> None:
        for turn in range(12):
            request = make_request(f"{number}-{turn}", 5)
            async for output in client.stream(request):
                if output.finished:
                    break
                keys = session_of(client).in_flight.keys_of([request.request_id])
                rank = next(iter(keys.values()), None)
            chosen[rank] += 1  # type: ignore[index]

    async def main() -> None:
        await client.call_utility_async("set_script", {"step_seconds": 0.02}, ranks=[slow])
        await asyncio.gather(*(work(number) for number in range(32)))

    asyncio.run(main())
    assert chosen[slow] < min(chosen[rank] for rank in range(RANKS) if rank != slow) / 2, chosen
    assert chosen[slow] > 0
    check_empty(client)


def test_bc18_counts_return_to_zero_however_requests_end(client: Any) -> None:
    """Finished, aborted, refused, failed, of a rank of its own, dropped with its stream: no count keeps any of them."""

    async def main() -> None:
        for rank in range(RANKS):
            await client.add_request_async(make_request(f"own{rank}", 2, data_parallel_rank=rank))
            await client.add_request_async(make_request(f"long{rank}", LONG, data_parallel_rank=rank))
            with pytest.raises(ValueError, match="already running"):
                await client.add_request_async(make_request(f"long{rank}", 1, data_parallel_rank=(rank + 1) % RANKS))
            with pytest.raises(TypeError, match="lock"):
                await client.add_request_async(make_request("unsendable", 1, trace_headers={"x": threading.Lock()}))
            with pytest.raises(ValueError, match=r"data_parallel_rank 9 is not one of the ranks \[0, 1, 2, 3\]"):
                await client.add_request_async(make_request("nowhere", 1, data_parallel_rank=9))
        ended: set[str] = set()
        while not ended >= {f"own{rank}" for rank in range(RANKS)}:
            outputs = await client.get_output_async(timeout=DEADLOCK)
            ended |= {output.request_id for output in outputs.outputs if output.finished}
        stream = client.stream(make_request("stream", LONG))
        await stream.next(timeout=DEADLOCK)
        del stream
        await client.abort_requests_async([f"long{rank}" for rank in range(RANKS)])

    asyncio.run(main())
    check_empty(client)


def test_bc18_long_requests_among_short_ones(client: Any) -> None:
    """A rank that is busy with requests that never end gets fewer of the short ones, and an even share of them all."""

    async def main() -> None:
        for n in range(20):
            await client.add_request_async(make_request(f"long{n}", LONG, data_parallel_rank=0))
        await asyncio.sleep(0.3)
        burst = Burst(client, 60, LONG)
        await burst.send()
        total = burst.chosen + Counter({0: 20})
        assert max(total.values()) - min(total.values()) <= 2, burst.chosen
        await client.abort_requests_async([*burst.names, *(f"long{n}" for n in range(20))])

    asyncio.run(main())
    check_empty(client)


def test_bc18_two_clients_share_the_ranks() -> None:
    """Bursts of two front-ends at once are even together; what one has put on a rank the other keeps away from."""

    def counts(*clients: Any) -> list[int]:
        return [sum(session_of(one).in_flight.count(rank) for one in clients) for rank in range(RANKS)]

    async def send(one: Any, names: list[str], **fields: Any) -> None:
        for name in names:
            await one.add_request_async(make_request(name, LONG, **fields))

    async def main(first: Any, second: Any) -> None:
        for turn in range(8):
            for one in (first, second):
                await send(one, [f"{turn}-{n}" for n in range(9)])
        assert max(counts(first, second)) - min(counts(first, second)) <= 7, counts(first, second)
        await send(first, [f"own{n}" for n in range(20)], data_parallel_rank=0)
        await asyncio.sleep(0.3)  # it looks at what others have five times a second
        before = counts(second)
        await send(second, [f"more{n}" for n in range(60)])
        assert counts(second)[0] <= before[0] + 2, (before, counts(second))
        assert max(counts(first, second)) - min(counts(first, second)) <= 11, counts(first, second)

    with launched(RANKS, 2, Script(step_seconds=0.002)) as engines, ExitStack() as stack:
        asyncio.run(main(*(stack.enter_context(guest_client(endpoint)) for endpoint in engines.endpoints)))
