"""Descendants, and the hint about memory limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from engine_client.ipc import processes
from engine_client.ipc.processes import (
    Descendant,
    children_of_this_process,
    descendants,
    find_descendant,
    is_stopped,
    memory_hint,
    stat_of,
)
from helpers.procs import run_script
from helpers.timing import DEADLOCK, eventually

TREE = """
import os, subprocess, sys, time
children = [subprocess.Popen(["sleep", "60"], start_new_session=number == 1) for number in range(2)]
print(*[child.pid for child in children], flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree():
    """A process with two children, one of them in a session of its own."""
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as parent:
        children = [int(pid) for pid in parent.stdout.readline().split()]
        yield parent, children
        parent.kill()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_descendants(tree):
    """All processes below one are found, whatever session they are in, and below us all of these."""
    parent, children = tree
    assert {found.pid for found in descendants(parent.pid)} == set(children)
    assert {found.pid for found in descendants(os.getpid())} == {parent.pid, *children}
    groups = {found.pid: found.group() for found in descendants(parent.pid)}
    assert groups == {children[0]: os.getpgrp(), children[1]: children[1]}
    assert str(children[0]) in repr(descendants(parent.pid))


@pytest.mark.parametrize("children", [True, None])
def test_a_process_without_children(monkeypatch, children):
    """A process without children has no descendants, and a pid without a process none either."""
    if children is None:
        monkeypatch.setattr(processes, "_has_children", lambda pid: None)
    with subprocess.Popen(["sleep", "60"]) as child:
        assert descendants(child.pid) == []
        child.kill()
    assert descendants(child.pid) == []


def test_psutil_is_loaded_only_for_children():
    """A process without children is seen to have none without loading psutil."""
    run_script(
        """
        import os, sys, threading
        from engine_client.ipc.processes import descendants
        ended = threading.Event()
        threading.Thread(target=ended.wait).start()
        assert descendants(os.getpid()) == []
        ended.set()
        assert "psutil" not in sys.modules
        """
    ).check()


def test_kill(tree):
    """A descendant can be killed, and then neither runs nor has a group, and more of it does nothing."""
    parent, _ = tree
    for found in descendants(parent.pid):
        assert found.is_running()
        found.kill()
        eventually(lambda found=found: not found.is_running(), DEADLOCK)
        assert found.group() is None
        found.kill()
    parent.kill()
    parent.wait()


def test_a_pid_that_was_used_again(monkeypatch):
    """A process that has the pid of one that was recorded is not taken for it, nor killed."""
    with subprocess.Popen(["sleep", "60"]) as child:
        process = psutil.Process(child.pid)
        found = Descendant(process)
        monkeypatch.setattr(psutil.Process, "is_running", lambda self: False)  # as it says of another's pid
        assert not found.is_running()
        assert found.group() is None
        monkeypatch.undo()
        child.kill()
        child.wait()
        assert not found.is_running()
        assert found.group() is None


def test_one_that_vanishes_while_looked_at(monkeypatch):
    """A process that ends in the middle of a question is gone."""

    def gone(self):
        raise psutil.NoSuchProcess(self.pid)

    found = Descendant(psutil.Process())
    monkeypatch.setattr(psutil.Process, "status", gone)
    monkeypatch.setattr(psutil.Process, "kill", gone)
    assert not found.is_running()
    found.kill()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_what_the_system_says_of_a_process(tmp_path):
    """State, parent and start, whatever a process calls itself; nothing of one that is gone."""
    name = tmp_path / "a) R 1 ("
    name.symlink_to("/bin/sleep")
    with subprocess.Popen([str(name), "60"]) as child:
        stat = stat_of(child.pid)
        assert (stat.parent, stat.is_alive) == (os.getpid(), True)
        assert stat.started >= stat_of(os.getpid()).started
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(child.pid), DEADLOCK)
        child.kill()
        eventually(lambda: not stat_of(child.pid).is_alive, DEADLOCK)  # a zombie until it is waited for
        child.wait()
        assert stat_of(child.pid) is None
        assert not is_stopped(child.pid)


