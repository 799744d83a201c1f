"""Ending engines: politely, by force, all at once, and nothing but them (BC-40, BC-42, BC-55)."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import threading
import time
from contextlib import suppress

import pytest

from engine_client.deadline import Deadline
from engine_client.ipc import process_group
from engine_client.ipc.process_group import ProcessGroup
from helpers.launched import start
from helpers.procs import run_script
from helpers.timing import DEADLOCK, eventually, took_at_most

pytestmark = pytest.mark.crash


class Group:
    """A process group with children whose channels the test holds."""

    def __init__(self) -> None:
        self.group = ProcessGroup()
        self.children = []

    def start(self, entry="obey", method="exec"):
        child = start(entry, method)
        self.group.add(len(self.children), child.handle)
        self.children.append(child)
        child.pid = child.hear()["pid"]
        return child

    def ask(self) -> None:
        """Hang up: children that listen end by themselves."""
        for child in self.children:
            with suppress(OSError):
                child.ends.channel.shutdown(2)

    def shutdown(self, timeout: float | None, **options):
        return self.group.shutdown(Deadline(timeout), self.ask, **options)


@pytest.fixture
def many():
    group = Group()
    yield group
    for child in group.children:
        child.close()
    group.group.close()


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_idle(many):
    """An engine that listens ends when asked, in no time, and is reaped."""
    child = many.start()
    with took_at_most(0.5):
        assert many.shutdown(10) == {0: "asked"}
    assert many.group.exit_name(0) == "exit code 0"
    assert child.handle.is_reaped
    assert repr(many.group) == "<ProcessGroup {0: exit code 0}>"
    with took_at_most(0.1):
        assert many.shutdown(10) == {0: "asked"}


def test_one_that_does_not_listen(many):
    """An engine that does not listen gets SIGTERM after half the time."""
    many.start()
    with took_at_most(1.5) as elapsed:
        assert many.group.shutdown(Deadline(0.6), lambda: None) == {0: "terminated"}
    assert elapsed.seconds >= 0.3
    assert many.group.exit_name(0) == "SIGTERM(-15)"


def test_one_that_ignores_sigterm(many, caplog):
    """An engine that ignores SIGTERM is killed at the deadline, and the log says so."""
    child = many.start("ignore_sigterm")
    with took_at_most(1.6) as elapsed:
        assert many.shutdown(0.6) == {0: "killed"}
    assert elapsed.seconds >= 0.6
    assert many.group.exit_name(0) == "SIGKILL(-9)"
    record = caplog.records[0]
    assert (record.name, record.levelno) == ("engine_client.session", logging.WARNING)
    assert f"rank 0 (pid {child.pid}) did not end within 0.6 s" in record.getMessage()


def test_one_that_is_stopped(many, caplog):
    """An engine that is stopped goes on with SIGTERM, and ends in time."""
    child = many.start()
    os.kill(child.pid, signal.SIGSTOP)
    with took_at_most(1.6):
        assert many.shutdown(0.6) == {0: "terminated"}
    assert not caplog.records


def test_one_that_is_stopped_and_ignores_sigterm(many):
    """An engine that is stopped and would ignore SIGTERM is killed at the deadline."""
    child = many.start("ignore_sigterm")
    os.kill(child.pid, signal.SIGSTOP)
    with took_at_most(1.6):
        assert many.shutdown(0.6) == {0: "killed"}


@pytest.mark.slow
def test_one_that_flushes(many, tmp_path, caplog):
    """An engine that needs three seconds to flush gets them from a timeout of five."""
    child = many.start("flush_when_asked")
    child.ask({"path": str(tmp_path / "file"), "seconds": 3})
    child.hear()
    with took_at_most(5):
        many.shutdown(5)
    assert (tmp_path / "file").read_text().endswith("all\n")
    assert many.group.exit_name(0) == "exit code 0"
    assert not caplog.records


def test_one_that_flushes_too_long(many, tmp_path, caplog):
    """An engine that needs three seconds to flush is cut short by a timeout of one, and the log says so."""
    child = many.start("flush_when_asked")
    child.ask({"path": str(tmp_path / "file"), "seconds": 3})
    child.hear()
    with took_at_most(2):
        assert many.shutdown(1) == {0: "killed"}
    text = (tmp_path / "file").read_text()
    assert "flushed" in text
    assert "all" not in text
    assert "cut short" in caplog.text


@pytest.mark.parametrize("entry", ["obey", "ignore_sigterm"])
def test_no_time_at_all(many, entry):
    """With a timeout of zero the engine is gone at once, and reaped."""
    child = many.start(entry)
    with took_at_most(1):
        many.shutdown(0)
    assert not os.path.exists(f"/proc/{child.pid}")


def test_all_the_time(many):
    """Without a timeout a shutdown waits for as long as the engine takes."""
    many.start()
    timer = threading.Timer(0.5, many.ask)
    timer.start()
    assert many.group.shutdown(Deadline(None), lambda: None) == {0: "asked"}
    timer.join()


@pytest.mark.parametrize("pidfd", [True, False])
def test_ten_take_the_time_of_the_slowest(many, monkeypatch, tmp_path, pidfd):
    """Ten engines end in the time of the slowest of them, not in the sum."""
    monkeypatch.setattr("engine_client.ipc.launcher.has_pidfd", lambda: pidfd)
    for number in range(10):
        child = many.start("flush_when_asked")
        child.ask({"path": str(tmp_path / str(number)), "seconds": 0.5})
        child.hear()
    with took_at_most(2) as elapsed:
        assert set(many.shutdown(10).values()) == {"asked"}
    assert elapsed.seconds >= 0.5


def test_some_of_them(many):
    """Some ranks can be ended while the others go on."""
    for _ in range(3):
        many.start()

    def ask() -> None:
        many.children[1].ends.channel.shutdown(2)

    assert many.group.shutdown(Deadline(5), ask, ranks=[1]) == {1: "asked"}
    assert many.group.handle(0).is_alive()
    assert many.group.exit_name(2) == "still running"
    assert many.shutdown(5) == {0: "asked", 1: "asked", 2: "asked"}


def test_one_that_was_dead_before(many):
    """An engine that died before is cleaned up behind, and nothing is asked of it."""
    child = many.start()
    child.ask({"fork": "group"})
    grandchild = child.hear()["pid"]
    child.ask({"exit": 3})
    child.handle.join(DEADLOCK)
    asked = []
    with took_at_most(0.5):
        assert many.group.shutdown(Deadline(5), lambda: asked.append(1)) == {0: "ended"}
    assert not asked
    assert many.group.exit_name(0) == "exit code 3"
    eventually(lambda: not is_running(grandchild), DEADLOCK)


def test_reap(many):
    """An engine that died can be cleaned up behind at once; one that lives is left alone."""
    child = many.start()
    assert not many.group.reap(0)
    child.ask({"spawn": "session"})
    stray = child.hear()["pid"]
    many.group.record_descendants()
    child.ask({"signal": signal.SIGSEGV})
    child.handle.join(DEADLOCK)
    assert many.group.reap(0)
    assert many.group.reap(0)
    assert child.handle.is_reaped
    eventually(lambda: not is_running(stray), DEADLOCK)


@pytest.mark.parametrize("end", ["ask", "kill", "kill_now"])
def test_everything_below_goes_too(many, end):
    """Children of an engine end with it, in its group or out of it, and children of those."""
    child = many.start()
    below = []
    for order in ({"spawn": "group"}, {"spawn": "session"}, {"fork": "group"}, {"fork": "session"}):
        child.ask(order)
        below.append(child.hear()["pid"])
    with took_at_most(2):
        if end == "kill_now":
            many.group.kill_now()
            many.group.kill_now()
        else:
            many.shutdown(5 if end == "ask" else 0)
    assert not [pid for pid in below if is_running(pid)]


def test_strays_by_the_engines_own_account(many):
    """Processes that nobody here has recorded are found by what the engine noted of them; a stale note hits nobody."""
    child = start("obey")
    many.children.append(child)
    child.hear()
    strays = []
    many.group.add(0, child.handle, lambda: strays)
    pids = []
    for _ in range(2):
        child.ask({"spawn": "session"})
        pids.append(child.hear()["pid"])
    notes = {found.pid: found.started for found in process_group.descendants(child.handle.pid)}
    strays += [(pids[0], notes[pids[0]]), (pids[1], notes[pids[1]] - 1000)]
    child.handle.kill()
    child.handle.join()
    assert many.group.reap(0)
    eventually(lambda: not is_running(pids[0]), DEADLOCK)
    assert is_running(pids[1])
    os.kill(pids[1], signal.SIGKILL)


def test_what_came_later_below_a_stray(many, tmp_path):
    """A process that a recorded one has started since it was recorded is found when that is killed."""
    child = many.start()
    go, pid = tmp_path / "go", tmp_path / "pid"
    child.ask({"shell": f"while ! [ -e {go} ]; do sleep 0.01; done; sleep 600 & echo $! > {pid}; wait"})
    stray = child.hear()["pid"]
    many.group.record_descendants()
    child.handle.kill()
    child.handle.join()
    go.touch()
    below = int(eventually(lambda: pid.exists() and pid.read_text(), DEADLOCK))
    many.shutdown(5)
    eventually(lambda: not is_running(stray) and not is_running(below), DEADLOCK)


def test_a_host_that_reaps(many):
    """Where the host reaps our children, what is below them is ended all the same, and the exit is unknown."""
    child = many.start()
    child.ask({"fork": "group"})
    grandchild = child.hear()["pid"]
    child.ask({"exit": 3})
    os.waitpid(child.pid, 0)
    assert many.shutdown(5) == {0: "ended"}
    assert many.group.exit_name(0) == "unknown"
    eventually(lambda: not is_running(grandchild), DEADLOCK)


@pytest.mark.parametrize("error", [None, PermissionError])
def test_a_pid_that_was_used_again(many, monkeypatch, error):
    """Where the host has reaped our child and another process got its number, its group is not touched (BC-55)."""
    child = many.start()
    child.ask({"exit": 3})
    os.waitpid(child.pid, 0)
    calls = []

    def kill(pid, signum):
        if error is not None:
            raise error

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "killpg", lambda *args: calls.append(args))
    many.shutdown(1)
    assert not calls


def test_nothing_else_is_signalled(many, monkeypatch):
    """Every signal of a shutdown goes to the engines; the host and its other children get none (BC-55)."""
    calls = []
    for name in ("kill", "killpg"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda pid, signum, real=real: calls.append(pid) or real(pid, signum))
    with subprocess.Popen(["sleep", "60"]) as other:
        children = [many.start(entry) for entry in ("obey", "ignore_sigterm")]
        children[0].ask({"exit": 1})
        many.shutdown(0.4)
        many.shutdown(0.4)
        assert other.poll() is None
        other.kill()
        calls.remove(other.pid)
    assert set(calls) <= {child.pid for child in children}


def test_asking_fails(many):
    """Where asking is not possible, SIGTERM comes at once."""
    many.start()

    def ask() -> None:
        raise BrokenPipeError

    with took_at_most(1):
        assert many.group.shutdown(Deadline(10), ask) == {0: "terminated"}


def test_it_asks_once(many):
    """Engines that were asked before are not asked again."""
    many.start("ignore_sigterm")
    calls = []

    def ask() -> None:
        calls.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        many.group.shutdown(Deadline(5), ask)
    assert many.group.exit_name(0) == "SIGKILL(-9)"
    assert many.group.shutdown(Deadline(5), ask) == {0: "killed"}
    assert calls == [1]


def test_two_threads_at_once(many):
    """Two threads may shut down at once; each returns within its own deadline, and both find all gone."""
    many.start("ignore_sigterm")
    results = {}

    def run(timeout: float) -> None:
        began = time.monotonic()
        results[timeout] = many.shutdown(timeout), time.monotonic() - began

    threads = [threading.Thread(target=run, args=(timeout,)) for timeout in (0.5, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLOCK)
    for result, elapsed in results.values():
        assert result == {0: "killed"}
        assert elapsed < 2


def test_an_interrupt_while_waiting(many):
    """An interrupt of a waiting shutdown kills what is left, then goes on to the caller (BC-40)."""
    child = many.start("ignore_sigterm")
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with took_at_most(3), pytest.raises(KeyboardInterrupt):
        many.shutdown(30)
    timer.join()
    assert not os.path.exists(f"/proc/{child.pid}")


def test_one_in_the_middle_of_another(many, monkeypatch):
    """A finalizer may shut down in the middle of a shutdown of the same thread."""
    many.start()
    real = process_group.descendants
    inner = []

    def descendants(pid):
        monkeypatch.setattr(process_group, "descendants", real)
        inner.append(many.shutdown(5))
        return real(pid)

    monkeypatch.setattr(process_group, "descendants", descendants)
    assert many.shutdown(5) == {0: "asked"}
    assert inner == [{0: "asked"}]


def test_one_that_cannot_be_killed(many, monkeypatch):
    """An engine that even SIGKILL does not end within a second is reported as stuck, and can be tried again."""
    child = many.start("ignore_sigterm")
    with monkeypatch.context() as patch:
        patch.setattr(child.handle, "kill", lambda: None)
        with took_at_most(2):
            assert many.shutdown(0.2) == {0: "stuck"}
    many.group.kill_now()
    assert many.shutdown(0) == {0: "killed"}


def test_no_descriptor_left(many):
    """A host that has run out of descriptors can still end its engines; a stray that it cannot look at is spared."""
    child = many.start()
    many.start("ignore_sigterm")
    child.ask({"spawn": "session"})
    stray = child.hear()["pid"]
    many.group.record_descendants()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        ended = many.shutdown(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)
    assert ended == {0: "asked", 1: "killed"}
    os.kill(stray, signal.SIGKILL)


def test_closed_sentinels(many):
    """A group whose sentinels are closed can still be shut down."""
    many.start()
    many.group.close()
    many.group.close()
    assert many.shutdown(5) == {0: "asked"}


def test_a_forked_copy_does_nothing(many):
    """In a forked copy of the host a group ends nobody, before and after it is told of the fork."""
    child = many.start()
    many.start()
    pid = os.fork()
    if pid == 0:
        group = many.group
        nothing = group.shutdown(Deadline(0), many.ask) == {} and not group.reap(0)
        group.kill_now()
        group.record_descendants()
        sentinel = child.handle.sentinel
        group.after_fork_in_child()
        with suppress(OSError):
            os.fstat(sentinel)
            nothing = False
        os._exit(0 if nothing and repr(group) == "<ProcessGroup {}>" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert child.handle.is_alive()
    child.ask({"fork": "group"})
    assert child.hear()["pid"]


@pytest.mark.parametrize("entry", ["obey", "ignore_sigterm"])
@pytest.mark.parametrize("where", ["atexit", "global", "cycle", "thread"])
def test_the_end_of_the_interpreter(entry, where):
    """At the interpreter's end no thread is started, nothing is printed but the warning, and all engines go (BC-42)."""
    result = run_script(
        f"""
        import atexit, sys, threading, weakref
        from engine_client.deadline import Deadline
        from engine_client.ipc.process_group import ProcessGroup
        from helpers.launched import start

        class Holder:
            pass

        child = start({entry!r})
        child.hear()
        group = ProcessGroup()
        group.add(0, child.handle)
        channel = child.ends.channel

        def end():
            threading.Thread.start = None
            group.shutdown(Deadline(0.4), lambda: channel.shutdown(2))
            child.ends.close()

        holder = Holder()
        if {where!r} == "atexit":
            atexit.register(end)
        else:
            weakref.finalize(holder, end)
        if {where!r} == "cycle":
            holder.me = holder
            del holder
        elif {where!r} == "thread":
            local = threading.local()
            local.holder = holder
            del holder
        """,
        flags=("-W", "error"),
    )
    warning = "did not end within 0.4 s" in result.stderr
    assert warning == (entry == "ignore_sigterm")
    assert result.stderr.count("\n") == warning, result.stderr
    result.check(stderr=None)
