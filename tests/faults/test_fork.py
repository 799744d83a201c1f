"""The host forks when it has a client: copies refuse to use it, harm nothing, and hold nothing up (BC-53)."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_client.testing.inventory import key_of, marked_processes
from helpers.clients import collect, make_request, pid_of, scripted_client
from helpers.forks import LOCKS, check_serves, in_fork, refuse_all
from helpers.interrupts import act_everywhere
from helpers.procs import run_script, script_environment
from helpers.scenes import METHODS, told
from helpers.timing import DEADLOCK, eventually

pytestmark = [
    pytest.mark.crash,
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:start method 'fork' in a process with other threads"),
]

STOP_BOUND = 6.0
"""Seconds of grace, and one."""
FLAGS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning", "-W", "ignore:start method:RuntimeWarning")


@pytest.mark.parametrize(
    ("method", "colour"),
    [
        ("exec", "sync"),
        pytest.param("exec", "async", marks=pytest.mark.full),
        ("exec", "dp"),
        ("forkserver", "sync"),
        ("fork", "sync"),
        pytest.param("spawn", "sync", marks=pytest.mark.full),
        pytest.param("fork", "dp", marks=pytest.mark.full),
    ],
)
def test_bc53_the_owner_goes_on_and_exits_while_a_copy_sleeps(method: str, colour: str, tmp_path: Path) -> None:
    """One copy exits, one tries every call, one sleeps on: the owner's 100 requests are right, its exit is prompt."""
    times: dict[str, float] = {}

    def watch(process: subprocess.Popen[bytes]) -> None:
        facts = told(tmp_path / "told", process=process)
        process.wait(DEADLOCK)
        times["exit"] = time.monotonic() - facts["at"]
        try:
            assert key_of(facts["sleeper"]) is not None, "the sleeping copy is to be there still"
            eventually(lambda: not Path(f"/proc/{facts['engine']}").exists(), 1.0)
        finally:
            os.kill(facts["sleeper"], signal.SIGKILL)

    run_script(
        """
        import os, sys, time
        from helpers.forks import check_serves, in_fork, refuse_all
        from helpers.clients import make_request, pid_of, scripted_client
        from helpers.drivers import tell
        client = scripted_client(start_method=sys.argv[1], colour=sys.argv[3])
        owner, pid = os.getpid(), pid_of(client)
        if os.fork() == 0:
            sys.exit(0)
        assert os.wait()[1] == 0
        in_fork(lambda: refuse_all(client, owner))
        sleeper = os.fork()
        if sleeper == 0:
            time.sleep(60)
        check_serves(client, pid)
        if os.fork() == 0:
            del client
            sys.exit(0)
        assert os.wait()[1] == 0
        check_serves(client, pid, 3)
        tell(sys.argv[2], at=time.monotonic(), sleeper=sleeper, engine=pid)
        """,
        method,
        str(tmp_path / "told"),
        colour,
        flags=FLAGS,
        started=watch,
    ).check()
    assert times["exit"] < STOP_BOUND
    assert times["exit"] < 2.0, "an idle engine needs no grace"


@pytest.mark.parametrize(
    ("way", "colour"),
    [
        *((way, "sync") for way in ("sys.exit", "exception", "os._exit", "sigterm", "multiprocessing", "gc", "exec")),
        *((way, "dp") for way in ("sys.exit", "multiprocessing", "gc")),
    ],
)
def test_bc53_however_a_copy_ends_nothing_happens_to_the_owner(way: str, colour: str) -> None:
    """A copy that ends with or without the interpreter's finalizers leaves engine and memory of its owner alone."""
    result = run_script(
        """
        import gc, multiprocessing, os, signal, sys
        import numpy as np
        from helpers.forks import check_serves
        from helpers.clients import make_request, pid_of, scripted_client
        client = scripted_client(colour=sys.argv[2])
        pid = pid_of(client)
        kept = client.call_utility("echo", np.arange(500_000))
        way = sys.argv[1]
        if way == "multiprocessing":
            process = multiprocessing.get_context("fork").Process(target=print, args=("here", client))
            process.start()
            process.join()
            assert process.exitcode == 0
        else:
            child = os.fork()
            if child == 0:
                if way == "sys.exit":
                    sys.exit(0)
                elif way == "exception":
                    sys.excepthook = lambda *_: None
                    raise ValueError
                elif way == "os._exit":
                    os._exit(0)
                elif way == "sigterm":
                    os.kill(os.getpid(), signal.SIGTERM)
                elif way == "gc":
                    del client, kept
                    gc.collect()
                    sys.exit(0)
                os.execv(sys.executable, [sys.executable, "-c", ""])
            assert os.waitpid(child, 0)[1] == {"exception": 256, "sigterm": 15}.get(way, 0)
        check_serves(client, pid, 10)
        more = [client.call_utility("echo", np.full(500_000, value)) for value in range(3)]
        assert (kept == np.arange(500_000)).all()
        assert [int(array.sum()) for array in more] == [0, 500_000, 1_000_000]
        """,
        way,
        colour,
        flags=FLAGS,
    )
    result.check()
    kind = {"sync": "SyncMPClient", "dp": "DPLBAsyncMPClient"}[colour]
    assert (f"here <{kind} forked" in result.stdout) == (way == "multiprocessing")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_bc53_a_client_as_argument_of_a_process_is_refused(method: Any) -> None:
    """A client cannot be pickled into another process: a TypeError that says what to do; the client goes on."""
    with scripted_client() as client:
        pid = pid_of(client)
        process = multiprocessing.get_context(method).Process(target=print, args=(client,))
        with pytest.raises(TypeError, match="SyncMPClient cannot be pickled: it owns processes"):
            process.start()
        check_serves(client, pid, 3)


