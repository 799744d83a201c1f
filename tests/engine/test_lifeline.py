"""The launcher's death ends the engine and all below it: with real launchers, engines, and signals (BC-03, BC-61)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client.engine import lifeline
from engine_client.engine.lifeline import Lifeline
from engine_client.ipc.processes import Descendant, Stat
from engine_client.testing.inventory import marked_processes
from helpers.launched import started
from helpers.procs import key_of, run_script, script_environment, wait_gone
from helpers.timing import DEADLOCK, eventually

pytestmark = pytest.mark.crash

# Launches one child, gives it the orders in argv, says which processes there are, and waits for its end.
DRIVER = """
import json, os, signal, subprocess, sys, threading, time
from helpers.launched import start
entry, method, *orders = sys.argv[1:]
child = start(entry, method)
pids = {"child": child.hear()["pid"]}
for order in orders:
    child.ask(json.loads(order))
    pids[order] = child.hear().get("pid")
THEN
print(json.dumps(pids), flush=True)
time.sleep(600)
"""


class Driver:
    """A launcher in a process of its own."""

    def __init__(self, entry: str, *orders: dict[str, Any], method: str = "exec", then: str = "pass") -> None:
        self.mark = f"lifeline-{os.getpid()}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER.replace("THEN", then), entry, method, *map(json.dumps, orders)],
            env=script_environment(ENGINE_CLIENT_TEST_RUN=self.mark),
            stdout=subprocess.PIPE,
        )
        self.pids: dict[str, int] = json.loads(self.process.stdout.readline() or "{}")

    def close(self) -> None:
        self.process.kill()
        self.process.stdout.close()
        self.process.wait()
        for key in marked_processes(self.mark):
            with suppress(OSError):
                os.kill(key.pid, signal.SIGKILL)


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    drivers = []

    def make(*args: Any, **kwargs: Any) -> Driver:
        drivers.append(Driver(*args, **kwargs))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


def all_gone(driver: Driver, timeout: float = 5.0) -> None:
    """Wait until nothing of a run is left, zombies apart: a container's first process takes its time to reap them."""

    def is_left() -> bool:
        pids = {key.pid for key in marked_processes(driver.mark)} | set(driver.pids.values()) - {None}
        return any(not is_zombie(pid) for pid in pids)

    eventually(lambda: not is_left(), timeout)


def is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("what", [{}, {"native": "free"}, {"native": "holds the GIL"}], ids=str)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV, signal.SIGABRT])
def test_the_end_of_the_launcher_ends_the_engine(drive, what, signum):
    """However the launcher ends, the engine is gone within two seconds, whatever it is doing."""
    driver = drive("armed", *([what] if what else []))
    driver.process.send_signal(signum)
    driver.process.wait()
    began = time.monotonic()
    all_gone(driver, 2.0)
    assert time.monotonic() - began < 2.0


def test_grandchildren_end_too(drive):
    """Children of the engine end with it, forked or started, and once guarded also those in a session of their own."""
    orders = [{"spawn": "group"}, {"spawn": "session"}, {"fork": "group"}, {"fork": "session"}, {"guard": 1}]
    driver = drive("armed", *orders, {"native": "holds the GIL"})
    assert len({pid for pid in driver.pids.values() if pid}) == 5
    driver.process.kill()
    driver.process.wait()
    all_gone(driver)


@pytest.mark.parametrize("entry", ["armed_without_signals", "armed_without_pidfd"])
def test_each_way_works_alone(drive, entry):
    """Where the kernel has no pidfd, or cannot send SIGKILL for a descriptor, the other way ends everything."""
    driver = drive(entry, {"spawn": "group"}, {"spawn": "session"}, {"guard": 1})
    driver.process.kill()
    driver.process.wait()
    all_gone(driver)


