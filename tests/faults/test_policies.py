"""What the death of one rank means for the others: ``ClientOptions.on_engine_death``."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine_client import EngineConfig, EngineDeadError, FinishReason, StartupError
from engine_client.config import ModelConfig
from engine_client.testing.inventory import descendants
from engine_client.testing.scripted import Script
from helpers.calls import async_client
from helpers.clients import make_request, pids_of, scripted_client, session_of
from helpers.timing import DEADLOCK, eventually, took_at_most

pytestmark = pytest.mark.crash

LONG = 1_000_000
"""Tokens that no test waits for."""

SLOW = Script(step_seconds=0.001)


def run(coroutine: Awaitable[Any]) -> Any:
    """Run a coroutine in a loop of its own; what hangs fails."""

    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, DEADLOCK)

    return asyncio.run(bounded())


async def until(condition: Any) -> None:
    """Wait, without holding the loop up, until something is true."""
    await asyncio.to_thread(eventually, condition, DEADLOCK)


def kill(client: Any, rank: int) -> int:
    """Kill a rank; return its pid."""
    pid = pids_of(client)[rank]
    os.kill(pid, signal.SIGKILL)
    return pid


async def use_up(stream: Any) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


def conditions(client: Any) -> list[str]:
    """Return the condition of each rank."""
    return [status.condition for status in client.engine_status()]


def restarts() -> list[threading.Thread]:
    """Return the threads that start something again."""
    return [thread for thread in threading.enumerate() if "restart" in thread.name]


def moody(sign: Path, mood: str = "", ranks: int = 2, **options: Any) -> Any:
    """Return a client whose last of four ranks starts as the file says, from the next start on."""
    config = EngineConfig(additional_config={"sign": str(sign)})
    made = async_client(ranks, SLOW, config=config, engine_target="helpers.doomed:build_by_sign", **options)
    if mood:
        sign.write_text(mood)
    return made


@pytest.mark.parametrize("policy", ["continue", "restart"])
def test_the_death_of_one_rank_of_four_fails_only_its_own_requests(policy: str) -> None:
    """Under load: its requests end with reason ERROR and the death's text, its streams and calls with the error."""

    async def main() -> None:
        names = {rank: [f"r{rank}-{n}" for n in range(8)] for rank in range(4)}
        for rank, mine in names.items():
            for name in mine:
                await client.add_request_async(make_request(name, LONG if rank == 2 else 400, data_parallel_rank=rank))
        stream = client.stream(make_request("s", LONG, data_parallel_rank=2))
        await stream.next()
        pending = asyncio.create_task(client.call_utility_async("deferred", ranks=[2]))
        await until(lambda: client.utility_results)
        pid = kill(client, 2)
        reasons: dict[str, Any] = {}
        while len(reasons) < 32:
            for output in (await client.get_output_async()).outputs:
                if output.finished:
                    assert output.request_id not in reasons
                    reasons[output.request_id] = output.finish_reason
                    if output.finish_reason is FinishReason.ERROR:
                        assert f"EngineDeadError: engine core 2 (pid {pid})" in str(output.stop_reason)
        failed = {name for name, reason in reasons.items() if reason is FinishReason.ERROR}
        assert failed == set(names[2])
        assert {reasons[name] for rank in (0, 1, 3) for name in names[rank]} == {FinishReason.LENGTH}
        for broken in (pending, use_up(stream)):
            with pytest.raises(EngineDeadError, match=f"engine core 2 \\(pid {pid}\\)") as caught:
                await broken
            assert (caught.value.rank, caught.value.pid, caught.value.exit_name) == (2, pid, "SIGKILL(-9)")
        assert client.utility_results == {}
        assert client.is_alive

    with async_client(4, SLOW, on_engine_death=policy) as client:
        run(main())


