"""The guard fails on what is left, waits for what is going, and takes leftover processes away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from engine_client.testing.inventory import describe_process, is_running, key_of
from engine_client.testing.leaks import LeakError, LeakGuard, eventually
from helpers.procs import start_orphan

MARK = "ENGINE_CLIENT_LEAK_GUARD"
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_clean_block():
    """A block that leaves nothing passes, at once."""
    began = time.monotonic()
    with LeakGuard() as guard:
        fds = os.pipe()
        assert len(guard.leaks()) == 2
        for fd in fds:
            os.close(fd)
    assert time.monotonic() - began < 1


def test_descriptor_is_left():
    """A descriptor that stays open is named, with the stacks of this process."""
    fds: list[int] = []
    with pytest.raises(LeakError, match=r"descriptor \d+: pipe") as caught, LeakGuard(0.05):
        fds += os.pipe()
    assert "test_descriptor_is_left" in str(caught.value)
    for fd in fds:
        os.close(fd)


def test_child_is_left():
    """A child that runs on is named, killed and reaped."""
    with pytest.raises(LeakError, match="process") as caught, LeakGuard(0.05):
        child = subprocess.Popen(SLEEPER)
        key = key_of(child.pid)
    assert f"process {child.pid}, child of {os.getpid()}" in str(caught.value)
    assert not is_running(key)
    child.wait()


def test_orphan_is_left():
    """A process whose parent is gone is found and killed."""
    with pytest.raises(LeakError, match="sleep 60"), LeakGuard(0.05):
        pid = start_orphan()
    # Nobody here reaps it: that is for whoever it was given to.
    eventually(lambda: key_of(pid) is None or "state Z" in describe_process(key_of(pid)))


def test_patience():
    """What goes within the patience is no leak."""
    with LeakGuard(10):
        threading.Thread(target=time.sleep, args=(0.1,)).start()


def test_cycle_is_collected():
    """What only a reference cycle holds is collected, not reported."""
    with LeakGuard(10):
        holder = [open(os.devnull)]  # noqa: SIM115  # left open on purpose
        file = holder[0]
        holder.append(holder)
        os.set_inheritable(file.fileno(), False)
        del file
        fd = os.dup(holder[0].fileno())

        class Owner:
            def __del__(self):
                os.close(fd)

        owner = Owner()
        owner.itself = owner
        holder[0].close()
        del owner


def test_error_passes_through():
    """An error in the block is not hidden by what it left behind, and its processes are killed."""
    with pytest.raises(ZeroDivisionError), LeakGuard(0.05):
        child = subprocess.Popen(SLEEPER)
        key = key_of(child.pid)
        raise ZeroDivisionError
    assert not is_running(key)
    child.wait()


def test_nested_guards_leave_the_environment_alone(monkeypatch):
    """The mark of the outer guard is back, or gone, when the inner one ends; both see an orphan."""
    monkeypatch.delenv(MARK, raising=False)
    before = dict(os.environ)
    with LeakGuard() as outer:
        outer_mark = os.environ[MARK]
        with LeakGuard():
            assert outer_mark in os.environ[MARK]
            with subprocess.Popen(SLEEPER) as child:
                assert any(f"process {child.pid}" in line for line in outer.leaks())
                child.kill()
        assert os.environ[MARK] == outer_mark
    assert dict(os.environ) == before


def test_repr():
    """The guard shows whether it is armed."""
    guard = LeakGuard()
    assert "idle" in repr(guard)
    with guard:
        assert "armed" in repr(guard)


def test_stacks_of_a_leftover_engine():
    """A leftover process that writes its stacks on SIGUSR2 into nameless memory is asked for them."""
    script = """
import faulthandler, os, signal, time
fd = os.memfd_create("engine_client-faults")
faulthandler.register(signal.SIGUSR2, fd, all_threads=True)
def waiting_for_nothing():
    print(flush=True)
    time.sleep(60)
waiting_for_nothing()
"""
    with pytest.raises(LeakError, match="stacks of process") as caught, LeakGuard(0.05):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        child.stdout.readline()
        child.stdout.close()
    assert "waiting_for_nothing" in str(caught.value)
    child.wait()


@pytest.mark.parametrize("memory", ["", "import os; fd = os.memfd_create('engine_client-faults')\n"])
def test_leftover_process_that_does_not_answer(memory):
    """A process that catches SIGUSR2 and writes nothing, or has no memory for it, is reported without stacks."""
    script = "import signal, time; signal.signal(signal.SIGUSR2, lambda *_: None); print(flush=True)\n"
    with pytest.raises(LeakError) as caught, LeakGuard(0.05):
        child = subprocess.Popen([sys.executable, "-c", memory + script + "time.sleep(60)"], stdout=subprocess.PIPE)
        child.stdout.readline()
        child.stdout.close()
    assert "stacks of process" not in str(caught.value)
    child.wait()


def test_eventually():
    """The first true value is returned; one that never comes is an AssertionError that names the condition."""
    values = iter([0, None, "", 7])
    assert eventually(lambda: next(values)) == 7

    def never():
        return 0

    with pytest.raises(AssertionError, match=r"never is still 0 after 0\.02 s"):
        eventually(never, 0.02)
