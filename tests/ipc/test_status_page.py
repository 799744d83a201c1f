"""An engine's status can be read at any time, also after it was killed."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from engine_client.ipc.arena_memory import create_memory
from engine_client.ipc.status_page import (
    MOST_STRAYS,
    EngineState,
    EngineStatus,
    StatusReader,
    StatusWriter,
)


class Page:
    """A page with a writer and a reader on it, each with a descriptor of its own."""

    def __init__(self):
        fd = create_memory("page")
        StatusReader.prepare(fd)
        self.writer = StatusWriter(os.dup(fd))
        self.reader = StatusReader(fd)

    def close(self):
        self.writer.close()
        self.reader.close()


@pytest.fixture
def page():
    page = Page()
    yield page
    page.close()


def test_a_new_page_says_launched(page):
    """Before the engine wrote anything the page reads as launched, without steps, requests or log."""
    assert page.reader.snapshot() == EngineStatus()
    assert page.reader.log_lines() == []
    assert not page.reader.snapshot().is_in_step


def test_the_reader_may_come_first():
    """Reader and writer may be made in either order; whoever is first gives the memory its size."""
    fd = create_memory("page")
    writer = StatusWriter(os.dup(fd))
    writer.set_state(EngineState.READY)
    reader = StatusReader(fd)
    assert reader.snapshot().state is EngineState.READY
    writer.close()
    reader.close()


def test_states_and_flags_arrive(page):
    """Every state, and the two flags in each combination, is read as it was written."""
    for state in EngineState:
        page.writer.set_state(state)
        assert page.reader.snapshot().state is state
    page.writer.draining()
    assert page.reader.snapshot().state is EngineState.DRAINING
    for sleeping in (False, True):
        for paused in (False, True):
            page.writer.set_flags(is_sleeping=sleeping, is_paused=paused)
            status = page.reader.snapshot()
            assert (status.is_sleeping, status.is_paused) == (sleeping, paused)


def test_an_unknown_state_does_not_break_the_reader(page):
    """A word that no state has, as a crashing engine may leave it, reads as launched."""
    page.writer.set_state(77)
    assert page.reader.snapshot().state is EngineState.LAUNCHED


def test_a_step_shows_while_it_runs_and_when_it_is_over(page):
    """A running step is seen with the time of its begin; its end brings count, time and queue lengths."""
    before = time.monotonic()
    page.writer.step_begin()
    status = page.reader.snapshot()
    assert status.is_in_step
    assert before <= status.step_began_at <= time.monotonic()
    assert status.steps == 0
    page.writer.step_end(3, 70_000)
    status = page.reader.snapshot()
    assert not status.is_in_step
    assert (status.steps, status.waiting, status.running) == (1, 3, 70_000)
    assert status.step_began_at <= status.last_step_at <= time.monotonic()
    assert page.reader.counts() == (3, 70_000)


def test_idle_counts_are_no_step(page):
    """Queue lengths can be written outside of a step, which leaves the step words alone."""
    page.writer.idle(2**31, 5)
    assert page.reader.counts() == (2**31, 5)
    assert page.reader.snapshot() == EngineStatus(waiting=2**31, running=5)


def test_strays_are_listed_up_to_a_limit(page):
    """Processes that left the engine's group are read as they were written; the last list counts."""
    assert page.reader.strays() == []
    strays = [(pid, 1 << 40 | pid) for pid in range(1, MOST_STRAYS + 5)]
    page.writer.set_strays(strays)
    assert page.reader.strays() == strays[:MOST_STRAYS]
    page.writer.set_strays(strays[3:5])
    assert page.reader.strays() == strays[3:5]
    page.writer.set_strays([])
    assert page.reader.strays() == []
    assert page.reader.log_lines() == []


def test_log_lines_arrive_in_order(page):
    """Records, also those of several lines, are read line by line, oldest first."""
    page.writer.log("first")
    page.writer.log("second\nthird")
    page.writer.log("fünf ✓ \udc80")
    assert page.reader.log_lines() == ["first", "second", "third", "fünf ✓ \\udc80"]


def test_only_whole_last_lines_are_kept(page):
    """When the ring is full, the oldest lines go, and no line is cut at its beginning."""
    lines = [f"line {n} " + "x" * (n % 97) for n in range(1000)]
    for line in lines:
        page.writer.log(line)
        kept = page.reader.log_lines()
        assert kept == lines[lines.index(line) + 1 - len(kept) : lines.index(line) + 1]
    assert 3000 < sum(map(len, kept)) < 4096


def test_a_huge_record_loses_its_middle(page):
    """A record of a megabyte keeps its beginning and its end."""
    page.writer.log("before")
    page.writer.log("begin" + "ä" * 1_000_000 + "end")
    page.writer.log("after")
    before, cut, after = page.reader.log_lines()
    assert (before, after) == ("before", "after")
    assert cut.startswith("begin")
    assert " ... " in cut
    assert cut.endswith("end")
    assert len(cut.encode()) < 1100


