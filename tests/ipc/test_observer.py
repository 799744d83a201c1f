"""Engines of other processes are seen by their pages, read only; what is no page is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from engine_client.ipc import observer
from engine_client.ipc.arena_memory import create_memory
from engine_client.ipc.observer import running_engines
from engine_client.ipc.status_page import EngineState, StatusReader, StatusWriter

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")

CHILD = """
import sys, os
from engine_client.ipc.status_page import EngineState, StatusWriter
writer = StatusWriter(int(sys.argv[1]))
writer.set_state(EngineState.READY)
print("ready", flush=True)
input()
"""


@pytest.fixture
def writer():
    """Give the page of an engine that this process plays."""
    fd = create_memory("engine-status-3")
    StatusReader.prepare(fd)
    writer = StatusWriter(fd)
    writer.set_rank(3)
    writer.set_state(EngineState.READY)
    yield writer
    writer.close()


def test_an_engine_is_seen_as_it_is(writer) -> None:
    """Each look shows what the engine has written by then, and leaves nothing open."""
    [engine] = running_engines(os.getpid())
    assert (engine.status.rank, engine.pid, engine.client) == (3, os.getpid(), os.getppid())
    assert engine.memory > 1 << 20
    writer.step_end(2, 1)
    writer.counters.add(1, 5)
    [later] = running_engines(os.getpid())
    assert (later.status.waiting, later.status.running, later.counted.prompt_tokens) == (2, 1, 5)
    assert later.uptime > engine.uptime


def test_its_state_is_told(writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting, paused, sleeping, long in a step, leaving: it is seen from outside."""

    def condition() -> str:
        return running_engines(os.getpid())[0].status.condition

    assert condition() == "ready"
    writer.set_flags(is_sleeping=False, is_paused=True)
    assert condition() == "paused"
    writer.set_flags(is_sleeping=True, is_paused=True)
    assert condition() == "sleeping"
    monkeypatch.setattr(observer, "_LONG_STEP", 0.01)
    writer.step_begin()
    time.sleep(0.02)
    assert condition() == "in a step for 0 s"
    writer.set_state(EngineState.INIT)
    assert condition() == "starting"
    writer.draining()
    assert condition() == "leaving"


def test_a_page_cannot_be_changed_by_who_looks(writer) -> None:
    """The mapping is read only, and so is the descriptor."""
    reader = StatusReader(os.open(f"/proc/self/fd/{writer._fd}", os.O_RDONLY), is_foreign=True)  # noqa: SLF001
    with pytest.raises(TypeError):
        reader.counters.add(1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(reader.fd, b"x", 0)
    reader.close()


def test_other_processes_are_seen_until_nobody_holds_their_page() -> None:
    """An engine in another process is seen, once, however many have its page; dead as long as its client keeps it."""
    fd = create_memory("engine-status-0")
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(fd)],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout.readline() == b"ready\n"
        for engines in (running_engines(os.getpid()), running_engines(process.pid)):
            assert [(e.pid, e.client, e.status.condition) for e in engines] == [(process.pid, os.getpid(), "ready")]
        assert [e.pid for e in running_engines() if e.pid == process.pid] == [process.pid]
        process.communicate(b"\n", timeout=60)
        assert [(e.client, e.memory, e.status.condition) for e in running_engines(os.getpid())] == [(0, 0, "dead")]
        with pytest.raises(OSError, match="No such file"):
            running_engines(process.pid)
    finally:
        os.close(fd)
    assert running_engines(os.getpid()) == []


def test_what_is_no_page_is_left_alone() -> None:
    """Memory of the same name that is too short, or says something else, is no page."""
    short, other = create_memory("engine-status-short"), create_memory("engine-status-other")
    try:
        StatusReader.prepare(other)
        assert running_engines(os.getpid()) == []
    finally:
        os.close(short)
        os.close(other)
