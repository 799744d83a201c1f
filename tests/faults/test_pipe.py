"""Large messages through the pipe: both ways at once, stalled, cut off in mid-frame, and garbage (BC-33, BC-63)."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_client import ClosedError, EngineDeadError, RemoteProtocolError, SyncMPClient
from engine_client.testing.faults import frozen
from engine_client.testing.scripted import Script
from helpers import pipes
from helpers.clients import channel_of, collect, make_request, pid_of, scripted_client
from helpers.heart import Heart
from helpers.payloads import MIB, pattern, pool_request
from helpers.procs import run_script, wait_gone
from helpers.scenes import METHODS, Waiter, check_dead, interrupt_after, record_logs
from helpers.timing import DEADLOCK, MS, eventually, took_at_most

pytestmark = pytest.mark.crash

DEATH_BOUND = 2.0
REPLY = 16 * MIB
"""Bytes of a payload; its frame is a little longer."""
PREFIX = 24 + 24
"""Bytes of a prefix and of a table with one segment."""


def pipe_client(script: Script | None = None, **options: Any) -> Any:
    """Return a client whose payloads all go through the pipe."""
    return scripted_client(script, arena_limit=0, **options)


def positions(count: int, seed: int) -> list[int]:
    """Return bytes of a frame of 16 MiB at which to cut it: those that matter, and random ones."""
    dice = random.Random(seed)
    edges = [1, 2, 23, 24, 25, PREFIX - 1, PREFIX, PREFIX + 1, PREFIX + 40, 64 * 1024, REPLY - 1, REPLY]
    return (edges + [dice.randrange(REPLY) for _ in range(count)])[:count]


# -- BC-33 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exec", *(pytest.param(m, marks=pytest.mark.full) for m in METHODS[1:])])
def test_bc33_both_sides_write_at_once(method: str) -> None:
    """64 requests of 8 MiB go out unread while as many outputs come in: all arrive in order, in 10 s, within limits."""
    size = 8 * MIB
    source = np.concatenate([pattern(33, MIB)] * 8)
    high_water, backlog_limit = 16 * MIB, 24 * MIB
    with pipe_client(
        Script(step_seconds=0.01), start_method=method, high_water=high_water, backlog_limit=backlog_limit
    ) as client:
        channel = channel_of(client)
        waiting = 0
        with took_at_most(10.0):
            for number in range(64):
                source[0] = number  # may be changed as soon as the call returns
                client.add_request(pool_request(f"r{number}", source))
                waiting = max(waiting, channel.backlog)
            outputs = []
            while len(outputs) < 64:
                outputs += client.get_output(timeout=10).outputs
        for number, output in enumerate(outputs):
            assert (output.request_id, output.finished) == (f"r{number}", True)
            assert output.pooling_output[0] == number
            assert np.array_equal(output.pooling_output[1:], source[1:])
        assert waiting <= high_water + size + 4096, "queued here: the mark and one message more"


async def write_at_once(client: Any, source: Any, most: int) -> tuple[float, float]:
    """Send 64 requests before an output is read, and check what arrives; return its seconds and a beat's latest."""
    channel, heart, waiting, outputs = channel_of(client), Heart(), 0, []
    beating = asyncio.ensure_future(heart.beat(DEADLOCK))
    began = time.monotonic()
    for number in range(64):
        source[0] = number
        await client.add_request_async(pool_request(f"r{number}", source))
        waiting = max(waiting, channel.backlog)
    while len(outputs) < 64:
        outputs += (await client.get_output_async(timeout=DEADLOCK)).outputs
    elapsed = time.monotonic() - began
    beating.cancel()
    assert len(heart.delays) > 10
    for number, output in enumerate(outputs):
        assert (output.request_id, output.finished) == (f"r{number}", True)
        assert output.pooling_output[0] == number
        assert np.array_equal(output.pooling_output[1:], source[1:])
    assert waiting <= most + 4096
    return elapsed, max(heart.delays)


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("colour", ["async", pytest.param("external", marks=pytest.mark.full)])
def test_bc33_both_sides_write_at_once_beside_an_event_loop(colour: str) -> None:
    """The same of asyncio, in 10 s, while no task is late by more than 50 ms; in one of five runs: others run here."""
    size = 8 * MIB
    source = np.concatenate([pattern(33, MIB)] * 8)
    options = {"high_water": 16 * MIB, "backlog_limit": 24 * MIB, "colour": colour}
    runs: list[tuple[float, float]] = []
    while len(runs) < 5:
        with pipe_client(Script(step_seconds=0.01), **options) as client:
            runs.append(asyncio.run(write_at_once(client.asynchronous, source, 16 * MIB + size)))
        elapsed, late = runs[-1]
        if elapsed < 10_000 * MS and late < 50 * MS:
            return
    pytest.fail(f"seconds for all, and by which a beat was late: {runs}")


