"""A selector is interrupted by threads, finalizers and signal handlers, and never by accident."""

from __future__ import annotations

import os
import select
import signal
import threading

import pytest

from engine_client.ipc.wakeup import Wakeup
from helpers.procs import run_script
from helpers.timing import DEADLOCK


def is_readable(wakeup: Wakeup, timeout: float = 0) -> bool:
    return bool(select.select([wakeup.fileno()], [], [], timeout)[0])


@pytest.fixture
def wakeup():
    wakeup = Wakeup()
    yield wakeup
    wakeup.close()


def test_wakeup_makes_it_readable_and_clear_undoes_it(wakeup):
    """The descriptor is readable exactly between wakeup and clear."""
    assert not is_readable(wakeup)
    wakeup.wakeup()
    assert is_readable(wakeup)
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.clear()
    assert not is_readable(wakeup)


def test_many_wakeups_are_one(wakeup):
    """More wakeups than the pipe has room for neither block nor raise, and one clear takes all of them."""
    for _ in range(70_000):
        wakeup.wakeup()
    assert is_readable(wakeup)
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.wakeup()
    assert is_readable(wakeup)


def test_close_is_sticky_and_idempotent():
    """After close nothing happens: fileno is -1, wakeup and clear do nothing, both descriptors are gone."""
    wakeup = Wakeup()
    fd = wakeup.fileno()
    assert repr(wakeup) == f"<Wakeup fd={fd}>"
    wakeup.close()
    wakeup.close()
    wakeup.wakeup()
    wakeup.clear()
    assert wakeup.fileno() == -1
    assert repr(wakeup) == "<Wakeup closed>"
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_dropping_it_closes_it():
    """Without close, the last reference takes the descriptors along."""
    wakeup = Wakeup()
    fd = wakeup.fileno()
    del wakeup
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_both_ends_are_closed_when_there_is_room_for_one_only(monkeypatch):
    """Running out of descriptors in the constructor raises OSError and leaks nothing (the leak guard looks)."""

    def refuse(fd):
        os.close(fd)
        raise OSError(24, "too many open files")

    monkeypatch.setattr("engine_client.ipc.wakeup.above_stdio", refuse)
    with pytest.raises(OSError, match="too many"):
        Wakeup()


def test_the_first_end_is_closed_when_the_second_cannot_be_moved(monkeypatch):
    """The same, one descriptor later."""
    calls = []

    def refuse_second(fd):
        calls.append(fd)
        if len(calls) == 2:
            os.close(fd)
            raise OSError(24, "too many open files")
        return fd

    monkeypatch.setattr("engine_client.ipc.wakeup.above_stdio", refuse_second)
    with pytest.raises(OSError, match="too many"):
        Wakeup()


def test_a_selecting_thread_is_woken(wakeup):
    """A thread that blocks in select returns when another thread wakes it."""
    woken = threading.Event()

    def wait():
        if is_readable(wakeup, DEADLOCK):
            woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    wakeup.wakeup()
    assert woken.wait(DEADLOCK)
    thread.join()


def test_a_signal_handler_may_wake(wakeup):
    """A handler that interrupts wakeup itself, over and over, neither deadlocks nor loses the wakeup."""
    calls = []

    def handler(signum, frame):
        calls.append(signum)
        wakeup.wakeup()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        while len(calls) < 50:
            wakeup.wakeup()
        signal.setitimer(signal.ITIMER_REAL, 0)
        wakeup.clear()
        handler(0, None)
        assert is_readable(wakeup)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_closing_under_fire_never_hits_another_descriptor():
    """While threads wake and close, no byte of a wakeup lands in a descriptor that got the number afterwards."""
    stop = threading.Event()
    current = [Wakeup()]

    def fire():
        while not stop.is_set():
            current[0].wakeup()

    threads = [threading.Thread(target=fire) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(500):
            old, current[0] = current[0], Wakeup()
            old.close()
            read, write = os.pipe()
            os.set_blocking(read, False)
            with pytest.raises(BlockingIOError):
                os.read(read, 1)
            os.close(read)
            os.close(write)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        current[0].close()


def test_it_stays_clear_of_closed_standard_streams():
    """In a process without descriptors 0 to 2 a wakeup gets numbers of 3 and above."""
    run_script("""
        import os
        from engine_client.ipc.wakeup import Wakeup

        for fd in range(3):
            os.close(fd)
        wakeup = Wakeup()
        os._exit(0 if wakeup.fileno() >= 3 and not os.get_inheritable(wakeup.fileno()) else 1)
    """).check()


def test_it_may_live_until_interpreter_exit():
    """A wakeup in a module's globals or in a reference cycle causes no noise at exit."""
    run_script("""
        from engine_client.ipc.wakeup import Wakeup

        kept = Wakeup()
        cycle = [Wakeup()]
        cycle.append(cycle)
    """).check()