def test_a_dead_rank_is_asked_for_in_vain_and_the_others_go_on() -> None:
    """Whoever names it gets its death; whoever does not is served; the last one's death ends the client."""

    async def main() -> None:
        pid = kill(client, 0)
        await until(lambda: conditions(client) == ["dead", "ready", "ready"])
        for call in (
            lambda: client.add_request_async(make_request("x", data_parallel_rank=0)),
            lambda: client.stream(make_request("x", data_parallel_rank=0)).next(),
            lambda: client.call_utility_async("echo", 1, ranks=[0]),
        ):
            with pytest.raises(EngineDeadError, match=f"engine core 0 \\(pid {pid}\\) died"):
                await call()
        assert await client.call_utility_async("echo", 1) == 1
        client.check_health()
        for n in range(10):
            await client.add_request_async(make_request(f"r{n}", LONG))
        assert len(session_of(client).in_flight) == 10
        kill(client, 1)
        await until(lambda: conditions(client) == ["dead", "dead", "ready"])
        assert client.is_alive
        kill(client, 2)
        with pytest.raises(EngineDeadError, match="engine core 2"):
            while True:
                await client.get_output_async()
        assert not client.is_alive
        with pytest.raises(EngineDeadError, match="engine core 2"):
            await client.add_request_async(make_request("x"))

    with async_client(3, SLOW, on_engine_death="continue") as client:
        run(main())


def test_a_single_rank_that_is_started_again() -> None:
    """While it is down everything raises EngineDeadError; then the same client works, requests and calls alike."""
    with scripted_client(SLOW, on_engine_death="restart", restart_delay=0.3) as client:
        pid = pids_of(client)[0]
        client.add_request(make_request("a", LONG))
        client.get_output()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: conditions(client) == ["dead"], DEADLOCK)
        for call in (lambda: client.call_utility("echo", 1), lambda: client.add_request(make_request("b"))):
            with pytest.raises(EngineDeadError, match=f"engine core 0 \\(pid {pid}\\) died"):
                call()
        outputs: list[Any] = []
        while not (outputs and outputs[-1].finished):
            outputs += client.get_output(timeout=DEADLOCK).outputs
        assert outputs[-1].finish_reason is FinishReason.ERROR
        eventually(lambda: conditions(client) == ["ready"], DEADLOCK)
        assert pids_of(client)[0] != pid
        client.add_request(make_request("a", 3))
        tokens = 0
        while tokens < 3:
            tokens += sum(len(output.new_token_ids) for output in client.get_output(timeout=DEADLOCK).outputs)
        assert client.call_utility("echo", 1) == 1


def test_a_rank_that_dies_again_and_again_stays_dead(caplog: pytest.LogCaptureFixture) -> None:
    """At the limit it is left alone; the client goes on with the other one, and ends if there is none."""
    with async_client(2, on_engine_death="restart", restart_delay=0.0, restart_limit=2) as client:
        seen = set()
        for _ in range(3):
            eventually(lambda: conditions(client) == ["ready", "ready"], DEADLOCK)
            eventually(lambda: not restarts(), DEADLOCK)
            seen.add(kill(client, 1))
            eventually(lambda: conditions(client)[1] != "ready", DEADLOCK)
        eventually(lambda: "engine core 1 has died 3 times in a row and is not started again" in caplog.text, DEADLOCK)
        assert conditions(client) == ["ready", "dead"]
        assert len(seen) == 3
        assert client.is_alive
    with scripted_client(on_engine_death="restart", restart_delay=0.0, restart_limit=1) as client:
        first = kill(client, 0)
        eventually(lambda: pids_of(client) != [first] and conditions(client) == ["ready"], DEADLOCK)
        pid = kill(client, 0)
        with pytest.raises(EngineDeadError, match=f"pid {pid}"):
            client.get_output(timeout=DEADLOCK)
        assert not client.is_alive


