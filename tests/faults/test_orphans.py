"""The client's process dies hard: its engine and all below it are gone at once (BC-03, BC-61)."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

from engine_client.config import StartMethod
from engine_client.testing.inventory import ProcessKey, key_of, marked_processes
from helpers.drivers import DOINGS
from helpers.procs import run_script, script_environment
from helpers.scenes import METHODS, methods, told
from helpers.timing import DEADLOCK, eventually

pytestmark = pytest.mark.crash

ORPHAN_BOUND = 2.0
DRIVE = "import sys; from helpers.drivers import drive; drive(*sys.argv[1:])"
ENDS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGHUP": signal.SIGHUP,
    "SIGSEGV": signal.SIGSEGV,
    "os._exit": signal.SIGUSR1,
}


class Host:
    """A process with a client whose engine is busy with something; in the environment's mark, to be found again."""

    def __init__(
        self, told_at: Path, method: str, doing: str, then: str = "", colour: str = "sync", **popen: Any
    ) -> None:
        self.doing = doing
        self.told_at = told_at
        self.mark = f"host-{os.getpid()}-{time.monotonic_ns()}"
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by close
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", then + DRIVE, method, doing, str(told_at), colour],
            env=script_environment(ENGINE_CLIENT_TEST_RUN=self.mark),
            **{"stdin": subprocess.DEVNULL, "stderr": self.errors, "start_new_session": True, **popen},
        )
        self.facts: dict[str, Any] = {}
        self.keys: set[ProcessKey] = set()

    def wait_busy(self) -> None:
        """Wait until the engine is at what it is to do."""
        self.facts = told(self.told_at, process=self.process)
        if "holding" in self.doing or self.doing == "native":
            eventually(lambda: _is_asleep_in_c(self.facts["engine"]))
        below = [self.facts["engine"], *self.facts["grandchildren"]]
        assert len(below) == 3 + ("building" not in self.doing)
        self.keys = {key for key in map(key_of, below) if key}
        assert len(self.keys) == len(below)
        assert self.keys <= marked_processes(self.mark)

    def left(self) -> list[int]:
        """Return the pids of what still runs of it."""
        keys = self.keys | marked_processes(self.mark)
        return [key.pid for key in keys if key_of(key.pid) == key and not is_zombie(key.pid)]

    def close(self) -> None:
        for key in marked_processes(self.mark):
            with suppress(OSError):
                os.kill(key.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.errors.close()


def is_zombie(pid: int) -> bool:
    """Tell whether a process has ended; a container's first process takes its time to reap orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _is_asleep_in_c(pid: int) -> bool:
    """Tell whether the main thread of a process sleeps on the clock."""
    return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text() if os.path.exists(f"/proc/{pid}/wchan") else True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(method: str, doing: str, **popen: Any) -> Host:
        hosts.append(Host(tmp_path / f"told{len(hosts)}", method, doing, **popen))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def end(hosts: list[Host], signum: signal.Signals) -> None:
    """End hosts by a signal; what is below each must be gone within the bound."""
    for host in hosts:
        host.wait_busy()
    for host in hosts:
        host.process.send_signal(signum)
    began = time.monotonic()
    check_gone(hosts, began)
    for host in hosts:
        assert host.process.wait() == (3 if signum == signal.SIGUSR1 else -signum)
        host.errors.seek(0)
        assert host.errors.read() == ""


def check_gone(hosts: list[Host], began: float) -> None:
    """Check that nothing of these hosts runs after the bound."""
    left = [(host.doing, host.left()) for host in hosts]
    while any(pids for _, pids in left):
        assert time.monotonic() - began < ORPHAN_BOUND, left
        time.sleep(0.005)
        left = [(host.doing, host.left()) for host in hosts]
    assert time.monotonic() - began < ORPHAN_BOUND, "the look itself came too late"


# -- BC-03 -------------------------------------------------------------------------------------------------------------

PAIRS: list[tuple[str, StartMethod]] = [
    ("SIGKILL", "exec"),
    ("SIGTERM", "spawn"),
    ("SIGHUP", "fork"),
    ("SIGSEGV", "exec"),
    ("os._exit", "forkserver"),
]


@pytest.mark.parametrize(
    ("how", "method"),
    [
        pytest.param(how, method, marks=() if (how, method) in PAIRS else pytest.mark.full)
        for how in ENDS
        for method in METHODS
    ],
)
def test_bc03_nothing_outlives_the_client_s_process(how: str, method: str, start: Callable[..., Host]) -> None:
    """Engine and grandchildren are gone 2 s after any end of the host, whatever the engine is doing."""
    end([start(method, doing) for doing in DOINGS], ENDS[how])


@pytest.mark.parametrize(
    ("how", "colour"), [("SIGKILL", "dp"), ("SIGTERM", "async"), pytest.param("SIGSEGV", "dp", marks=pytest.mark.full)]
)
def test_bc03_nothing_outlives_a_process_with_an_event_loop(how: str, colour: str, start: Callable[..., Host]) -> None:
    """The same of asyncio clients: each of two ranks, and what is below it, is gone 2 s after the end of the host."""
    end([start("exec", doing, colour=colour) for doing in DOINGS], ENDS[how])


def test_bc03_the_memory_goes_too(start: Callable[..., Host]) -> None:
    """64 MiB in each direction were shared; after the host's death nobody maps them, and no name ever was there."""
    names = set(os.listdir("/dev/shm"))
    host = start("exec", "ready")
    host.wait_busy()
    ours = shared_memory({host.facts["engine"]})
    assert sum(size for size in ours.values()) >= 128 << 20, ours
    assert not [name for name in set(os.listdir("/dev/shm")) - names if "engine" in name]
    end([host], signal.SIGKILL)
    assert not ours.keys() & shared_memory(None).keys()


def shared_memory(pids: set[int] | None) -> dict[int, int]:
    """Return inode and size of the nameless memory that processes, or all, hold open or mapped."""
    found: dict[int, int] = {}
    for process in [Path(f"/proc/{pid}") for pid in pids] if pids else Path("/proc").glob("[1-9]*"):
        with suppress(OSError):  # gone
            for fd in (process / "fd").iterdir():
                if "memfd:engine" in os.readlink(fd):
                    found[fd.stat().st_ino] = fd.stat().st_size
            for line in (process / "maps").read_text().splitlines():
                if "memfd:engine" in line:
                    found.setdefault(int(line.split()[4]), 0)
    return found


def test_bc03_a_host_below_a_shell_with_job_control(start: Callable[..., Host], tmp_path: Path) -> None:
    """When the terminal of an interactive shell closes, its job, the engine and all below them are gone within 2 s."""
    controller, terminal = pty.openpty()
    told_at = tmp_path / "told by a job"
    mark = f"job-{os.getpid()}-{time.monotonic_ns()}"
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i", "-c", '"$0" -c "$1" exec ready "$2"', sys.executable, DRIVE, told_at],
        env=script_environment(ENGINE_CLIENT_TEST_RUN=mark),
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),  # type: ignore[call-overload]
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  # this test starts no thread
    )
    os.close(terminal)
    try:
        facts = told(told_at, process=shell)
        assert facts["engine"] in {key.pid for key in marked_processes(mark)}
    finally:
        os.close(controller)
    began = time.monotonic()
    try:
        while left := [key.pid for key in marked_processes(mark) if not is_zombie(key.pid)]:
            assert time.monotonic() - began < ORPHAN_BOUND, left
            time.sleep(0.005)
    finally:
        for key in marked_processes(mark):
            os.kill(key.pid, signal.SIGKILL)
        shell.wait()
    del start


