"""An engine lives and does not answer: health says so in time, and says it is not dead (BC-29)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from engine_client import EngineDeadError, EngineStalledError
from engine_client.testing.faults import frozen
from engine_client.testing.scripted import Script
from helpers.calls import async_client
from helpers.clients import collect, make_request, pid_of, pids_of, scripted_client, session_of
from helpers.hanging import deadlock, hang_deaf, hang_holding, sleep_in_c, take_signals
from helpers.scenes import Waiter, check_dead, colours
from helpers.timing import eventually, took_at_most

pytestmark = pytest.mark.crash

LIMIT = 0.3
BOUND = LIMIT + 0.5
STALL = 0.5


def last_rank(client: Any) -> int:
    """Return the rank that is to hang; beside it others may be well."""
    return list(session_of(client).links)[-1]


def check_hung(client: Any) -> None:
    """Check that health fails in time, names the engine that hangs and no other, and does not call it dead."""
    *well, hung = pids_of(client)
    with (
        took_at_most(BOUND),
        pytest.raises(EngineStalledError, match=r"not responding: no answer within 0\.3 s") as caught,
    ):
        client.check_health(LIMIT)
    assert not isinstance(caught.value, EngineDeadError)
    assert f"pid {hung}" in str(caught.value)
    assert not any(f"pid {pid}" in str(caught.value) for pid in well)
    assert client.is_alive
    assert client.utility_results == {}


@colours
def test_bc29_a_frozen_engine_does_not_respond_and_goes_on_later(colour: str) -> None:
    """Stopped, the engine is not responding; continued, it is well, and late answers reach nobody."""
    with scripted_client(colour=colour) as client:
        client.check_health(10)
        client.add_request(make_request("a", 5))
        assert len(collect(client, 1)["a"]) == 5
        with frozen(pid_of(client)):
            check_hung(client)
            check_hung(client)
        client.check_health(10)
        client.add_request(make_request("a", 5))
        assert len(collect(client, 1)["a"]) == 5
        assert client.call_utility("echo", "mine") == "mine"


@colours
@pytest.mark.parametrize("how", [deadlock, sleep_in_c])
def test_bc29_a_loop_that_hangs_is_noticed_though_its_process_is_well(how: Any, colour: str) -> None:
    """A lock that is never free and C code that never returns are told; killed then, the engine is dead."""
    client = scripted_client(colour=colour)
    with pytest.raises(TimeoutError):
        client.call_utility("collective_rpc", how, timeout=0.1, ranks=[last_rank(client)])
    check_hung(client)
    waiter = Waiter(client.get_output)
    os.kill(pid_of(client), signal.SIGKILL)
    assert isinstance(waiter.end(time.monotonic(), 2.0), EngineDeadError)
    check_dead(client, "SIGKILL")


@colours
def test_bc29_a_busy_engine_is_well(colour: str) -> None:
    """In a step of a second the engine passes with a limit of ten, and with a short one the error tells of the step."""
    with scripted_client(Script(step_seconds=1.0), colour=colour) as client:
        client.add_request(make_request("a", 2, data_parallel_rank=last_rank(client)))
        eventually(lambda: client.engine_status()[-1].is_in_step)
        with (
            took_at_most(BOUND),
            pytest.raises(EngineStalledError, match=r"in one step for \d\.\d s"),
        ):
            client.check_health(LIMIT)
        client.check_health(10)
        assert len(collect(client, 1)["a"]) == 2


@colours
@pytest.mark.parametrize("how", ["stopped", deadlock])
def test_bc29_with_the_policy_a_hung_engine_is_killed(how: Any, colour: str) -> None:
    """``kill_unresponsive``: the check raises EngineDeadError that says so, and so does every call that waits."""
    client = scripted_client(colour=colour, kill_unresponsive=True)
    client.check_health(10)
    if how == "stopped":
        os.kill(pid_of(client), signal.SIGSTOP)
    else:
        with pytest.raises(TimeoutError):
            client.call_utility("collective_rpc", how, timeout=0.1, ranks=[last_rank(client)])
    waiters = [Waiter(client.get_output), Waiter(lambda: client.call_utility("deferred"))]
    time.sleep(0.05)
    began = time.monotonic()
    with took_at_most(BOUND), pytest.raises(EngineDeadError, match="not responding") as caught:
        client.check_health(LIMIT)
    assert isinstance(caught.value.__cause__, EngineStalledError)
    for waiter in waiters:
        assert isinstance(waiter.end(began, BOUND), EngineDeadError)
    assert how == "stopped" or "in deadlock" in caught.value.remote_traceback
    check_dead(client, "not responding", cause=EngineStalledError)


def check_stalled(error: BaseException | None, where: str) -> None:
    """Check that an engine was ended for standing still, and that the error says where."""
    assert isinstance(error, EngineDeadError)
    assert isinstance(error.__cause__, EngineStalledError)
    assert "made no progress for longer than 0.5 s (ClientOptions.stall_limit)" in str(error)
    for text in (str(error), error.remote_traceback):
        assert f"in {where}" in text
        assert "lifeline.py" in text  # all threads


@colours
@pytest.mark.parametrize("how", [deadlock, sleep_in_c, hang_holding, hang_deaf])
def test_bc29_the_stall_limit_ends_a_call_that_never_ends(how: Any, colour: str) -> None:
    """Nobody has to ask: all who wait get EngineDeadError with the stacks of all threads, wherever the engine hangs."""
    client = scripted_client(colour=colour, stall_limit=STALL)
    waiters = [Waiter(client.get_output), Waiter(lambda: client.call_utility("deferred"))]
    with took_at_most(STALL + 1.0), pytest.raises(EngineDeadError) as caught:
        client.call_utility("collective_rpc", how, ranks=[last_rank(client)])
    began = time.monotonic()
    where = how.__name__
    check_stalled(caught.value, where)
    for waiter in waiters:
        check_stalled(waiter.end(began, BOUND), where)
    check_dead(client, "no progress", cause=EngineStalledError)


@colours
def test_bc29_the_stall_limit_ends_a_step_that_never_ends(colour: str) -> None:
    """In time, counted from the beginning of the step, however long the engine was idle before."""
    client = scripted_client(Script(step_seconds=600.0), colour=colour, stall_limit=STALL)
    time.sleep(STALL * 1.5)
    client.check_health(10)
    client.add_request(make_request("a", 2, data_parallel_rank=last_rank(client)))
    began = time.monotonic()
    with took_at_most(STALL + 1.0):
        check_stalled(Waiter(client.get_output).end(began, STALL + 1.0), "step")
    assert time.monotonic() - began > STALL
    check_dead(client, "in one step for", cause=EngineStalledError)


@colours
def test_bc29_the_stall_limit_spares_who_makes_progress(colour: str) -> None:
    """Steps of half the limit, an idle engine, one that is paused and calls that are answered late are in order."""
    with scripted_client(Script(step_seconds=0.5), colour=colour, stall_limit=1.5) as client:
        late = Waiter(lambda: client.call_utility("deferred"))
        client.add_request(make_request("a", 5))
        assert len(collect(client, 1)["a"]) == 5
        time.sleep(2.0)
        client.check_health(10)
        assert late.error is None
    assert isinstance(late.end(time.monotonic(), BOUND), EngineDeadError)


def test_bc29_the_stall_limit_and_a_rank_that_others_survive() -> None:
    """With ``on_engine_death="restart"`` a rank that hangs is ended and comes back, and is watched again."""
    with scripted_client(colour="dp", stall_limit=STALL, on_engine_death="restart") as client:
        for _ in range(2):
            before = pid_of(client)
            with pytest.raises(EngineDeadError) as caught:
                client.call_utility("collective_rpc", deadlock, ranks=[1])
            check_stalled(caught.value, "deadlock")
            eventually(
                lambda before=before: (
                    [s.condition for s in client.engine_status()] == ["ready"] * 2 and pid_of(client) != before
                )
            )
        client.check_health(10)


@pytest.mark.parametrize("how", [deadlock, sleep_in_c, hang_holding])
def test_bc29_the_stacks_of_an_engine_that_hangs(how: Any) -> None:
    """``dump_stacks`` says where, again and again, and changes nothing."""
    client = scripted_client()
    with pytest.raises(TimeoutError):
        client.call_utility("collective_rpc", how, timeout=0.1)
    eventually(lambda: f"in {how.__name__}" in client.dump_stacks()[0])
    for _ in range(3):
        with took_at_most(2.0):
            (text,) = client.dump_stacks().values()
        assert text.count(f"in {how.__name__}") == 1
    assert client.is_alive
    os.kill(pid_of(client), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
        client.get_output()
    assert "Python stacks" not in str(caught.value)  # those were of another time
    client.shutdown()


def test_bc29_an_engine_that_takes_every_signal() -> None:
    """Its stacks are to be had all the same, and its end by the limit is told."""
    with scripted_client(stall_limit=STALL) as client:
        client.call_utility("collective_rpc", take_signals)
        assert "in run_engine" in client.dump_stacks()[0]
        client.check_health(10)
        with pytest.raises(EngineDeadError, match="made no progress"):
            client.call_utility("collective_rpc", deadlock)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bc29_health_holds_no_loop_up_and_does_not_pile_up(ranks: int) -> None:
    """While two hundred checks wait for a frozen engine other tasks go on; then nothing of them is left."""

    async def main(client: Any) -> float:
        worst, over = 0.0, asyncio.Event()

        async def beat() -> None:
            nonlocal worst
            while not over.is_set():
                began = time.monotonic()
                await asyncio.sleep(0.01)
                worst = max(worst, time.monotonic() - began - 0.01)

        heart = asyncio.create_task(beat())
        with frozen(pid_of(client)):
            checks = [asyncio.create_task(client.check_health_async(LIMIT)) for _ in range(200)]
            cancelled = asyncio.create_task(client.check_health_async(10))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            results = await asyncio.gather(*checks, cancelled, return_exceptions=True)
        assert {type(result) for result in results} == {EngineStalledError, asyncio.CancelledError}
        assert client.utility_results == {}
        await client.check_health_async(10)
        over.set()
        await heart
        return worst

    with async_client(ranks) as client:
        assert asyncio.run(main(client)) < 0.15
        client.check_health(10)