def test_bc33_senders_from_many_threads_stay_at_the_mark() -> None:
    """While the engine reads nothing, each of four threads adds one message at most beyond the mark; all arrive."""
    size, mark = 2 * MIB, 8 * MIB
    with pipe_client(high_water=mark) as client:
        channel = channel_of(client)

        def add(thread: int) -> None:
            for number in range(8):
                client.add_request(pool_request(f"{thread}-{number}", np.full(size, thread, np.uint8)))

        with frozen(pid_of(client)):
            threads = [Waiter(lambda thread=thread: add(thread), again=False) for thread in range(4)]  # type: ignore[misc]
            eventually(lambda: channel.backlog > mark)
            time.sleep(0.3)
            assert channel.backlog <= mark + 4 * (size + 4096)
            assert all(thread.is_alive() for thread in threads)
        found = collect(client, 32)
        for thread in threads:
            thread.join(10)
            assert thread.error is None
        assert all((found[name][0].pooling_output == int(name[0])).all() for name in found)
        for thread in range(4):
            assert [name for name in found if name[0] == str(thread)] == [f"{thread}-{number}" for number in range(8)]


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("stall", ["stopped", "in a call"])
def test_bc33_an_engine_that_does_not_read(stall: str, colour: str) -> None:
    """add_request waits at the mark and can be interrupted; abort and shutdown keep their bounds all the while."""
    client = pipe_client(high_water=8 * MIB, colour=colour)
    pid = pid_of(client)
    payload = np.zeros(8 * MIB, np.uint8)
    if stall == "stopped":
        os.kill(pid, signal.SIGSTOP)
    else:
        call = Waiter(lambda: client.call_utility("wait", 30), again=False)
        eventually(lambda: client.utility_results)
        time.sleep(0.05)
    client.add_request(pool_request("first", payload))
    client.add_request(pool_request("second", payload))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupt_after(0.3):
        client.add_request(pool_request("third", payload))
    assert 0.2 < time.monotonic() - began < 1.5, "it waited, and the interrupt ended that"
    blocked = Waiter(lambda: client.add_request(pool_request("fourth", payload)), again=False)
    blocked.join(0.2)
    assert blocked.is_alive()
    with took_at_most(0.2):
        client.abort_requests(["first", "second", "unknown"])
    began = time.monotonic()
    client.shutdown(timeout=0.5)
    assert time.monotonic() - began < 1.5
    assert isinstance(blocked.end(began, 1.5), ClosedError)
    if stall != "stopped":
        assert isinstance(call.end(began, 1.5), ClosedError)
    wait_gone(pid, 0.5)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_bc33_an_engine_that_reads_on_after_a_while(colour: str) -> None:
    """What an interrupted caller had begun to send is undone, and the stream is whole when the engine reads on."""
    with pipe_client(high_water=4 * MIB, colour=colour) as client:
        with frozen(pid_of(client)):
            for number in range(2):
                client.add_request(pool_request(f"early{number}", pattern(number, 4 * MIB)))
            with pytest.raises(KeyboardInterrupt), interrupt_after(0.3):
                client.add_request(pool_request("never", pattern(9, 4 * MIB)))
        client.add_request(pool_request("late", pattern(3, 4 * MIB)))
        found = collect(client, 1)
        while "late" not in found:
            found |= collect(client, 1)
        assert "never" not in found
        assert np.array_equal(found["late"][0].pooling_output, pattern(3, 4 * MIB))
        assert client.call_utility("info")["requests"] == []