def test_bc03_a_copy_that_the_host_forked_does_not_keep_the_engine(start: Callable[..., Host]) -> None:
    """A copy of the host, forked where Python does not see it, holds every descriptor; the engine ends all the same."""
    copy = (
        "import ctypes, os, sys, threading, time\n"
        "def fork():\n"
        "    while not os.path.exists(sys.argv[3]): time.sleep(0.01)\n"
        "    if ctypes.CDLL(None).fork() == 0: time.sleep(600)\n"
        "threading.Thread(target=fork, daemon=True).start()\n"
    )
    hosts = [start("exec", doing, then=copy) for doing in ("ready", "building", "native")]
    for host in hosts:
        host.wait_busy()

    def copies_of(host: Host) -> set[int]:
        return set(host.left()) - {key.pid for key in host.keys} - {host.process.pid}

    copies = [eventually(lambda host=host: copies_of(host)) for host in hosts]  # type: ignore[misc]
    for host in hosts:
        host.process.kill()
    began = time.monotonic()
    for host, pids in zip(hosts, copies, strict=True):
        assert len(pids) == 1
        eventually(lambda keys=host.keys: all(is_zombie(key.pid) for key in keys), ORPHAN_BOUND)  # type: ignore[misc]
        assert not any(map(is_zombie, pids)), "the copy is not ours to end"
    assert time.monotonic() - began < ORPHAN_BOUND


# -- BC-61 -------------------------------------------------------------------------------------------------------------


def test_bc61_the_thread_that_made_the_client_may_end() -> None:
    """Made in a thread, or by asyncio.to_thread, by any method, an engine lives on when that thread has ended."""
    run_script(
        """
        import asyncio, threading, time, warnings
        from helpers.clients import collect, make_request, pid_of, scripted_client
        warnings.filterwarnings("ignore", "start method 'fork' in a process with other threads")
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
        clients = []
        def make(method):
            clients.append(scripted_client(start_method=method))
        def in_thread(method):
            thread = threading.Thread(target=make, args=(method,))
            thread.start()
            thread.join()
        for method in "fork", "exec", "spawn", "forkserver":
            in_thread(method)
            asyncio.run(asyncio.to_thread(make, method))
        pids = [pid_of(client) for client in clients]
        time.sleep(3)
        for client, pid in zip(clients, pids, strict=True):
            client.add_request(make_request("a", 5))
            assert len(collect(client, 1)["a"]) == 5
            assert client.call_utility("info")["pid"] == pid
            client.shutdown()
        """
    ).check()