def test_a_recorded_process_is_found_again(monkeypatch):
    """A process is found by pid and start, and another with that pid is not taken for it."""
    with subprocess.Popen(["sleep", "60"]) as child:
        (found,) = descendants(os.getpid())
        assert find_descendant(child.pid, found.started).pid == child.pid
        assert find_descendant(child.pid, found.started - 1000) is None
        child.kill()
        child.wait()
        assert find_descendant(child.pid, found.started) is None

    def gone(self):
        raise psutil.NoSuchProcess(self.pid)

    process = psutil.Process()
    monkeypatch.setattr(psutil.Process, "create_time", gone)
    assert Descendant(process).started == 0


def test_children_that_come_and_go(monkeypatch):
    """A change among the children is noticed; where nothing tells, None says so."""
    assert children_of_this_process() == b""
    with subprocess.Popen(["sleep", "60"]) as child:
        assert str(child.pid).encode() in children_of_this_process()
        real = os.listdir

        def listdir(path):
            if path == "/proc/self/task":
                raise FileNotFoundError(path)
            return real(path)

        monkeypatch.setattr(os, "listdir", listdir)
        assert children_of_this_process() is None
        child.kill()
    assert children_of_this_process() == b""


def test_at_the_end_of_the_interpreter(tree, monkeypatch):
    """So late that nothing can be imported any more, nothing is found, and nothing fails."""
    parent, children = tree
    started = descendants(parent.pid)[0].started
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert descendants(parent.pid) == []
    assert find_descendant(children[0], started) is None


class TestMemoryHint:
    """The hint for a process that was killed."""

    def write(self, root, files):
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return memory_hint(str(root))

    def test_here(self):
        """On this machine there is a hint, whatever it says."""
        assert "memory" in memory_hint()

    def test_no_control_groups(self, tmp_path):
        """Without control groups there is no limit to be found."""
        assert memory_hint(str(tmp_path)).startswith("no memory limit found")

    @pytest.mark.parametrize(
        ("groups", "directory", "limit", "events"),
        [
            ("0::/a/b\n", "sys/fs/cgroup/a", "memory.max", "memory.events"),
            ("0::/\n", "sys/fs/cgroup", "memory.max", "memory.events"),
            ("0::/not/here\n", "sys/fs/cgroup", "memory.max", "memory.events"),
            (
                "4:cpu:/x\n3:memory:/a/b\n0::/\n",
                "sys/fs/cgroup/memory/a/b",
                "memory.limit_in_bytes",
                "memory.oom_control",
            ),
            ("3:x,memory:/a/b\n", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"),
        ],
    )
    def test_a_limit(self, tmp_path, groups, directory, limit, events):
        """The limit of our group, or of one above it, is told, and whether it has killed."""
        files = {"proc/self/cgroup": groups, f"{directory}/{limit}": f"{3 << 29}\n"}
        assert "limited to 1.5 GiB" in self.write(tmp_path, files)
        assert "nothing was killed" in self.write(tmp_path, {f"{directory}/{events}": "under_oom 0\noom_kill 0\n"})
        assert "2 processes were killed" in self.write(tmp_path, {f"{directory}/{events}": "low 0\noom_kill 2\n"})

    def test_the_tightest_limit(self, tmp_path):
        """Of several limits on the way up the lowest counts."""
        files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": f"{4 << 30}"}
        assert "limited to 2.0 GiB" in self.write(tmp_path, {**files, "sys/fs/cgroup/memory.max": f"{2 << 30}"})

    @pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", "\xff"])
    def test_unlimited(self, tmp_path, text):
        """A group without a limit is none."""
        files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": text}
        assert self.write(tmp_path, files).startswith("no memory limit found")


def test_the_vitals_of_a_process():
    """Memory and age of a process that runs; neither of one that is gone."""
    memory, age = processes.vitals(os.getpid())
    assert 1 << 20 < memory < 1 << 40
    assert 0 < age < 1e6
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert processes.vitals(gone.pid) == (None, None)