def test_a_rank_that_does_not_start_again_stays_dead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each try that fails counts; what is told of the rank is how it died, and it is still listed."""
    with moody(tmp_path / "sign", "raise", 4, on_engine_death="restart", restart_delay=0.0, restart_limit=2) as client:
        pid = kill(client, 3)
        eventually(lambda: "engine core 3 has died 3 times in a row and is not started again" in caplog.text, DEADLOCK)
        assert conditions(client) == ["ready"] * 3 + ["dead"]
        assert caplog.text.count("could not be started again: StartupError") == 2
        with pytest.raises(EngineDeadError, match=f"engine core 3 \\(pid {pid}\\) died"):
            run(client.call_utility_async("echo", 1, ranks=[3]))
        (tmp_path / "sign").unlink()
        run(client.scale_elastic_ep(4))  # somebody has repaired it
        assert run(client.call_utility_async("echo", 1, ranks=range(4))) == [1] * 4


def test_shutdown_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    """Neither for its back-off nor for a start that hangs; nothing is left."""
    with async_client(2, on_engine_death="restart", restart_delay=60.0) as client:
        kill(client, 1)
        eventually(restarts, DEADLOCK)
        with took_at_most(2.0):
            client.shutdown()
        eventually(lambda: not restarts(), 2.0)
    with moody(tmp_path / "sign", "hang", 4, on_engine_death="restart", restart_delay=0.0) as client:
        kill(client, 3)
        eventually(lambda: conditions(client)[3] == "starting", DEADLOCK)
        with took_at_most(2.0):
            client.shutdown()
        assert not descendants()
        eventually(lambda: not restarts(), 2.0)


@pytest.mark.parametrize("when", ["in its back-off", "while it starts"])
def test_a_client_that_is_dropped_during_a_restart_leaves_nothing(when: str, tmp_path: Path) -> None:
    """It is collected at once, and the thread, the processes and the descriptors go with it."""
    delay = 60.0 if when == "in its back-off" else 0.0
    client = moody(tmp_path / "sign", "hang", 4, on_engine_death="restart", restart_delay=delay)
    pid = kill(client, 3)
    eventually(lambda: restarts() if delay else len({key.pid for key in descendants()} - {pid}) == 4, DEADLOCK)
    reference = weakref.ref(client)
    del client
    gc.collect()
    assert reference() is None
    eventually(lambda: not restarts() and not descendants(), DEADLOCK)


@pytest.mark.parametrize(
    ("policy", "is_moe"), [("shutdown", False), ("shutdown", True), ("continue", True), ("restart", True)]
)
def test_who_ends_together(policy: str, is_moe: bool) -> None:
    """All ranks by default; ranks in lock-step whatever the option; the error names the one that died."""
    config = EngineConfig(model_config=ModelConfig(is_moe=is_moe))
    with async_client(2, SLOW, config=config, on_engine_death=policy) as client:
        others = [pids_of(client)[0]]
        pid = kill(client, 1)
        with pytest.raises(EngineDeadError, match=f"engine core 1 \\(pid {pid}\\) died"):
            run(client.get_output_async())
        assert not client.is_alive
        eventually(lambda: not {key.pid for key in descendants()} & set(others), DEADLOCK)
        assert conditions(client) == ["dead", "dead"]
        assert not restarts()


def test_repeated_restarts_leave_nothing() -> None:
    """Descriptors and threads are as many after the fourth restart as after the first."""

    def held() -> Any:
        session = session_of(client)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), repr(session.group).count(":")

    with async_client(2, on_engine_death="restart", restart_delay=0.0, restart_limit=9) as client:
        counts = []
        for _ in range(4):
            pid = kill(client, 1)
            eventually(lambda pid=pid: pids_of(client)[1] != pid, DEADLOCK)
            eventually(lambda: conditions(client) == ["ready", "ready"], DEADLOCK)
            eventually(lambda: not restarts(), DEADLOCK)
            gc.collect()
            counts.append(held())
        assert len(set(counts)) == 1, counts


def test_a_process_that_a_dead_rank_left_behind_does_not_disturb_its_successor() -> None:
    """It holds the dead rank's end of the channel, so that no end of the stream is seen; it is swept away."""
    with async_client(2, on_engine_death="restart", restart_delay=0.0) as client:
        run(client.call_utility_async("collective_rpc", fork_holder, ranks=[1]))
        pid = kill(client, 1)
        eventually(lambda: pids_of(client)[1] != pid and conditions(client) == ["ready", "ready"], DEADLOCK)
        assert run(client.call_utility_async("echo", 1, ranks=[0, 1])) == [1, 1]
        assert len(descendants()) == 2


