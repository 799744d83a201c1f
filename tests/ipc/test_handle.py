"""Handles of child processes: life, end and exit code, also where the host interferes."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
import time

import pytest

from engine_client.ipc import launcher
from engine_client.ipc.handle import ChildHandle, has_pidfd
from helpers.launched import started
from helpers.procs import run_script
from helpers.timing import DEADLOCK, eventually, took_at_most


@pytest.fixture(params=["pidfd", "pipe"])
def sentinel_kind(request, monkeypatch) -> str:
    """Run a test as on a system with pidfd, and as on one without."""
    if request.param == "pipe":
        monkeypatch.setattr(launcher, "has_pidfd", lambda: False)
    return request.param


def is_readable(fd: int, timeout: float = 0) -> bool:
    return bool(select.select([fd], [], [], timeout)[0])


def test_a_running_child(sentinel_kind):
    """A child that runs is alive, has no exit code, and its sentinel is silent."""
    with started("obey") as child:
        handle = child.handle
        assert child.hear() == {"pid": handle.pid}
        assert handle.is_alive()
        assert handle.exitcode is None
        assert not handle.exit_known
        assert not handle.is_reaped
        assert not is_readable(handle.sentinel)
        assert handle.is_prompt == (sentinel_kind == "pidfd")
        assert repr(handle) == f"<ChildHandle rank 0 pid={handle.pid} running>"
        began = time.monotonic()
        handle.join(0.05)
        assert time.monotonic() - began >= 0.05
        handle.reap()
        assert handle.is_alive()


@pytest.mark.parametrize(
    ("order", "code", "name"),
    [
        ({"return": 1}, 0, "exit code 0"),
        ({"exit": 3}, 3, "exit code 3"),
        ({"raise": 5}, 5, "exit code 5"),
        ({"signal": signal.SIGKILL}, -9, r"SIGKILL\(-9\)"),
        ({"signal": signal.SIGSEGV}, -11, r"SIGSEGV\(-11\)"),
    ],
)
def test_an_ended_child(sentinel_kind, order, code, name):
    """A child that ended has an exit code, before and after it is reaped, and its sentinel stays readable."""
    with started("obey") as child:
        child.hear()
        child.ask(order)
        child.handle.join()
        assert not child.handle.is_alive()
        assert child.handle.exitcode == code
        assert child.handle.exit_known
        assert is_readable(child.handle.sentinel, DEADLOCK)
        assert os.path.exists(f"/proc/{child.handle.pid}")  # still ours, as a zombie
        assert not child.handle.is_reaped
        child.handle.reap()
        child.handle.reap()
        assert child.handle.is_reaped
        assert not os.path.exists(f"/proc/{child.handle.pid}")
        assert child.handle.exitcode == code
        child.handle.kill()  # hits nobody


def test_terminate_and_kill(sentinel_kind):
    """Terminate sends SIGTERM and kill sends SIGKILL; to a child that has ended, nothing."""
    for method, signum in (("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)):
        with started("obey") as child:
            child.hear()
            getattr(child.handle, method)()
            child.handle.join(DEADLOCK)
            assert child.handle.exitcode == -signum
            getattr(child.handle, method)()
            child.handle.reap()
            getattr(child.handle, method)()


def test_a_living_grandchild_does_not_hide_the_end(sentinel_kind):
    """The end of a child is seen although a forked copy of it lives on, and holds all of its descriptors."""
    with started("obey") as child:
        child.hear()
        child.ask({"fork": "group"})
        grandchild = child.hear()["pid"]
        child.ask({"exit": 4})
        with took_at_most(5):
            child.handle.join()
        assert child.handle.exitcode == 4
        assert is_readable(child.handle.sentinel) == (sentinel_kind == "pidfd")
        os.kill(grandchild, signal.SIGKILL)
        assert is_readable(child.handle.sentinel, DEADLOCK)


@pytest.mark.parametrize("kind", ["before", "after"])
def test_the_host_reaps(sentinel_kind, kind):
    """When the host reaps all its children, the end is known and the exit code is not: unknown, never 0."""
    with started("obey") as child:
        child.hear()
        child.ask({"exit": 3})
        if kind == "after":
            child.handle.join(DEADLOCK)
            assert child.handle.exitcode == 3
        assert os.waitpid(-1, 0)[0] == child.handle.pid
        assert not child.handle.is_alive()
        assert child.handle.exitcode == (3 if kind == "after" else None)
        assert child.handle.exit_known == (kind == "after")
        if kind == "before":
            assert child.handle.is_reaped
            assert "unknown" in repr(child.handle)
        child.handle.join()
        child.handle.terminate()
        child.handle.reap()


def test_the_host_ignores_sigchld():
    """When the host ignores SIGCHLD, ends are seen, exit codes are unknown, and nothing is printed."""
    run_script(
        """
        import signal
        from helpers.launched import started
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with started("obey") as child:
            child.hear()
            child.handle.join(0.1)
            assert child.handle.is_alive()
            child.ask({"exit": 3})
            child.handle.join(10)
            assert not child.handle.is_alive()
            assert child.handle.exitcode is None and not child.handle.exit_known
        with started("describe") as child:
            assert child.hear()["sigchld"] == signal.SIG_DFL, "the engine's own children would be lost"
        """
    ).check()


def test_close(sentinel_kind):
    """Closing takes the sentinel away, once; the child can still be signalled, waited for, and reaped."""
    with started("obey") as child:
        child.hear()
        child.handle.close()
        child.handle.close()
        assert child.handle.sentinel == -1
        child.handle.join(0.05)
        assert child.handle.is_alive()
        child.handle.kill()
        child.handle.join()
        assert child.handle.exitcode == -signal.SIGKILL
        child.handle.reap()
        assert child.handle.is_reaped


def test_a_dropped_handle_closes_its_sentinel():
    """A handle that nobody holds any more leaks no descriptor."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    handle = ChildHandle("dropped", pid)
    fd = handle.sentinel
    del handle
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    os.waitpid(pid, 0)