@pytest.mark.parametrize(
    ("method", "colour"),
    [
        ("exec", "sync"),
        ("exec", "dp"),
        *(pytest.param(method, "sync", marks=pytest.mark.full) for method in METHODS[1:]),
    ],
)
def test_bc53_a_copy_of_a_copy(method: str, colour: str) -> None:
    """What a copy forks refuses as well; a client that a copy makes for itself works there, and ends there."""
    with scripted_client(start_method=method, colour=colour) as client:
        owner, pid = os.getpid(), pid_of(client)

        def use_own() -> None:
            in_fork(lambda: refuse_all(client, owner))
            with scripted_client(colour=colour) as own:
                check_serves(own, pid_of(own), 3)
            refuse_all(client, owner)

        in_fork(use_own)
        check_serves(client, pid, 3)


@pytest.mark.parametrize("name", LOCKS)
def test_bc53_forked_while_another_thread_holds_a_lock(name: str) -> None:
    """A copy in which a lock stays locked for ever refuses, forgets and exits as any other."""
    with scripted_client() as client:
        owner, pid = os.getpid(), pid_of(client)
        client.add_request(make_request("a", 3))
        assert len(collect(client, 1)["a"]) == 3
        kept = client.call_utility("echo", np.arange(100_000))
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with LOCKS[name](client):
                held.set()
                release.wait(DEADLOCK)

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            held.wait(DEADLOCK)

            def use() -> None:
                nonlocal client, kept
                refuse_all(client, owner)
                del client, kept

            in_fork(use)
        finally:
            release.set()
            thread.join()
        check_serves(client, pid, 3)
        assert kept[-1] == 99_999


@pytest.mark.parametrize(
    ("count", "colour"),
    [
        (15, "sync"),
        (8, "dp"),
        pytest.param(150, "sync", marks=[pytest.mark.full, pytest.mark.slow, pytest.mark.stress]),
    ],
)
def test_bc53_forked_again_and_again_while_threads_send(count: int, colour: str) -> None:
    """Copies forked in the middle of sends, receives and calls refuse and end; every answer of the owner is right."""
    with scripted_client(colour=colour) as client:
        owner, pid = os.getpid(), pid_of(client)
        over = threading.Event()
        errors: list[BaseException] = []

        def call(value: int) -> None:
            array = np.full(40_000, value)
            try:
                while not over.is_set():
                    assert (client.call_utility("echo", array) == value).all()
            except BaseException as error:  # noqa: BLE001  # looked at below
                errors.append(error)

        threads = [threading.Thread(target=call, args=(value,)) for value in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(count):
                in_fork(lambda: refuse_all(client, owner))
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not errors, errors
        check_serves(client, pid)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "call_utility": lambda client: client.call_utility("echo", 1),
    "add_request and get_output": lambda client: (client.add_request(make_request("a", 1)), collect(client, 1)),
    "stream": lambda client: list(client.stream(make_request("a", 1))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["call_utility", *(pytest.param(n, marks=pytest.mark.full) for n in list(OPERATIONS)[1:])]
)
def test_bc53_forked_at_every_point_of_a_call(name: str) -> None:
    """Wherever the thread is in the library when it forks, the copy refuses and ends, and the call goes on."""
    with scripted_client() as client:
        owner, pid = os.getpid(), pid_of(client)
        points = act_everywhere(
            lambda: OPERATIONS[name](client),
            lambda: in_fork(lambda: refuse_all(client, owner)),
        )
        assert points > 20
        check_serves(client, pid, 3)


def test_bc53_a_copy_holds_nothing_of_its_owner() -> None:
    """A copy has closed what it got of sockets, pipes, shared memory and process descriptors, and maps none of it."""
    with scripted_client() as client:
        assert client.call_utility("echo", np.arange(100_000))[-1] == 99_999
        mine = _ours()
        assert len(mine) >= 4, mine

        def look() -> None:
            gc.collect()
            left = _ours()
            assert not left, left

        in_fork(look)
        check_serves(client, pid_of(client), 3)


def _ours() -> list[str]:
    """Return what this process holds of a client, by descriptor or mapping."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        target = os.readlink(f"/proc/self/fd/{name}") if os.path.exists(f"/proc/self/fd/{name}") else ""
        if "memfd:engine" in target or "pidfd" in target:
            found.append(target)
    found += [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:engine" in line]
    return found


def test_bc53_the_owner_dies_hard_while_a_copy_sleeps(tmp_path: Path) -> None:
    """A sleeping copy keeps neither engine nor grandchild when its owner is killed: gone within 2 s."""
    mark = f"owner-{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        [
            sys.executable,
            *FLAGS,
            "-c",
            "import os, sys, time\n"
            "from helpers.clients import pid_of, scripted_client\n"
            "from helpers.drivers import tell\n"
            "from engine_client.testing.scripted import Script\n"
            "client = scripted_client(Script(grandchildren=1))\n"
            "below = [pid_of(client), *client.call_utility('info')['grandchildren']]\n"
            "copy = os.fork()\n"
            "if copy == 0: time.sleep(60)\n"
            "tell(sys.argv[1], copy=copy, below=below)\n"
            "client.call_utility('hold_gil', 60)",
            str(tmp_path / "told"),
        ],
        env=script_environment(ENGINE_CLIENT_TEST_RUN=mark),
    )
    try:
        facts = told(tmp_path / "told", process=process)
        time.sleep(0.1)
        process.kill()
        process.wait()
        keys = {key for key in map(key_of, facts["below"]) if key}
        assert key_of(facts["copy"]) is not None
        eventually(lambda: not marked_processes(mark) & keys, 2.0)
        assert key_of(facts["copy"]) in marked_processes(mark)
    finally:
        for key in marked_processes(mark):
            os.kill(key.pid, signal.SIGKILL)
        process.wait()