def fork_holder(core: Any) -> int:
    """Leave, from an engine, a process that has a copy of all its descriptors."""
    del core
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def test_a_client_without_a_living_rank_is_shut_down_at_once() -> None:
    """There is nobody whose last words could be waited for."""
    with scripted_client(on_engine_death="restart", restart_delay=60.0) as client:
        kill(client, 0)
        eventually(lambda: conditions(client) == ["dead"], DEADLOCK)
        with took_at_most(1.0):
            client.shutdown()


class Chaos:
    """Requests, streams and calls of one client, whose ranks are killed and change their number all the while."""

    def __init__(self, client: Any, seed: int, seconds: float) -> None:
        self.client = client
        self.random = random.Random(seed)
        self.ends_at = time.monotonic() + seconds
        self.sent: set[str] = set()
        self.ended: Counter[str] = Counter()

    def goes_on(self) -> bool:
        return time.monotonic() < self.ends_at

    async def again(self, action: Any, pause: float) -> None:
        """Repeat something, which may meet a death."""
        number = 0
        while self.goes_on():
            number += 1
            try:
                await action(number)
            except (EngineDeadError, StartupError):
                await asyncio.sleep(0.002)
            await asyncio.sleep(self.random.random() * pause)

    async def send(self, number: int) -> None:
        for part in range(5):
            name = f"{number}-{part}"
            rank = 0 if self.random.random() < 0.2 else None
            await self.client.add_request_async(make_request(name, part + 1, data_parallel_rank=rank))
            self.sent.add(name)

    async def stream(self, number: int) -> None:
        tokens = 0
        async for output in self.client.stream(make_request(f"s{number}", 7)):
            tokens += len(output.new_token_ids)
        assert tokens == 7

    async def call(self, number: int) -> None:
        assert await self.client.call_utility_async("echo", number) == number

    async def scale(self, number: int) -> None:
        del number
        await self.client.scale_elastic_ep(self.random.randint(1, 4))

    async def kill(self, number: int) -> None:
        del number
        link = self.random.choice(list(session_of(self.client).links.values()))
        if link.rank or self.client.options.on_engine_death == "restart":  # else it may be the last one
            link.handle.kill()

    async def receive(self) -> None:
        while self.goes_on() or len(self.ended) < len(self.sent):
            with suppress(TimeoutError):
                for output in (await self.client.get_output_async(timeout=0.2)).outputs:
                    if output.finished:
                        self.ended[output.request_id] += 1

    async def run(self) -> None:
        work = ((self.send, 0.01), (self.stream, 0.0), (self.call, 0.0), (self.scale, 0.05), (self.kill, 0.6))
        await asyncio.gather(self.receive(), *(self.again(action, pause) for action, pause in work))


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["continue", "restart"])
def test_everything_is_accounted_for_while_ranks_die_come_and_go(policy: str, seed: int) -> None:
    """Each request ends once, whatever happened to its rank; nothing hangs, and nothing is left in any table."""
    options = {"on_engine_death": policy, "restart_delay": 0.0, "restart_limit": 999}
    with async_client(2, Script(step_seconds=0.0005), **options) as c:
        chaos = Chaos(c, seed, 4.0)
        run(chaos.run())
        assert c.is_alive
        assert set(chaos.ended) >= chaos.sent
        assert {name: count for name, count in chaos.ended.items() if name in chaos.sent and count != 1} == {}
        session = session_of(c)
        assert (len(session.in_flight), len(session.calls), len(session.streams)) == (0, 0, 0)
        with took_at_most(2.0):
            c.shutdown()
