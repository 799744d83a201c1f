"""BC-15: a client and an engine that have nothing to do use no processor; and what an engine takes of memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine_client import EngineConfig, EngineDeadError, SyncMPClient
from engine_client.testing.executors import EchoExecutor
from helpers.clients import collect, make_request, pid_of, pids_of, scripted_client
from helpers.timing import DEADLOCK, SCALE

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


@pytest.mark.timing
def test_bc15_the_first_request_after_the_pause_is_as_quick() -> None:
    """An idle engine answers within 5 ms of a busy one; the best of ten times, since the machine is shared."""
    with scripted_client() as client:

        def once(name: str) -> float:
            began = time.perf_counter()
            client.add_request(make_request(name, 1))
            client.get_output(timeout=DEADLOCK)
            return time.perf_counter() - began

        busy = min(once(f"busy{index}") for index in range(200))
        idle = []
        for index in range(10):
            time.sleep(0.3)
            idle.append(once(f"idle{index}"))
        assert min(idle) < busy + 0.005 * SCALE


def test_bc15_a_dead_engine_does_not_keep_the_client_busy() -> None:
    """With the engine dead and the client not shut down, nothing spins on what the engine has left."""
    with scripted_client() as client:
        os.kill(pid_of(client), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            client.get_output(timeout=DEADLOCK)
        time.sleep(0.2)
        before = used(os.getpid())
        time.sleep(1.0)
        after = used(os.getpid())
        assert after[0] - before[0] < 0.050 * SCALE
        assert after[1] - before[1] < 50


def test_bc15_a_frozen_engine_does_not_keep_the_client_busy() -> None:
    """With a backlog for an engine that does not read, the client waits for it without spinning."""
    with scripted_client(arena_limit=0) as client:
        pid = pid_of(client)
        os.kill(pid, signal.SIGSTOP)
        try:
            client.add_request(make_request("a", 1, cache_salt="x" * 8_000_000))
            time.sleep(0.2)
            before = used(os.getpid())
            time.sleep(1.0)
            after = used(os.getpid())
        finally:
            os.kill(pid, signal.SIGCONT)
        assert after[0] - before[0] < 0.050 * SCALE
        assert after[1] - before[1] < 50
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
