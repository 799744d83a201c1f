"""Processes die and hang as asked; the link delays, cuts and changes what passes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from engine_client.testing.faults import DEATHS, FaultyLink, die, frozen, start_grandchild
from engine_client.testing.inventory import describe_process, key_of
from helpers.procs import run_script, wait_gone
from helpers.timing import eventually

EXITS = {"sigkill": -9, "sigsegv": -11, "sigterm": -15, "exit0": 0, "exit3": 3, "system_exit": 7}


@pytest.mark.crash
@pytest.mark.parametrize("how", DEATHS)
def test_die(how):
    """A process ends in the way that was asked for."""
    result = run_script(f"from engine_client.testing.faults import die; die({how!r})", env={"PYTHONFAULTHANDLER": None})
    result.check(EXITS[how])


def test_die_by_system_exit():
    """In a process that goes on, SystemExit is an exception like others."""
    with pytest.raises(SystemExit, match="7"):
        die("system_exit")


def test_die_by_exit(monkeypatch):
    """The exit statuses are handed to the system."""

    def record(status):
        raise InterruptedError(status)

    monkeypatch.setattr(os, "_exit", record)
    with pytest.raises(InterruptedError, match="3"):
        die("exit3")


def test_die_by_a_signal_that_is_handled():
    """A death that a signal handler takes over does not return to its caller."""

    def handler(number, frame):
        raise InterruptedError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(InterruptedError):
            die("sigterm")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_die_waits_for_the_handler(monkeypatch):
    """While a handler ends the process, the one that dies sleeps."""
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            raise InterruptedError

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    monkeypatch.setattr(time, "sleep", nap)
    try:
        with pytest.raises(InterruptedError):
            die("sigterm")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert naps == [1, 1]


def test_hold_gil():
    """No other thread runs meanwhile."""
    result = run_script("""
        import threading, time
        from engine_client.testing.faults import hold_gil
        beats = []
        def beat():
            while True:
                beats.append(time.monotonic())
                time.sleep(0.01)
        threading.Thread(target=beat, daemon=True).start()
        time.sleep(0.05)
        began = time.monotonic()
        hold_gil(0.5)
        ended = time.monotonic()
        assert ended - began >= 0.5
        assert sum(began + 0.05 < beat < ended - 0.05 for beat in beats) == 0, beats
    """)
    result.check()


@pytest.mark.crash
@pytest.mark.parametrize("new_session", [False, True])
def test_grandchild(new_session):
    """A stubborn grandchild survives SIGTERM; it is in a session of its own if asked for."""
    pid = start_grandchild(new_session=new_session)
    key = key_of(pid)
    try:
        assert (os.getsid(pid) == pid) is new_session
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)
        assert "state S" in describe_process(key)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    wait_gone(key)


def test_grandchild_cannot_be_started(monkeypatch):
    """A start that fails leaves no descriptor."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        start_grandchild(stubborn=False)


@pytest.mark.crash
def test_frozen():
    """A process is stopped inside the block and goes on after it, or may be gone by then."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        key = key_of(child.pid)
        with frozen(child.pid):
            eventually(lambda: "state T" in describe_process(key))
        eventually(lambda: "state T" not in describe_process(key))
        with frozen(child.pid):
            child.kill()
            child.wait()


def test_link_passes_bytes_on():
    """Without faults, both directions are whole, and the end of one side is the end of the other."""
    with FaultyLink() as link:
        link.left.sendall(b"ping")
        assert link.right.recv(10) == b"ping"
        link.right.sendall(b"pong")
        assert link.left.recv(10) == b"pong"
        assert link.passed == 4
        assert repr(link) == "<FaultyLink open passed=4>"
        link.left.close()
        assert link.right.recv(10) == b""
        link.close()
        assert repr(link) == "<FaultyLink closed passed=4>"


def test_link_ends_with_the_right_side():
    """The end of the right side reaches the left side."""
    with FaultyLink() as link:
        link.right.close()
        assert link.left.recv(10) == b""


def test_link_in_pieces():
    """Bytes arrive late and one by one."""
    with FaultyLink(piece=1, delay=0.01) as link:
        began = time.monotonic()
        link.left.sendall(b"abc")
        received = [link.right.recv(10)]
        while sum(map(len, received)) < 3:
            received.append(link.right.recv(10))
        assert b"".join(received) == b"abc"
        assert time.monotonic() - began >= 0.03


def test_link_is_cut():
    """After so many bytes both sides see the end."""
    with FaultyLink(cut_after=3) as link:
        link.left.sendall(b"abcdef")
        assert link.right.recv(10) == b"abc"
        assert link.right.recv(10) == b""
        assert link.left.recv(10) == b""


def test_link_changes_bytes():
    """Bytes can be changed on the way, or dropped."""
    with FaultyLink(change=lambda piece: piece.replace(b"x", b"")) as link:
        link.left.sendall(b"axb")
        assert link.right.recv(10) == b"ab"


def test_link_stalls():
    """Nothing passes while the link is stalled, and all of it afterwards; a stalled link can be closed."""
    with FaultyLink() as link:
        link.left.sendall(b"a")
        assert link.right.recv(10) == b"a"
        link.stall()
        link.right.settimeout(0.05)
        link.left.sendall(b"b")
        # A piece that was waited for already still passes; the next one does not.
        time.sleep(0.05)
        link.left.sendall(b"c")
        received = b""
        with pytest.raises(TimeoutError):
            while True:
                received += link.right.recv(10)
        link.resume()
        link.right.settimeout(None)
        while received != b"bc":
            received += link.right.recv(10)
        link.stall()
        link.left.sendall(b"d")


def test_link_whose_far_end_is_gone():
    """Bytes for a side that is gone cut the link."""
    with FaultyLink(delay=0.05) as link:
        link.left.sendall(b"abc")
        link.right.close()
        assert link.left.recv(10) == b""
