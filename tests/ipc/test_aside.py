"""Code that must not be interrupted half way runs aside."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from engine_client.ipc import aside
from engine_client.ipc.aside import run_aside
from helpers.procs import run_script
from helpers.timing import took_at_most


def test_results_and_errors_are_passed_on():
    """What the function returns is returned, and what it raises is raised."""
    assert run_aside(lambda: 5) == 5
    for error in (KeyError("x"), SystemExit(3)):

        def fail(error=error):
            raise error

        with pytest.raises(type(error)) as caught:
            run_aside(fail)
        assert caught.value is error


def test_it_runs_beside_the_main_thread_only():
    """From the main thread it runs on another one, which is gone afterwards; from any other it runs right there."""
    assert run_aside(threading.current_thread) is not threading.main_thread()
    assert threading.active_count() == 1
    seen = []
    thread = threading.Thread(target=lambda: seen.append(run_aside(threading.current_thread)))
    thread.start()
    thread.join()
    assert seen == [thread]


def test_interrupts_wait_for_the_end():
    """A handler that raises, again and again, does so after the function has ended; the first one counts."""
    begun = []

    def work():
        begun.append(1)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        begun.append(2)

    with took_at_most(5), pytest.raises(KeyboardInterrupt):
        run_aside(work)
    assert begun == [1, 2]


def test_an_interrupted_start_runs_it_once(monkeypatch):
    """When starting the thread is interrupted, before or after it runs, the function runs exactly once."""
    real = threading.Thread.start
    for after in (False, True):
        ran = []
        interrupts = [KeyboardInterrupt()]

        def start(thread, after=after, interrupts=interrupts):
            if after:
                real(thread)
            if interrupts:
                raise interrupts.pop()
            if not after:
                real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        if after:
            with pytest.raises(KeyboardInterrupt):
                run_aside(lambda ran=ran: ran.append(1))
        else:
            with pytest.raises(KeyboardInterrupt):
                run_aside(lambda ran=ran: ran.append(1))
        assert ran == [1]
        monkeypatch.undo()


def test_without_threads_it_runs_here(monkeypatch):
    """Where no thread can be started it runs on the caller's own."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert run_aside(threading.current_thread) is threading.main_thread()


def test_blocked_signals_are_delivered_afterwards():
    """A signal that comes inside of the block is handled at its end, and the mask is what it was."""
    # In a process of its own: a library's threads would take the signal here.
    run_script(
        """
        import os, signal
        from engine_client.ipc.aside import signals_blocked
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        reached = []
        try:
            with signals_blocked():
                os.kill(os.getpid(), signal.SIGINT)
                reached.append(1)
            reached.append(2)
        except KeyboardInterrupt:
            reached.append(3)
        assert reached == [1, 3], reached
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        """
    ).check()


def test_a_function_that_hangs_can_be_interrupted(monkeypatch):
    """Some time after the interrupt the caller is let go, whatever the function does."""
    monkeypatch.setattr(aside, "_PATIENCE", 0.1)
    over = threading.Event()

    def hang():
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(20)

    with took_at_most(5), pytest.raises(KeyboardInterrupt):
        run_aside(hang)
    over.set()