def test_bc33_a_client_that_does_not_read() -> None:
    """The engine makes no more steps once its limit waits for the client, uses no more memory, and goes on then."""
    limit, size = 8 * MIB, MIB
    go = threading.Event()
    with pipe_client(backlog_limit=limit) as client:
        client.collective_rpc(pipes.grow_until_told, args=(size,))
        client.collective_rpc(pipes.count_backlog)
        pipes.hold_reader(client, go)
        try:
            client.add_request(make_request("r", 60))
            link = pipes.link_of(client)
            eventually(lambda: link.status.snapshot().steps > limit // size)
            time.sleep(0.3)
            steps = link.status.snapshot().steps
            assert steps <= limit // size + 3, "the limit, one more, and what the pipe itself holds"
            time.sleep(0.3)
            assert link.status.snapshot().steps == steps
        finally:
            go.set()
        outputs = collect(client, 1)["r"]
        assert [int.from_bytes(output.pooling_output[-8:], "little") for output in outputs] == list(range(60))
        assert client.collective_rpc(pipes.count_backlog)[0] <= limit + size + 4096


@pytest.mark.parametrize("seed", range(4))
def test_bc33_the_reader_dies_while_the_writer_is_in_the_middle(seed: int) -> None:
    """Every thread that is sending when the engine dies gets EngineDeadError with how it died, and no OSError."""
    dice = random.Random(seed)
    client = pipe_client(high_water=4 * MIB)
    numbers = iter(range(1 << 30))
    payload = np.zeros(3 * MIB, np.uint8)
    calls = [
        lambda: client.add_request(pool_request(f"r{next(numbers)}", payload)),
        lambda: client.add_request(make_request(f"s{next(numbers)}")),
        lambda: client.call_utility("echo", payload),
        lambda: client.abort_requests([f"r{next(numbers)}"]) or client.ensure_alive(),
        client.get_output,
    ]
    client.collective_rpc(pipes.end_reading_at, args=(1 + dice.randrange(40 * MIB),))
    pid = pid_of(client)
    threads = [Waiter(call) for call in calls]
    wait_gone(pid, 20.0)
    died = time.monotonic()
    for thread in threads:
        error = thread.end(died, DEATH_BOUND)
        assert type(error) is EngineDeadError, error
        assert error.exit_name == "SIGKILL(-9)"
    check_dead(client, "SIGKILL(-9)")


@pytest.mark.parametrize("how", ["sigkill", "exit"])
def test_bc33_the_client_dies_while_the_engine_writes(how: str, tmp_path: Path) -> None:
    """An engine in the middle of 64 MiB for a client that is gone ends, with its child, within 2 s."""
    script = """
        import os, signal, sys, threading, time
        import numpy as np
        from helpers import pipes
        from helpers.clients import channel_of, scripted_client
        client = scripted_client(arena_limit=0)
        client.collective_rpc(pipes.hold_channel)
        data = np.ones(64 << 20, np.uint8)
        thread = threading.Thread(target=lambda: client.call_utility("echo", data), daemon=True)
        before = channel_of(client).received
        thread.start()
        while channel_of(client).received - before < 5 << 20:
            pass
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "sigkill" else os._exit(0)
    """
    run_script(script, how, patience=2.0).check(-9 if how == "sigkill" else 0)


# -- BC-63 -------------------------------------------------------------------------------------------------------------


def check_cut(client: SyncMPClient, direction: str, position: int, holder: str) -> None:
    """Have the engine die at a byte of a reply or a request, and check what everybody sees."""
    held = None
    if holder != "nobody":
        [held] = client.collective_rpc(pipes.hold_channel, args=(holder == "daemon",))
    cut = pipes.end_sending_at if direction == "reply" else pipes.end_reading_at
    client.collective_rpc(cut, args=(position,))
    consumer = Waiter(client.get_output)
    payload = np.ones(REPLY, np.uint8)
    pid = pid_of(client)
    call = Waiter(lambda: client.call_utility("echo", payload), again=False)
    wait_gone(pid, 20.0)
    died = time.monotonic()
    for waiter in (call, consumer):
        error = waiter.end(died, DEATH_BOUND)
        assert type(error) is EngineDeadError, (position, error)
        assert error.exit_name == "SIGKILL(-9)", (position, error)
    check_dead(client, "SIGKILL(-9)")
    if held is not None:
        eventually(lambda: state_of(held) in "ZX", DEATH_BOUND)  # a zombie waits for the system's first process only


@pytest.mark.parametrize("holder", ["nobody", "child", "daemon"])
@pytest.mark.parametrize("direction", ["reply", "request"])
def test_bc63_killed_in_mid_frame(direction: str, holder: str) -> None:
    """Whatever byte of 16 MiB the engine dies at, and whoever holds its end of the pipe: EngineDeadError within 2 s."""
    known = positions(12, 0) if holder == "nobody" else positions(12, 0)[::4]
    for position in known + positions(14, len(holder))[12:]:
        check_cut(pipe_client(), direction, position, holder)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_bc63_killed_at_many_points(method: str) -> None:
    """The same at random points for every start method, in both directions and with every holder."""
    dice = random.Random(METHODS.index(method))
    for position in positions(26, METHODS.index(method))[12:]:
        direction, holder = dice.choice(["reply", "request"]), dice.choice(["nobody", "child", "daemon"])
        check_cut(pipe_client(start_method=method), direction, position, holder)


@pytest.mark.full
@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_bc63_killed_at_any_point() -> None:
    """The same 500 times, or as often as ENGINE_CLIENT_TEST_REPEATS says, with all of that drawn anew each time."""
    dice = random.Random(500)
    for _ in range(int(os.environ.get("ENGINE_CLIENT_TEST_REPEATS", "500"))):
        direction, holder = dice.choice(["reply", "request"]), dice.choice(["nobody", "child", "daemon"])
        position = dice.randrange(1, dice.choice([PREFIX, REPLY]))
        check_cut(pipe_client(start_method=dice.choice(METHODS)), direction, position, holder)
        gc.collect()  # errors and their frames refer to each other, and hold 16 MiB each


@pytest.mark.parametrize("position", [10, PREFIX + 3, 5 * MIB])
@pytest.mark.parametrize("direction", ["reply", "request"])
def test_bc63_stopped_in_mid_frame(direction: str, position: int) -> None:
    """While the engine is stopped inside a frame, shutdown keeps its bound, and callers learn that it is closed."""
    client = pipe_client()
    cut = pipes.end_sending_at if direction == "reply" else pipes.end_reading_at
    client.collective_rpc(cut, args=(position, signal.SIGSTOP))
    pid = pid_of(client)
    call = Waiter(lambda: client.call_utility("echo", np.ones(REPLY, np.uint8)), again=False)
    consumer = Waiter(client.get_output)
    eventually(lambda: state_of(pid) == "T")
    assert call.is_alive()
    with pytest.raises(TimeoutError), took_at_most(1.0):
        client.call_utility("is_sleeping", timeout=0.1)
    began = time.monotonic()
    client.shutdown(timeout=0.5)
    assert time.monotonic() - began < 1.5
    assert isinstance(consumer.end(began, 1.5), ClosedError)
    if call.end(began, 1.5) is None:  # the engine went on in time for its last words
        assert call.result.all()
    else:
        assert isinstance(call.error, ClosedError)
    wait_gone(pid, 0.5)


@pytest.mark.parametrize("position", [10, PREFIX + 3, 5 * MIB])
@pytest.mark.parametrize("direction", ["reply", "request"])
def test_bc63_stopped_in_mid_frame_and_continued(direction: str, position: int) -> None:
    """An engine that goes on after a stop inside a frame has lost nothing; one that is killed meanwhile is dead."""
    payload = pattern(63, REPLY)
    client = pipe_client()
    cut = pipes.end_sending_at if direction == "reply" else pipes.end_reading_at
    pid = pid_of(client)
    client.collective_rpc(cut, args=(position, signal.SIGSTOP))
    call = Waiter(lambda: client.call_utility("echo", payload), again=False)
    eventually(lambda: state_of(pid) == "T")
    os.kill(pid, signal.SIGCONT)
    call.join(20)
    assert call.error is None
    assert np.array_equal(call.result, payload)
    call.result = None
    client.collective_rpc(cut, args=(position, signal.SIGSTOP))
    call = Waiter(lambda: client.call_utility("echo", payload), again=False)
    eventually(lambda: state_of(pid) == "T")
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert type(call.end(began, DEATH_BOUND)) is EngineDeadError
    check_dead(client, "SIGKILL(-9)")


def state_of(pid: int) -> str:
    """Return the letter for the state of a process; ``X`` when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


@pytest.mark.parametrize("name", pipes.GARBAGE)
def test_bc63_garbage_from_the_engine(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is no frame ends the client's engine with EngineDeadError that says so, and nothing is allocated for it."""
    logged = record_logs(caplog)
    client = pipe_client()
    consumer = Waiter(client.get_output)
    pid = pid_of(client)
    before = pipes.virtual_peak()
    began = time.monotonic()
    with pytest.raises(EngineDeadError) as caught:
        client.collective_rpc(pipes.send_garbage, args=(name,))
    assert time.monotonic() - began < DEATH_BOUND
    assert isinstance(caught.value.__cause__, RemoteProtocolError)
    assert type(consumer.end(began, DEATH_BOUND)) is EngineDeadError
    assert pipes.virtual_peak() - before < 16 * MIB
    check_dead(client, cause=RemoteProtocolError)
    assert len(logged()) == 1
    wait_gone(pid, DEATH_BOUND)


@pytest.mark.parametrize("name", pipes.GARBAGE)
def test_bc63_garbage_from_the_client(name: str, tmp_path: Path) -> None:
    """An engine that gets what is no frame allocates nothing for it and ends; its client is told why within 2 s."""
    client = pipe_client()
    pid = pid_of(client)
    client.collective_rpc(pipes.note_peak_when_left, args=(str(tmp_path / "peak"),))
    call = Waiter(lambda: client.call_utility("deferred"), again=False)
    consumer = Waiter(client.get_output)
    eventually(lambda: client.utility_results)
    eventually(lambda: not channel_of(client).waiting)
    began = time.monotonic()
    pipes.write_raw(channel_of(client), pipes.GARBAGE[name])
    for waiter in (call, consumer):
        error = waiter.end(began, DEATH_BOUND)
        assert type(error) is EngineDeadError
        assert error.exit_name == "exit code 1"
        assert "what client 0 sends cannot be read: " in str(error)
    assert int((tmp_path / "peak").read_text()) < 16 * MIB
    check_dead(client)
    wait_gone(pid, DEATH_BOUND)


def test_bc63_a_length_that_is_never_filled() -> None:
    """A frame that promises 60 GiB and never comes costs 16 MiB of address space at most, and death ends the wait."""
    client = pipe_client()
    before = pipes.virtual_peak()
    client.collective_rpc(pipes.promise, args=(60 << 30,))
    call = Waiter(lambda: client.call_utility("is_sleeping"), again=False)
    call.join(0.2)
    assert call.is_alive()
    assert pipes.virtual_peak() - before < 64 * MIB
    os.kill(pid_of(client), signal.SIGKILL)
    assert type(call.end(time.monotonic(), DEATH_BOUND)) is EngineDeadError
    check_dead(client, "SIGKILL(-9)")