@methods()
def test_bc61_a_subreaper_hides_nothing(method: str, tmp_path: Path) -> None:
    """Where another process than the first adopts orphans, all are gone within 2 s, and leave no zombie."""
    run_script(
        """
        import ctypes, os, signal, subprocess, sys, time
        from helpers.drivers import DOINGS, reap_all
        assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
        method, drive, directory = sys.argv[1:]
        told = [f"{directory}/{index}" for index in range(len(DOINGS))]
        hosts = [
            subprocess.Popen([sys.executable, "-W", "error", "-c", drive, method, doing, at])
            for doing, at in zip(DOINGS, told, strict=True)
        ]
        while not all(map(os.path.exists, told)):
            time.sleep(0.01)
        time.sleep(0.1)
        for host in hosts:
            host.kill()
        for host in hosts:
            host.wait()
        reap_all(2.0)
        """,
        method,
        DRIVE,
        str(tmp_path),
    ).check()


@pytest.mark.parametrize(
    ("method", "count"),
    [
        ("exec", 16),
        ("fork", 12),
        ("forkserver", 5),
        ("spawn", 4),
        pytest.param("exec", 100, marks=[pytest.mark.full, pytest.mark.slow, pytest.mark.stress]),
        pytest.param("spawn", 100, marks=[pytest.mark.full, pytest.mark.slow, pytest.mark.stress]),
        pytest.param("forkserver", 100, marks=[pytest.mark.full, pytest.mark.slow, pytest.mark.stress]),
        pytest.param("fork", 100, marks=[pytest.mark.full, pytest.mark.slow, pytest.mark.stress]),
    ],
)
def test_bc61_no_moment_of_the_start_is_unprotected(method: str, count: int) -> None:
    """A host killed at any moment of its engine's start leaves nothing that runs 2 s later, and no zombie."""
    source = "import sys; from helpers.drivers import moments; moments(sys.argv[1], int(sys.argv[2]))"
    run_script(source, method, str(count), timeout=220).check()


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.full), "SIGSTOP"])
def test_bc61_the_fork_server_may_end(how: str) -> None:
    """Killed or frozen, the fork server leaves client and engine alone; death and shutdown go on to work."""
    run_script(
        """
        import logging, os, signal, sys, time
        from multiprocessing.forkserver import _forkserver
        from helpers.clients import collect, make_request, pid_of, scripted_client
        from helpers.scenes import Waiter
        from engine_client import EngineDeadError
        from engine_client.testing.scripted import Script
        logging.getLogger("engine_client").addHandler(logging.NullHandler())  # a death is reported, which is right
        clients = [scripted_client(Script(grandchildren=1), start_method="forkserver") for _ in range(2)]
        pids = [pid_of(client) for client in clients]
        server = _forkserver._forkserver_pid
        os.kill(server, getattr(signal, sys.argv[1]))
        os.waitid(os.P_PID, server, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        time.sleep(0.5)
        for client, pid in zip(clients, pids, strict=True):
            assert client.is_alive
            client.check_health()
            client.add_request(make_request("a", 5))
            assert len(collect(client, 1)["a"]) == 5
            assert client.call_utility("info")["pid"] == pid
        waiter = Waiter(clients[0].get_output)
        os.kill(pids[0], signal.SIGKILL)
        error = waiter.end(time.monotonic(), 2.0)
        assert type(error) is EngineDeadError, error
        clients[0].shutdown()
        began = time.monotonic()
        clients[1].shutdown()
        assert time.monotonic() - began < 1.0
        os.kill(server, signal.SIGCONT)
        scripted_client(start_method="forkserver").shutdown()
        """,
        how,
    ).check()


IMPOSTOR = """
import os, sys, time
os.setpgid(0, 0)
from engine_client.engine.lifeline import arm
line = sys.stdin.readline()
arm(int(sys.argv[1]), int(line))
print("armed", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("reused", [True, False])
def test_bc61_a_reused_pid_is_not_the_launcher(reused: bool) -> None:
    """An engine whose launcher died, and whose pid went to a younger process, ends though its lifeline is held open."""
    read_end, write_end = os.pipe()
    engine = stranger = None
    try:
        engine = subprocess.Popen(
            # A shell in between: the launcher is not the engine's parent any more.
            ["sh", "-c", '"$0" -c "$1" "$2"; exit $?', sys.executable, IMPOSTOR, str(read_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[read_end],
            env=script_environment(),
        )
        assert engine.stdin is not None
        assert engine.stdout is not None
        eventually(lambda: Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text())
        time.sleep(0.02)  # two processes that start in one tick of the clock cannot be told apart
        stranger = subprocess.Popen(["sleep", "600"])
        engine.stdin.write(b"%d\n" % (stranger.pid if reused else os.getpid()))
        engine.stdin.close()
        if reused:
            assert engine.wait(DEADLOCK) == 128 + signal.SIGKILL
        else:
            assert engine.stdout.readline() == b"armed\n"
            time.sleep(0.2)
            assert engine.poll() is None
    finally:
        os.close(write_end)  # ends the engine, if anything is left of it
        os.close(read_end)
        for process in (engine, stranger):
            if process is not None:
                if process is stranger:
                    process.kill()
                process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        stream.close()