def test_lines_of_several_threads_stay_whole(page):
    """Threads that log at the same time do not mix their lines, whenever somebody reads."""
    stop = threading.Event()

    def log(letter):
        while not stop.is_set():
            page.writer.log(letter * 50)

    threads = [threading.Thread(target=log, args=(letter,)) for letter in "abc"]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            for line in page.reader.log_lines():
                assert len(line) == 50
                assert len(set(line)) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_held_log_lock_does_not_block(page, monkeypatch):
    """In a forked copy, where the holder of the lock does not exist, a line is given up rather than waited for."""
    page.writer.log("kept")

    class Held:
        def acquire(self, timeout):
            assert 0 < timeout < 1
            return False

    monkeypatch.setattr(page.writer, "_log_lock", Held())
    page.writer.log("lost")
    assert page.reader.log_lines() == ["kept"]


def test_everything_is_readable_after_sigkill(page):
    """Status and log of a process that was killed in the middle of a step are all there."""
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        page.writer.set_state(EngineState.READY)
        page.writer.step_begin()
        page.writer.step_end(1, 2)
        page.writer.log("last words")
        page.writer.step_begin()
        os.write(go, b"x")
        time.sleep(600)
        os._exit(0)
    os.read(ready, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    status = page.reader.snapshot()
    assert (status.state, status.steps, status.waiting, status.running) == (EngineState.READY, 1, 1, 2)
    assert status.is_in_step
    assert page.reader.log_lines() == ["last words"]
    os.close(ready)
    os.close(go)


def test_what_is_no_step_shows_too(page):
    """Since when the engine does what it does: a step, what follows it, a call; nothing while it waits."""
    assert page.reader.snapshot().busy_since == 0.0
    page.writer.step_begin()
    status = page.reader.snapshot()
    assert status.busy_since == status.step_began_at > 0
    page.writer.step_end(0, 0)
    status = page.reader.snapshot()
    assert status.busy_since == status.last_step_at
    page.writer.busy()
    status = page.reader.snapshot()
    assert status.busy_since > status.last_step_at
    assert "in one call for 0." in status.describe()
    page.writer.waits()
    assert page.reader.snapshot().busy_since == 0.0
    assert "not in a step" in page.reader.snapshot().describe()


def test_a_closed_reader_tells_the_last_it_saw(page):
    """After close the reader's answers stay those of that moment; close may be repeated."""
    page.writer.step_begin()
    page.writer.step_end(0, 9)
    page.writer.log("seen")
    assert repr(page.reader).startswith("<StatusReader fd=")
    page.reader.close()
    page.reader.close()
    page.writer.log("unseen")
    page.writer.step_end(0, 0)
    assert page.reader.counts() == (0, 9)
    assert page.reader.snapshot().running == 9
    assert page.reader.log_lines() == ["seen"]
    assert repr(page.reader).startswith("<StatusReader closed")


def test_a_closed_writer_changes_nothing(page):
    """After close the writer's calls are accepted and have no effect; close may be repeated."""
    page.writer.step_end(0, 1)
    assert repr(page.writer).startswith("<StatusWriter fd=")
    page.writer.close()
    page.writer.close()
    page.writer.step_begin()
    page.writer.step_end(5, 5)
    page.writer.log("unheard")
    assert page.reader.snapshot().running == 1
    assert page.reader.log_lines() == []
    assert repr(page.writer) == "<StatusWriter closed>"


def test_unusable_memory_stays_the_callers():
    """A descriptor that cannot be mapped raises OSError, and is not closed."""
    read, write = os.pipe()
    for attach in (StatusReader, StatusWriter):
        with pytest.raises(OSError, match=r"."):
            attach(read)
    os.close(read)
    os.close(write)


@pytest.mark.timing
def test_a_step_costs_little(page):
    """Beginning and ending a step takes a few microseconds at most."""
    best = min(_seconds_of_steps(page.writer) for _ in range(5))
    assert best / 1000 < 25e-6  # generous: 1 µs on a quiet machine


def _seconds_of_steps(writer):
    began = time.perf_counter()
    for _ in range(1000):
        writer.step_begin()
        writer.step_end(1, 1)
    return time.perf_counter() - began


def test_strays_are_on_the_page(page):
    """Processes that left the engine's group can be read from the page, as many as there is room for."""
    writer, reader = page.writer, page.reader
    assert reader.strays() == []
    writer.set_strays([(11, 12), (13, 14)])
    assert reader.strays() == [(11, 12), (13, 14)]
    writer.set_strays([(number, 1) for number in range(1000)])
    assert len(reader.strays()) == MOST_STRAYS
    writer.set_strays([])
    assert reader.strays() == []