def test_several_threads_wait(sentinel_kind):
    """Any number of threads can wait for one child; all see its end."""
    with started("obey") as child:
        child.hear()
        codes = []

        def wait() -> None:
            child.handle.join(DEADLOCK)
            codes.append(child.handle.exitcode)

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        child.ask({"exit": 6})
        for thread in threads:
            thread.join(DEADLOCK)
        assert codes == [6] * 4


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_forked_copy_is_harmless(sentinel_kind, forgotten):
    """In a forked copy of the launcher a handle signals and reaps nothing, and does not say that the child ended."""
    with started("obey") as child:
        child.hear()
        pid = os.fork()
        if pid == 0:
            handle = child.handle
            if forgotten:
                handle.after_fork_in_child()
            handle.kill()
            handle.terminate()
            handle.reap()
            good = handle.is_alive() and handle.exitcode is None and (handle.sentinel == -1) == forgotten
            os._exit(0 if good else 1)
        assert os.waitpid(pid, 0)[1] == 0
        child.ask({"fork": "group"})
        assert child.hear()["pid"]
        assert child.handle.is_alive()


def test_a_forked_copy_sees_the_end():
    """A forked copy of the launcher can learn of a child's end, and not how it ended."""
    with started("obey") as child:
        child.hear()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(read_end, 1)
            child.handle.join()
            os._exit(0 if child.handle.exitcode is None and not child.handle.is_alive() else 1)
        child.handle.kill()
        child.handle.join()
        os.write(write_end, b".")
        assert os.waitpid(pid, 0)[1] == 0
        os.close(read_end)
        os.close(write_end)


def test_a_child_that_was_reaped_before_it_could_be_watched():
    """A handle of a child that somebody reaped already reports its end at once."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    handle = ChildHandle("gone", pid)
    assert is_readable(handle.sentinel)
    handle.join()
    assert not handle.is_alive()
    assert handle.exitcode is None
    handle.close()


class TestHasPidfd:
    """Whether the system can watch processes is found out by trying."""

    @pytest.fixture(autouse=True)
    def fresh(self):
        has_pidfd.cache_clear()
        yield
        has_pidfd.cache_clear()

    def test_here(self):
        """Linux has pidfd since 5.4, and leaves nothing open by the question."""
        assert has_pidfd()

    def test_an_old_kernel(self, monkeypatch):
        """A kernel that does not know pidfd_open has none."""
        monkeypatch.setattr(os, "pidfd_open", lambda pid: os.open("/nowhere", os.O_RDONLY))
        assert not has_pidfd()

    def test_an_old_build(self, monkeypatch):
        """A Python built without pidfd_open has none."""
        monkeypatch.delattr(os, "pidfd_open")
        assert not has_pidfd()

    @pytest.mark.parametrize("answer", [OSError(22, "Invalid argument"), None])
    def test_a_kernel_that_cannot_wait(self, monkeypatch, answer):
        """A kernel that can open a pidfd and not wait on it counts as having none."""

        def waitid(*args):
            if answer is not None:
                raise answer

        monkeypatch.setattr(os, "waitid", waitid)
        assert not has_pidfd()


def test_an_end_that_is_announced_early(monkeypatch):
    """A sentinel that fires before the exit status can be had is waited for, not taken for the end."""
    with started("obey") as child:
        child.hear()
        real = os.waitid
        late = [None, None, None]
        monkeypatch.setattr(os, "waitid", lambda *args: late.pop() if late else real(*args))
        child.ask({"exit": 2})
        eventually(lambda: is_readable(child.handle.sentinel), DEADLOCK)
        child.handle.join(DEADLOCK)
        assert not late
        assert child.handle.exitcode == 2