@pytest.mark.parametrize("entry", ["armed", "armed_without_pidfd", "armed_by_nothing_but_looks"])
def test_a_forked_copy_of_the_launcher_does_not_keep_the_engine(drive, entry):
    """The launcher's death counts although a forked copy of it holds the lifeline's other end."""
    driver = drive(entry, then="if os.fork() == 0: time.sleep(600)")
    key = key_of(driver.pids["child"])
    driver.process.kill()
    driver.process.wait()
    eventually(lambda: is_zombie(key.pid), 5.0)
    assert marked_processes(driver.mark)  # the copy is not ours to end


def test_an_engine_whose_launcher_died_before_it_was_armed_ends(drive):
    """An engine that finds its launcher dead when it arms its lifeline ends at once."""
    driver = drive("armed_late")
    driver.process.kill()
    driver.process.wait()
    all_gone(driver)


def test_a_subreaper_does_not_hide_the_death(drive):
    """Under a sub-reaper, which adopts orphans instead of process 1, the engine ends all the same."""
    result = run_script(
        """
        import ctypes, os, signal, subprocess, sys, time
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        code = (
            "import time; from helpers.launched import start; child = start('armed');"
            "print(child.hear()['pid'], flush=True); time.sleep(600)"
        )
        driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        pid = int(driver.stdout.readline())
        driver.kill()
        driver.communicate()
        began = time.monotonic()
        assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
        assert time.monotonic() - began < 2
        """
    )
    result.check()


@pytest.mark.slow
def test_no_moment_of_the_start_is_unprotected():
    """A launcher killed at any of 100 random moments between start and later leaves nothing behind."""
    code = (
        "import os, sys, time; from helpers.launched import start\n"
        "os.write(1, b'.'); child = start('armed'); child.hear(); time.sleep(600)"
    )
    mark = f"moments-{os.getpid()}-{time.monotonic_ns()}"
    environment = script_environment(ENGINE_CLIENT_TEST_RUN=mark)
    generator = random.Random(61)
    for _ in range(100):
        driver = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        driver.stdout.read(1)
        time.sleep(generator.uniform(0, 0.08))
        driver.kill()
        driver.wait()
        driver.stdout.close()
    eventually(lambda: not [key for key in marked_processes(mark) if not is_zombie(key.pid)], 5.0)


def test_the_launching_thread_may_end():
    """The engine lives on when the thread that launched it ends."""
    with ExitStack() as stack:
        found = []
        thread = threading.Thread(target=lambda: found.append(stack.enter_context(started("armed"))))
        thread.start()
        thread.join()
        child = found[0]
        assert child.hear()
        time.sleep(0.3)  # the kernel's parent-death signal would have come at once
        child.ask({"fork": "group"})
        assert child.hear()["pid"]


def test_closing_the_lifeline_ends_the_engine():
    """A launcher that lives can end the engine by closing its end of the lifeline."""
    with started("armed") as child:
        pid = child.hear()["pid"]
        child.ends.close_lifeline()
        child.handle.join(5)
        assert child.handle.exitcode == -signal.SIGKILL
        child.handle.reap()
        wait_gone(pid)


def test_an_engine_that_ends_by_itself_kills_nobody():
    """Forked children of an engine that ended are not hit by what was armed, until the launcher ends."""
    with started("armed") as child:
        child.hear()
        child.ask({"fork": "group"})
        pid = child.hear()["pid"]
        child.ask({"return": 1})
        child.handle.join(10)
        assert child.handle.exitcode == 0
        time.sleep(0.1)
        assert not is_zombie(pid)
        child.ends.close_lifeline()
        eventually(lambda: is_zombie(pid), 5.0)


# -- in this process, with everything harmful replaced --


