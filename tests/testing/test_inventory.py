"""A snapshot sees processes, threads, descriptors and nameless memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest

from engine_client.testing import inventory
from engine_client.testing.inventory import (
    Inventory,
    ProcessKey,
    descendants,
    describe_process,
    is_running,
    key_of,
    marked_processes,
)
from helpers.procs import start_orphan
from helpers.timing import eventually

SLEEPER = [sys.executable, "-c", "input()"]


def test_nothing_added():
    """Two snapshots of an idle process are equal."""
    before = Inventory.take()
    assert Inventory.take("no-such-mark", before).added_since(before) == []


def test_child_process():
    """A child is added, with its command, and is gone once it was reaped."""
    before = Inventory.take()
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE) as child:
        (key,) = descendants() - before.processes
        assert key == key_of(child.pid)
        assert is_running(key)
        eventually(lambda: "-c input()" in describe_process(key))  # until then it is a copy of this process
        (line,) = (text for text in Inventory.take().added_since(before) if text.startswith("process"))
        assert f"process {child.pid}, child of {os.getpid()}" in line
        assert "-c input()" in line
        child.stdin.close()
    assert not is_running(key)
    assert key_of(child.pid) is None
    assert describe_process(key) == f"process {child.pid} (gone meanwhile)"


def test_zombie():
    """A child that ended and was not reaped is still there."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    eventually(lambda: "state Z" in describe_process(key_of(child.pid)))
    assert key_of(child.pid) in descendants()
    assert "(no command)" in describe_process(key_of(child.pid))
    child.wait()


def test_grandchild():
    """A child's child is a descendant."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE):
        eventually(lambda: len(descendants()) == 2)


def test_orphan_is_found_by_its_mark(monkeypatch):
    """A process whose parent is gone is no descendant; its environment gives it away."""
    monkeypatch.setenv("SOME_VARIABLE", "mark-of-this-test")
    pid = start_orphan()
    try:
        assert key_of(pid) not in descendants()
        assert marked_processes("mark-of-this-test") == {key_of(pid)}
    finally:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: key_of(pid) is None or "state Z" in describe_process(key_of(pid)))


def test_reused_number():
    """A process with the number of an earlier one is not taken for it."""
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE) as child:
        key = key_of(child.pid)
        assert not is_running(ProcessKey(key.pid, key.started - 1))
        assert "gone meanwhile" in describe_process(ProcessKey(key.pid, key.started - 1))


def test_thread():
    """A running thread is added; one that has ended is not."""
    before = Inventory.take()
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="mine")
    thread.start()
    during = Inventory.take()
    assert any("mine" in line for line in during.added_since(before))
    go.set()
    thread.join()
    assert during.added_since(before) == []


def test_descriptor():
    """A descriptor is its number and what it refers to."""
    first, _ = fds = os.pipe()
    before = Inventory.take()
    os.close(first)
    assert os.open("/dev/null", os.O_RDONLY) == first
    assert [line.split(" (")[0] for line in Inventory.take().added_since(before)] == [f"descriptor {first}: /dev/null"]
    for fd in fds:
        os.close(fd)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a Linux matter")
def test_mapped_memfd():
    """Memory without a name is seen as long as it is mapped, though its descriptor is closed."""
    before = Inventory.take()
    fd = os.memfd_create("some-area")
    os.ftruncate(fd, 4096)
    area = mmap.mmap(fd, 4096)
    os.close(fd)
    added = Inventory.take().added_since(before)
    assert any(line.startswith("mapped memory /memfd:some-area") for line in added), added
    area.close()
    assert Inventory.take().added_since(before) == []


def test_name(tmp_path, monkeypatch):
    """A file of ours in the shared-memory folder is seen, another program's is not."""
    monkeypatch.setattr(inventory, "_SHM", tmp_path)
    before = Inventory.take()
    (tmp_path / "other-program").touch()
    (tmp_path / "engine_client_0").touch()
    assert Inventory.take().added_since(before) == [f"name {tmp_path / 'engine_client_0'}"]


def test_machine_without_proc(tmp_path, monkeypatch):
    """Without /proc and /dev/shm, threads and descriptors are still seen."""
    monkeypatch.setattr(inventory, "_PROC", tmp_path / "none")
    monkeypatch.setattr(inventory, "_SHM", tmp_path / "none")
    before = Inventory.take("mark", Inventory.take())
    assert before.processes == before.mappings == before.names == frozenset()
    fds = os.pipe()
    assert len(Inventory.take().added_since(before)) == 2
    for fd in fds:
        os.close(fd)


def test_descriptors_without_links(monkeypatch):
    """Where descriptors have no links (macOS), the inode tells them apart."""

    def no_link(path):
        raise OSError("not a link")

    monkeypatch.setattr(inventory.os, "readlink", no_link)
    before = Inventory.take()
    fds = os.pipe()
    assert all("descriptor (inode" in line for line in Inventory.take().added_since(before))
    for fd in fds:
        os.close(fd)


def test_process_that_ends_while_it_is_described(monkeypatch, tmp_path):
    """A process whose command line cannot be read any more is described without it."""
    monkeypatch.setattr(inventory, "_PROC", tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (odd) name) S 1 " + " ".join(["0"] * 17) + " 99 0")
    assert describe_process(ProcessKey(7, 99)) == "process 7, child of 1, state S: (no command)"


def test_children_without_lists(monkeypatch, tmp_path):
    """Where the kernel keeps no lists of children, they are searched for; a circle in what is read is no trap."""
    own = os.getpid()
    monkeypatch.setattr(inventory, "_PROC", tmp_path)
    for pid, parent in ((7, own), (8, 7), (9, 1), (own, 8)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) S {parent} " + " ".join(["0"] * 17) + " 99 0")
    (tmp_path / "10").mkdir()
    (tmp_path / "not-a-process").mkdir()
    assert {key.pid for key in descendants()} == {7, 8, own}


def test_child_that_ends_while_it_is_looked_for(monkeypatch, tmp_path):
    """A child that is gone, or whose thread is, when its turn comes is no child."""
    monkeypatch.setattr(inventory, "_PROC", tmp_path)
    (tmp_path / "thread-self").mkdir()
    (tmp_path / "thread-self" / "children").touch()
    (tmp_path / str(os.getpid()) / "task" / "1").mkdir(parents=True)
    (tmp_path / str(os.getpid()) / "task" / "1" / "children").write_text("7 ")
    (tmp_path / str(os.getpid()) / "task" / "2" / "children").mkdir(parents=True)
    assert descendants() == set()


@pytest.mark.slow
def test_daemons_of_multiprocessing_are_not_ours():
    """The resource tracker and the fork server, which stay by design, are not counted."""
    before = Inventory.take()
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
    process.close()
    assert Inventory.take().added_since(before) == []
