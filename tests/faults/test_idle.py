"""BC-15: a client and an engine that have nothing to do use no processor; and what an engine takes of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from engine_client import EngineConfig, EngineDeadError, SyncMPClient
from engine_client.testing.executors import EchoExecutor
from helpers.clients import channel_of, collect, make_request, pid_of, pids_of, reader_of, scripted_client
from helpers.doomed import hang_up
from helpers.timing import DEADLOCK, SCALE, took_at_most

SECONDS = 5.0


def used(pid: int) -> tuple[float, int]:
    """Return processor seconds and voluntary context switches of all threads of a process."""
    seconds, switches = 0.0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
        status = (task / "status").read_text()
        switches += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return seconds, switches


def used_while_idle(client: Any, seconds: float) -> tuple[float, int]:
    """Return what client and engines use together while nothing is asked of them."""
    pids = (os.getpid(), *pids_of(client))
    before = [used(pid) for pid in pids]
    time.sleep(seconds)
    after = [used(pid) for pid in pids]
    return (
        sum(now[0] - then[0] for now, then in zip(after, before, strict=True)),
        sum(now[1] - then[1] for now, then in zip(after, before, strict=True)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "colour"),
    [(0, "sync"), (100, "dp"), *(pytest.param(100, c, marks=pytest.mark.full) for c in ("sync", "async"))],
)
def test_bc15_idle_for_five_seconds(requests: int, colour: str) -> None:
    """After READY, and after a hundred requests: less than 10 ms together, and less than 20 wake-ups a second.

    An event loop that waits, ranks in lock-step, and a limit for engines that stall add nothing.
    """
    config = EngineConfig()
    config.model_config.is_moe = True  # several ranks are in lock-step
    with scripted_client(config=config, colour=colour, stall_limit=1.0) as client:
        for index in range(requests):
            client.add_request(make_request(f"r{index}", 3))
        if requests:
            collect(client, requests)
        time.sleep(0.5)  # until the engine is done with its start
        seconds, switches = used_while_idle(client, SECONDS)
        assert seconds < 0.010 * SCALE
        assert switches < 20 * SECONDS


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("colour", ["sync", "dp"])
def test_bc15_idle_for_ten_seconds_twice(colour: str) -> None:
    """For ten seconds after READY, and for ten more after a hundred requests, one client uses next to nothing."""
    with scripted_client(colour=colour) as client:
        for requests in (0, 100):
            for index in range(requests):
                client.add_request(make_request(f"r{index}", 3))
            if requests:
                collect(client, requests)
            time.sleep(0.5)  # until the engine is done with its start, or with them
            seconds, switches = used_while_idle(client, 10.0)
            assert seconds < 0.020 * SCALE
            assert switches < 20 * 10.0


@pytest.mark.timing
def test_bc15_the_first_request_after_the_pause_is_as_quick() -> None:
    """An idle engine answers within 5 ms of a busy one, in the median of ten pauses, since the machine is shared."""
    with scripted_client() as client:

        def once(name: str) -> float:
            began = time.perf_counter()
            client.add_request(make_request(name, 1))
            client.get_output(timeout=DEADLOCK)
            return time.perf_counter() - began

        busy = median(once(f"busy{index}") for index in range(200))
        idle = []
        for index in range(10):
            time.sleep(0.3)
            idle.append(once(f"idle{index}"))
        assert median(idle) < busy + 0.005 * SCALE


def test_bc15_a_dead_engine_does_not_keep_the_client_busy() -> None:
    """With the engine dead and the client not shut down, nothing spins on what the engine has left."""
    with scripted_client() as client:
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            client.get_output(timeout=DEADLOCK)
        check_quiet()


def check_quiet(seconds: float = 1.0) -> None:
    """Check that this process uses next to nothing for a while."""
    time.sleep(0.2)
    before = used(os.getpid())
    time.sleep(seconds)
    after = used(os.getpid())
    assert after[0] - before[0] < 0.050 * SCALE * seconds
    assert after[1] - before[1] < 50 * seconds


@pytest.mark.parametrize("colour", ["sync", pytest.param("dp", marks=pytest.mark.full)])
def test_bc15_an_engine_that_has_hung_up_does_not_keep_the_client_busy(colour: str) -> None:
    """Where the engine has closed its end and lives on, nothing spins on ours."""
    with scripted_client(colour=colour) as client:
        with pytest.raises(EngineDeadError):
            client.collective_rpc(hang_up, timeout=DEADLOCK)
        check_quiet()


@pytest.mark.parametrize("what", ["channel", "sentinel", "selector"])
def test_bc15_a_descriptor_closed_under_the_reader_does_not_make_it_spin(what: str) -> None:
    """The reader waits on, or ends and has every call told at once; either way it uses no processor."""
    with scripted_client() as client:
        assert client.call_utility("echo", 1) == 1  # by then the reader watches all there is
        reader, pid = reader_of(client), pid_of(client)
        sentinel = reader._sentinels[0]  # noqa: SLF001  # there is no other way to it
        files = {
            "channel": channel_of(client).fileno(),
            "sentinel": sentinel,
            "selector": reader._selector.fileno(),  # type: ignore[attr-defined]  # noqa: SLF001  # that of epoll
        }
        close_under(files[what])
        try:
            reader.wakeup()
            check_quiet(0.5)
            with took_at_most(2.0):
                if what == "sentinel":
                    assert client.call_utility("echo", 2, timeout=DEADLOCK) == 2
                else:
                    with pytest.raises(EngineDeadError):
                        client.call_utility("echo", 2, timeout=DEADLOCK)
            check_quiet(0.5)
        finally:
            if what == "sentinel":
                own = os.pidfd_open(pid)
                os.dup2(own, sentinel, inheritable=False)  # what ends the engine needs it
                os.close(own)


def close_under(descriptor: int) -> None:
    """Close what somebody else has open; the number stays taken, else it would be given to another file."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def test_bc15_a_frozen_engine_does_not_keep_the_client_busy() -> None:
    """With a backlog for an engine that does not read, the client waits for it without spinning."""
    with scripted_client(arena_limit=0) as client:
        pid = pid_of(client)
        os.kill(pid, signal.SIGSTOP)
        try:
            client.add_request(make_request("a", 1, cache_salt="x" * 8_000_000))
            check_quiet()
        finally:
            os.kill(pid, signal.SIGCONT)
        collect(client, 1)


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has in use."""
    line = Path(f"/proc/{pid}/status").read_text(encoding="ascii").partition("VmRSS:")[2]
    return int(line.split()[0]) * 1024


def test_an_engine_takes_little_memory() -> None:
    """With a trivial executor, less than 25 MB more than an interpreter that does nothing."""
    bare = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with SyncMPClient(EngineConfig(), EchoExecutor, False) as client:
            client.add_request(make_request("a", 3))
            collect(client, 1)
            assert resident(pid_of(client)) - resident(bare.pid) < 25_000_000
    finally:
        bare.communicate(b"\n")