@pytest.fixture
def harmless(monkeypatch) -> list[tuple[Any, ...]]:
    """Record what would be killed."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(lifeline, "tie", lambda fd, owner: calls.append(("owner", owner)))
    monkeypatch.setattr(os, "kill", lambda pid, signum: calls.append(("kill", pid, signum)))
    monkeypatch.setattr(os, "killpg", lambda group, signum: calls.append(("killpg", group, signum)))
    return calls


@pytest.fixture
def pipe() -> Iterator[list[int]]:
    ends = list(os.pipe())
    yield ends
    for fd in ends:
        if fd >= 0:
            os.close(fd)


def hang_up(pipe: list[int]) -> None:
    os.close(pipe[1])
    pipe[1] = -1


def test_a_hung_up_lifeline_ends_at_once(harmless, pipe):
    """A lifeline whose other end is closed already ends everything while it is armed."""
    ended = threading.Event()
    hang_up(pipe)
    line = Lifeline(pipe[0], os.getppid(), lambda strays: ended.set())
    line.arm()
    assert ended.is_set()
    finish(line)


def test_a_dead_launcher_ends_at_once(harmless, pipe):
    """A launcher that is gone ends everything, although somebody holds the lifeline's other end."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ended = []
    line = Lifeline(pipe[0], child.pid, ended.append)
    line.arm()
    assert ended
    hang_up(pipe)
    finish(line)


def test_the_watcher_sees_the_hang_up(harmless, pipe):
    """The watcher thread ends everything when the lifeline hangs up."""
    ended = threading.Event()
    line = Lifeline(pipe[0], os.getppid(), lambda strays: ended.set())
    line.arm()
    assert not ended.is_set()
    hang_up(pipe)
    assert ended.wait(DEADLOCK)
    finish(line)


def test_the_watcher_looks_where_it_cannot_watch(harmless, pipe, monkeypatch):
    """Without a pidfd the watcher looks now and then whether the launcher lives."""
    monkeypatch.setattr(lifeline, "has_pidfd", lambda: False)
    monkeypatch.setattr(lifeline, "_LOOK", 0.01)
    alive = [True, True, True, False]
    monkeypatch.setattr(lifeline, "is_launcher_alive", lambda pid: alive.pop(0) if alive else False)
    ended = threading.Event()
    line = Lifeline(pipe[0], 1, lambda strays: ended.set())
    line.arm()
    assert ended.wait(DEADLOCK)
    finish(line)


def finish(line: Lifeline) -> None:
    for thread in threading.enumerate():
        if thread.name == "engine-lifeline":
            thread.join(DEADLOCK)
    if line.pidfd >= 0:
        os.close(line.pidfd)


@pytest.mark.parametrize("leads", [True, False])
def test_only_a_group_of_our_own_is_killed(harmless, monkeypatch, leads):
    """A process that leads its group kills the group, another kills only itself."""
    monkeypatch.setattr(os, "getpgrp", lambda: os.getpid() if leads else 1)
    lifeline.kill_everything(())
    own = os.getpid()
    killed = [("killpg", own, signal.SIGKILL)] if leads else []
    assert harmless == [*killed, ("kill", own, signal.SIGKILL)]


def test_a_stray_is_tied_to_the_lifeline(harmless, pipe, monkeypatch):
    """A process below us in a session of its own is guarded, killed by the watcher too, and let go of at its end."""
    killed = []
    monkeypatch.setattr(Descendant, "kill", lambda stray: killed.append(stray.pid))
    line = Lifeline(pipe[0], os.getppid())
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        pidfd = os.pidfd_open(child.pid)
        try:
            line.guard_descendants()
            line.guard_descendants()
            assert harmless == [("owner", -child.pid)]
            lifeline.kill_everything(line.strays)
            assert killed == [child.pid]
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # os.kill is replaced here
            os.close(pidfd)
            child.wait()
        line.guard_descendants()
        assert not line.guards


def test_what_moved_while_we_looked_is_not_guarded(harmless, pipe, monkeypatch):
    """A guard whose process changed its group meanwhile is dropped, since the group may be a stranger's by now."""
    groups = [111, 222]
    stray = SimpleNamespace(pid=1234, started=5, group=lambda: groups.pop(0))
    monkeypatch.setattr(lifeline, "descendants", lambda pid: [stray])
    line = Lifeline(pipe[0], os.getppid())
    line.guard_descendants()
    assert harmless == [("owner", 1234)]  # the group's leader is not below us, so the process alone
    assert not line.guards


