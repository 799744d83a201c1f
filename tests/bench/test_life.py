"""Start, rest, end and death of engines as the benchmark measures them."""

from __future__ import annotations

import os
import queue
import time

from engine_client.bench import life
from engine_client.bench.ours import Ours

OURS = Ours()


def test_start_and_stop():
    """Both are timed, in milliseconds."""
    figures = life.start_stop(OURS, times=1)
    assert set(figures) == {"start_ms", "stop_ms"}
    assert min(figures.values()) > 0


def test_idleness_is_scaled():
    """The CPU time of a shorter rest is told as if it had been five seconds."""
    assert 0 < life.idle_cpu(OURS, seconds=0.1)["cpu_s_in_5_s"] < 5


def test_cpu_time_is_read_from_outside(monkeypatch):
    """That of a process which works grows by what it says itself, wherever the system tells it."""
    for has_threads in (True, False):
        if not has_threads:
            monkeypatch.setattr(life.os, "listdir", raising)
        before, own = life.cpu_of(os.getpid()), time.process_time()
        while time.process_time() - own < 0.1:
            pass
        assert 0.05 < life.cpu_of(os.getpid()) - before < 5


def raising(path):
    raise OSError(f"there is no {path}")


def test_death_is_seen():
    """The time until a waiting thread knows of the engine's death is told, and what it got."""
    figures = life.death(OURS, patience=20)
    assert figures["ms"] > 0
    assert figures["note"] == "EngineDeadError"


class Deaf:
    """Makes clients that never notice a death."""

    def make_client(self):
        self.client = OURS.make_client()
        self.ends: queue.Queue[None] = queue.Queue()
        self.client.get_output = self.ends.get
        return self.client


def test_death_that_nobody_sees():
    """A client that goes on waiting is told as such, without a figure."""
    side = Deaf()
    figures = life.death(side, patience=0.1)
    assert figures["ms"] is None
    assert figures["note"] == "get_output() had not returned 0.1 s after SIGKILL of the engine"
    side.ends.put(None)
    side.client.shutdown()
