"""The number of ranks changes, or fails to, while requests are served: none of them notices (BC-51)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from engine_client import EngineConfig, EngineDeadError, HandshakeTimeout, StartupError
from engine_client.testing.inventory import descendants
from engine_client.testing.scripted import Script
from helpers.calls import async_client
from helpers.clients import make_request, pids_of, session_of
from helpers.procs import is_gone
from helpers.scenes import record_logs
from helpers.timing import DEADLOCK, eventually, took_at_most

pytestmark = pytest.mark.crash

LONG = 1_000_000


@pytest.fixture
def sign(tmp_path: Path) -> Path:
    """Return the file that tells new ranks what is to become of them."""
    return tmp_path / "sign"


@pytest.fixture
def client(sign: Path) -> Iterator[Any]:
    """Yield a client of two ranks."""
    config = EngineConfig(additional_config={"sign": str(sign)})
    target = "helpers.doomed:build_by_sign"
    with async_client(2, Script(step_seconds=0.002), config=config, engine_target=target, ready_timeout=20.0) as made:
        yield made


class Load:
    """Requests that follow one another; ``chosen`` tells which ranks had them."""

    def __init__(self, client: Any, workers: int = 12) -> None:
        self.client = client
        self.workers = workers
        self.ended = 0
        self.chosen: set[int] = set()
        self.over = False

    async def work(self, number: int) -> None:
        turn = 0
        while not self.over:
            turn += 1
            name, tokens = f"{number}-{turn}", 0
            async for output in self.client.stream(make_request(name, 4)):
                assert output.request_id == name
                tokens += len(output.new_token_ids)
                self.chosen.update(session_of(self.client).in_flight.keys_of([name]).values())
            assert tokens == 4, (name, tokens)
            self.ended += 1

    async def some(self, count: int = 40) -> set[int]:
        """Wait until so many more requests have ended; return the ranks that had requests meanwhile."""
        self.chosen = set()
        goal = self.ended + count
        await asyncio.to_thread(eventually, lambda: self.ended >= goal, DEADLOCK)
        return self.chosen


@asynccontextmanager
async def load(client: Any) -> Any:
    """Keep a client busy inside of the block; no request may fail."""
    made = Load(client)
    tasks = [asyncio.ensure_future(made.work(number)) for number in range(made.workers)]
    try:
        yield made
    finally:
        made.over = True
        await asyncio.wait_for(asyncio.gather(*tasks), DEADLOCK)


def check_size(client: Any, size: int) -> None:
    """Check that there are so many ranks, and that all have a process and no more have one."""
    assert sorted(session_of(client).links) == list(range(size))
    assert client.vllm_config.parallel_config.data_parallel_size == size
    assert len(client.engine_status()) == size
    eventually(lambda: {key.pid for key in descendants()} == set(pids_of(client)))


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=[pytest.mark.stress, pytest.mark.slow])])
def test_bc51_up_and_down_again_and_again(client: Any, rounds: int, caplog: pytest.LogCaptureFixture) -> None:
    """Two to four ranks and back under load: none fails, who left is gone and no death, who joined gets its share."""
    logged = record_logs(caplog)

    async def main() -> None:
        async with load(client) as busy:
            for _ in range(rounds):
                await client.scale_elastic_ep(4)
                check_size(client, 4)
                assert await busy.some(100) == {0, 1, 2, 3}
                assert await client.call_utility_async("echo", 1, ranks=range(4)) == [1] * 4
                leaving = pids_of(client)[2:]
                await client.scale_elastic_ep(2)
                assert all(is_gone(pid) for pid in leaving)
                check_size(client, 2)
                assert await busy.some() == {0, 1}

    asyncio.run(main())
    assert logged() == []
    assert len(session_of(client).in_flight) == 0


def test_bc51_a_growth_that_fails_is_as_if_it_had_not_been(client: Any, sign: Path) -> None:
    """A new rank raises, dies, or is never ready: the call says why, the old ranks serve on, and the next one works."""

    def foretell(what: str) -> None:
        sign.write_text(what)
        object.__setattr__(client.options, "ready_timeout", 1.0 if what == "hang" else 20.0)

    async def main() -> None:
        async with load(client) as busy:
            for what, error, text in (
                ("raise", StartupError, "unique marker"),
                ("die", StartupError, "core 3.*exit code 3"),
                ("hang", HandshakeTimeout, "rank 3|core 3"),
            ):
                foretell(what)
                with took_at_most(4.0), pytest.raises(error, match=text) as caught:
                    await client.scale_elastic_ep(4)
                assert "engine core 0" not in str(caught.value)
                check_size(client, 2)
                assert await busy.some() == {0, 1}
            foretell("")
            await client.scale_elastic_ep(3)
            check_size(client, 3)
            assert await busy.some(100) == {0, 1, 2}

    asyncio.run(main())


def test_bc51_a_second_call_is_refused_and_a_cancelled_one_leaves_no_mess(client: Any, sign: Path) -> None:
    """While ranks join, another change is refused at once; who waited may give up, and the next change works.

    A growth whose caller is cancelled is not undone: it goes on to its end without a caller, and serves from then on.
    Until that end it is a change under way, and refuses others.
    """

    sign.write_text("slow")

    async def main() -> None:
        async with load(client) as busy:
            first = asyncio.ensure_future(client.scale_elastic_ep(4))
            await asyncio.sleep(0.1)
            with took_at_most(0.5), pytest.raises(RuntimeError, match="already"):
                await client.scale_elastic_ep(3)
            first.cancel()
            with suppress(asyncio.CancelledError):
                await first
            assert await busy.some() <= {0, 1, 2, 3}
            began = time.monotonic()
            while True:  # what was begun goes on
                try:
                    await client.scale_elastic_ep(3)
                    break
                except RuntimeError:
                    assert time.monotonic() - began < DEADLOCK
                    await asyncio.sleep(0.01)
            check_size(client, 3)
            assert await busy.some(100) == {0, 1, 2}

    asyncio.run(main())


def test_bc51_shut_down_in_the_middle(client: Any, sign: Path) -> None:
    """A client that is shut down while ranks join ends within its bound, with them; the change ends with an error."""

    sign.write_text("slow")

    async def main() -> None:
        growth = asyncio.ensure_future(client.scale_elastic_ep(4))
        await asyncio.to_thread(eventually, lambda: len(descendants()) == 4)
        with took_at_most(2.0):
            await asyncio.to_thread(client.shutdown, 1.0)
        with took_at_most(2.0), pytest.raises(EngineDeadError):
            await growth
        assert not descendants()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["request", "stream"])
def test_bc51_a_rank_that_closes_right_after_it_was_chosen(
    client: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that was to go to a rank which leaves in that moment goes to another one, and comes to its end."""
    session = session_of(client)
    choose = session.choose

    def choose_and_close(request: Any) -> Any:
        link = choose(request)
        if not session.router.closed:
            session.router.closed.add(link.rank)
        return link

    async def main() -> None:
        request = make_request("a", 3)
        if kind == "stream":
            assert len([output async for output in client.stream(request)]) == 3
        else:
            await client.add_request_async(request)
            (rank,) = session.in_flight.keys_of(["a"]).values()
            assert rank not in session.router.closed
            while not (await client.get_output_async(timeout=DEADLOCK)).outputs[-1].finished:
                pass

    monkeypatch.setattr(session, "choose", choose_and_close)
    asyncio.run(main())
    assert len(session.router.closed) == 1
    assert len(session.in_flight) == len(session.streams) == 0


def test_bc51_a_rank_that_leaves_ends_what_it_has(client: Any) -> None:
    """Its requests come to their end, also when nobody takes their outputs meanwhile, and no new ones go there."""

    async def main() -> None:
        for name in ("a", "b"):
            await client.add_request_async(make_request(name, 100, data_parallel_rank=1))
        await client.scale_elastic_ep(1)
        check_size(client, 1)
        with pytest.raises(ValueError, match=r"data_parallel_rank 1 is not one of the ranks \[0\]"):
            await client.add_request_async(make_request("c", 1, data_parallel_rank=1))
        for number in range(10):
            await client.add_request_async(make_request(f"new{number}", 1))
        tokens: dict[str, int] = {}
        ended = 0
        while ended < 12:
            for output in (await client.get_output_async(timeout=5.0)).outputs:
                tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.new_token_ids)
                ended += output.finished
        assert tokens == {"a": 100, "b": 100, **{f"new{number}": 1 for number in range(10)}}

    asyncio.run(asyncio.wait_for(main(), 15.0))
    assert len(session_of(client).in_flight) == 0