def test_without_proc_nothing_can_be_guarded(harmless, pipe, monkeypatch):
    """Where a pipe cannot be opened once more, guarding does nothing, and the watcher knows the strays."""
    monkeypatch.setattr(lifeline, "descendants", lambda pid: [SimpleNamespace(pid=1234, started=5, group=lambda: 1234)])
    monkeypatch.setattr(lifeline, "reopen", lambda fd: None)
    line = Lifeline(pipe[0], os.getppid())
    line.guard_descendants()
    assert not harmless
    assert len(line.strays) == 1


def test_a_pipe_can_be_reopened(pipe):
    """Another descriptor of the same pipe hangs up with it; a closed one has none."""
    fd = lifeline.reopen(pipe[0])
    hang_up(pipe)
    assert os.read(fd, 1) == b""
    os.close(fd)
    assert lifeline.reopen(fd) is None


def test_the_kernel_may_refuse(pipe, monkeypatch):
    """Neither a system without such signals nor one that forbids them keeps an engine from running."""
    lifeline.tie(1_000_000, os.getpid())
    monkeypatch.delattr("fcntl.F_SETSIG")
    lifeline.tie(pipe[0], os.getpid())


def test_a_launcher_is_known_by_its_start(monkeypatch):
    """Whoever has the launcher's pid counts as the launcher only if it is our parent, or was there before us."""
    stats = {1: Stat("S", 0, 10), 2: Stat("S", 1, 30), 3: Stat("Z", 1, 10), os.getpid(): Stat("R", 1, 20)}
    monkeypatch.setattr(lifeline, "stat_of", stats.get)
    assert lifeline.is_launcher_alive(os.getppid())
    assert lifeline.is_launcher_alive(1)
    assert not lifeline.is_launcher_alive(2)  # started after us: the pid was used again
    assert not lifeline.is_launcher_alive(3)
    assert not lifeline.is_launcher_alive(4)
    stats.clear()
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert lifeline.is_launcher_alive(1)  # no /proc to tell otherwise


def test_a_look_costs_nothing_while_nothing_changes(harmless, pipe, monkeypatch):
    """Descendants are searched only when the children of this process have changed since the last look."""
    searched = []
    monkeypatch.setattr(lifeline, "descendants", lambda pid: searched.append(pid) or [])
    children = [b"", b"", b"7 ", b"7 ", b"7 8 ", None, None]
    monkeypatch.setattr(lifeline, "children_of_this_process", lambda: children.pop(0))
    line = Lifeline(pipe[0], os.getppid())
    seen = []
    while children:
        line.look()
        seen.append(len(searched))
    assert seen == [0, 0, 1, 1, 2, 3, 4]


def test_strays_are_told(harmless, pipe, monkeypatch):
    """Whoever keeps account of strays learns their pids and starts."""
    monkeypatch.setattr(lifeline, "descendants", lambda pid: [SimpleNamespace(pid=1234, started=5, group=lambda: 1234)])
    monkeypatch.setattr(lifeline, "reopen", lambda fd: None)
    monkeypatch.setattr(lifeline, "children_of_this_process", lambda: b"1234 ")
    line = Lifeline(pipe[0], os.getppid())
    told = []
    line.on_strays = told.append
    line.started()
    assert told == [[(1234, 5)]]


def test_a_look_that_fails_does_not_end_the_watch(harmless, pipe, monkeypatch):
    """While the engine is being built the watcher looks around, and watches on whatever becomes of a look."""
    looked = threading.Event()

    def fail(self) -> None:
        looked.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Lifeline, "look", fail)
    monkeypatch.setattr(lifeline, "_LOOK_AT_START", 0.01)
    ended = threading.Event()
    line = Lifeline(pipe[0], os.getppid(), lambda strays: ended.set())
    line.arm()
    assert looked.wait(DEADLOCK)
    assert not ended.is_set()
    hang_up(pipe)
    assert ended.wait(DEADLOCK)
    finish(line)
