"""What an engine process does first: standard descriptors, signals, the entry."""

from __future__ import annotations

import gc
import os
import signal
import sys

import pytest

from engine_client.ipc import boot
from engine_client.ipc.launcher import ENTRY, PACKAGE_PARENT
from helpers.clients import scripted_client
from helpers.launched import Ends
from helpers.procs import run_script


@pytest.fixture
def handlers():
    """Put signal handlers, the mask, and the collector's settings back after a test."""
    threshold = gc.get_threshold()
    kept = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for signum, handler in kept.items():
        if signal.getsignal(signum) is not handler:
            signal.signal(signum, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.mark.parametrize("closed", [(), (0,), (1, 2), (0, 1, 2)])
def test_standard_descriptors(closed):
    """Descriptors 0 to 2 that are closed are opened on /dev/null; each gets a stream where there is none."""
    code = f"""
        import os, sys
        from engine_client.ipc import boot
        for fd in {closed}:
            os.close(fd)
            name = ("stdin", "stdout", "stderr")[fd]
            setattr(sys, name, None)  # as the interpreter does if it finds the descriptor closed
        boot.secure_std_fds()
        assert None not in (sys.stdin, sys.stdout, sys.stderr)
        for fd in {closed}:
            assert os.readlink(f"/proc/self/fd/{{fd}}") == "/dev/null", fd
            assert os.get_inheritable(fd)
        if 1 in {closed}:
            assert sys.stdout is sys.__stdout__
            print("nobody reads this: \\udcff", flush=True)
        if 0 in {closed}:
            assert sys.stdin.read() == ""
        os.stat("/")
        """
    run_script(code).check()


def test_streams_that_are_there_stay(monkeypatch):
    """Streams that the interpreter has made are left alone."""
    before = sys.stdin, sys.stdout, sys.stderr
    boot.secure_std_fds()
    assert (sys.stdin, sys.stdout, sys.stderr) == before


def test_signals_of_the_host(handlers):
    """Handlers, mask, and wakeup descriptor that came with a fork are taken away; what Python and nohup do stays."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(write_end)
    boot.secure_signals()
    assert signal.set_wakeup_fd(-1) == -1
    os.close(read_end)
    os.close(write_end)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("sentinel", [True, False])
def test_the_entry_is_called(handlers, monkeypatch, sentinel):
    """The entry named by the arguments gets the descriptors and the launcher's pid; nothing is inherited further."""
    calls = []
    monkeypatch.setattr(boot, "launched_here", lambda *args: calls.append(args), raising=False)
    ends = Ends()
    extra = os.dup(0)
    for fd in (*ends.fds, extra):
        os.set_inheritable(fd, True)
    arguments = ["rank 0", "engine_client.ipc.boot:launched_here", "4711", str(extra if sentinel else -1)]
    monkeypatch.setattr(sys, "argv", ["-c", PACKAGE_PARENT, *arguments, *ends.fds.to_args(), "/first", "/second"])
    monkeypatch.setattr(sys, "path", ["/last"])
    boot.main()
    assert calls == [(ends.fds, 4711)]
    assert sys.path == ["/first", "/second", "/last"]
    assert sys.argv == ["-c"]
    assert not any(map(os.get_inheritable, ends.fds))
    assert os.get_inheritable(extra) != sentinel
    os.close(extra)
    ends.close()


def test_the_default_entry():
    """By default the child runs an engine."""
    from engine_client.engine.main import run_engine

    assert boot.resolve(ENTRY) is run_engine


def test_lines_appear_when_they_are_printed():
    """What an engine prints into a pipe does not wait for its end, where Python would keep it in a buffer."""
    code = """
        import os, sys
        from engine_client.ipc import boot
        boot.secure_std_fds()
        print("seen")
        os._exit(0)
        """
    assert run_script(code, env={"PYTHONUNBUFFERED": None}).check().stdout == "seen\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [((700, 10, 10), (boot.NEW_OBJECTS, 10, 10)), ((0, 10, 10), (0, 10, 10)), ((10**6, 5, 5), (10**6, 5, 5))],
)
def test_garbage_is_looked_for_less_often(before, after):
    """Where Python's own threshold stands; a host that has it look less often, or never, knows what it does."""
    code = f"""
        import gc
        from engine_client.ipc import boot
        gc.set_threshold(*{before})
        boot.spare_collections()
        print(gc.get_threshold() == {after}, gc.isenabled())
        """
    assert run_script(code).check().stdout == "True True\n"


def test_an_engine_looks_less_often():
    """Its process is set up so; that of the client is its host's."""
    with scripted_client() as client:
        assert client.collective_rpc(thresholds) == [boot.NEW_OBJECTS]
    assert gc.get_threshold()[0] < boot.NEW_OBJECTS


def thresholds(worker):
    """Return after how many new objects an engine's collector looks."""
    return gc.get_threshold()[0]


class Garbage:
    """A cycle, with a finalizer that does something outside of the process."""

    def __init__(self, path):
        self.path = path
        self.me = self

    def __del__(self):
        with open(self.path, "a", encoding="ascii") as file:
            file.write(f"{os.getpid()}\n")


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:start method 'fork' in a process with other threads")
def test_garbage_of_the_host_is_finalized_by_the_host_alone(tmp_path):
    """A forked engine has a copy of it, and collects its own garbage only."""
    path = tmp_path / "finalized"
    gc.collect()
    gc.disable()  # until the engine has its copy
    try:
        Garbage(path)
        with scripted_client(start_method="fork") as client:
            client.collective_rpc(collect_garbage)
            assert not path.exists()
    finally:
        gc.enable()
    gc.collect()
    assert path.read_text() == f"{os.getpid()}\n"


def collect_garbage(worker):
    """Look for garbage in an engine."""
    gc.collect()
