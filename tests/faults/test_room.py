"""Memory that is not there: /dev/shm absent, tiny, read-only or full, no semaphores, limits of files (BC-06, BC-09)."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_client.testing.faults import frozen
from helpers.clients import pid_of, scripted_client
from helpers.payloads import (
    MIB,
    answer_with_checksum,
    arena_figures,
    channel_of,
    pattern,
    pool_request,
    take_one_output,
)
from helpers.procs import ScriptResult, run_script
from helpers.scenes import Waiter, methods
from helpers.timing import eventually

pytestmark = pytest.mark.crash

BASICS = """
import logging, sys
import numpy as np
from engine_client.testing.executors import PoolingExecutor
from helpers import sandbox
from helpers.payloads import MIB, pattern, pool_request, take_one_output
from helpers.scenes import client_of

def check(kind, **options):
    client = client_of(kind, PoolingExecutor, **options)
    try:
        for number, nbytes in enumerate((1, 4096, 100_000, MIB, 3 * MIB + 5, 1)):
            payload = pattern(number, nbytes).reshape(1, -1)  # the embedding of one token
            client.add_request(pool_request(str(number), payload))
            output = take_one_output(client, str(number))
            result = output.pooling_output
            assert result is not None, output
            assert result.dtype == payload.dtype and np.array_equal(result, payload), nbytes
            del output, result
        assert client.is_sleeping() is False
        try:
            client.collective_rpc("no_such_method")
        except AttributeError:
            pass
        else:
            raise AssertionError("no error")
        if kind != "inproc":
            in_memory = sum(link.channel.in_memory for link in client._session.links.values())
            print(kind, "memory", in_memory, client._session.writer.fallbacks)
        client.add_request(pool_request("aborted", pattern(9, MIB).reshape(1, -1)))
        client.abort_requests(["aborted"])
        assert client.is_sleeping() is False
    finally:
        client.shutdown()

def main(kinds, **options):
    for kind in kinds:
        check(kind, **options)
    print("done")
"""


def run_basics(prepare: str, kinds: str, options: str = "", **kwargs: Any) -> ScriptResult:
    """Run every kind of client on a machine that ``prepare`` makes; return how that went, which was well."""
    guarded = f"if __name__ == '__main__':\n    {prepare}\n    main({kinds.split()!r}, {options})\n"
    return run_script(BASICS + guarded, **kwargs).check(0)


def skip_unless(is_mounted: bool) -> None:
    """Skip a test whose script could not be given the file system that the test is about, and went well without."""
    if not is_mounted:
        pytest.skip("needs the right to mount a file system: root, or user namespaces")


KINDS = [
    "inproc exec dp",
    pytest.param("spawn forkserver fork async external", marks=pytest.mark.full),
]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("shm", ["absent", "64k", "1m", "readonly", "unwritable"])
def test_bc06_bc09_whatever_dev_shm_is_payloads_travel(shm: str, kinds: str, tmp_path: Path) -> None:
    """Without /dev/shm, or with one that is tiny or cannot be written, 3 MiB tensors go through every client."""
    result = run_basics(f"sandbox.use({shm!r})", kinds, env={"TMPDIR": str(tmp_path)})
    assert result.stdout.endswith("done\n")
    assert os.listdir(tmp_path) == []
    for line in result.stdout.splitlines()[:-1]:
        _, _, in_memory, fallbacks = line.split()
        assert (int(in_memory), int(fallbacks)) == (3, 0), "a memfd does not need /dev/shm"


@pytest.mark.parametrize("kinds", KINDS)
def test_bc09_no_semaphore_is_ever_made(kinds: str) -> None:
    """Where semaphores, queues, pools, managers, shared blocks and every look at /dev/shm fail, all works."""
    result = run_basics('sandbox.forbid("shm,semaphores")', kinds)
    assert result.stdout.endswith("done\n")


def test_bc09_the_prohibition_holds() -> None:
    """The sandbox of these tests refuses what it says: in this process, and in those started from it."""
    script = """
        import subprocess, sys
        from helpers import sandbox
        test = '''if True:
            import multiprocessing, os
            from multiprocessing.shared_memory import SharedMemory
            refused = 0
            for make in (multiprocessing.Lock, multiprocessing.Queue, multiprocessing.Pool, multiprocessing.Manager,
                         lambda: SharedMemory(create=True, size=1), lambda: open("/dev/shm/x", "w"),
                         lambda: multiprocessing.get_context("spawn").Lock()):
                try:
                    make()
                except OSError:
                    refused += 1
            print(refused)
        '''
        sandbox.forbid("shm,semaphores")
        exec(test)
        subprocess.run([sys.executable, "-c", test], check=True)
    """
    assert run_script(script, flags=()).check(0).stdout.split() == ["7", "7"]


def test_bc09_a_plain_start_makes_no_tracker_and_says_what_it_uses() -> None:
    """No resource tracker is started, nothing is made at import, and one line at INFO names the memory in use."""
    script = """
        import logging, sys, threading
        import engine_client
        assert "multiprocessing" not in sys.modules and "_multiprocessing" not in sys.modules
        assert threading.active_count() == 1
        lines = []
        class Keep(logging.Handler):
            def emit(self, record):
                lines.append(f"{record.levelname} {record.getMessage()}")
        logging.getLogger("engine_client").addHandler(Keep())
        logging.getLogger("engine_client").setLevel(logging.INFO)
        from helpers.clients import scripted_client
        with scripted_client(**eval(sys.argv[1])) as client:
            assert client.call_utility("echo", 1) == 1
        tracker = sys.modules.get("multiprocessing.resource_tracker")
        assert tracker is None or tracker._resource_tracker._fd is None
        print(*lines, sep="\\n")
    """
    for options, text in (("{}", "memfd"), ("{'arena_limit': 0}", "pipe")):
        lines = run_script(script, options).check(0).stdout.splitlines()
        told = [line for line in lines if text in line]
        assert len(told) == 1, lines
        assert told[0].startswith("INFO")


@pytest.mark.parametrize("method", ["exec", pytest.param("spawn", marks=pytest.mark.full)])
@pytest.mark.parametrize("size", ["512k", "1m", "24m"])
def test_bc06_bc09_memory_from_a_small_file_system(size: str, method: str, tmp_path: Path) -> None:
    """Without memfd, on a file system that is too small for the payloads, they come through the pipe instead."""
    prepare = f"sandbox.forget_memfd(); print(sandbox.mount_tmpfs({str(tmp_path)!r}, {size!r}))"
    result = run_basics(prepare + "; sandbox.use('64k')", method, env={"TMPDIR": str(tmp_path)})
    possible, line, done = result.stdout.splitlines()
    assert done == "done"
    assert os.listdir(tmp_path) == []
    skip_unless(possible == "True")
    _, _, in_memory, fallbacks = line.split()
    assert (int(in_memory), int(fallbacks)) == ((3, 0) if size == "24m" else (0, 3))


def test_bc09_one_writable_directory(tmp_path: Path) -> None:
    """Where memory must be a file and the temporary directory is all that can be written, that is where it is."""
    prepare = f"sandbox.forget_memfd(); sandbox.use('readonly'); print(sandbox.make_readonly({str(tmp_path)!r}))"
    result = run_basics(prepare, "exec", env={"TMPDIR": str(tmp_path)})
    assert "exec memory 3 0" in result.stdout
    assert os.listdir(tmp_path) == []
    skip_unless(result.stdout.startswith("True\n"))


FILLED = """
import os, sys
from helpers import sandbox
from helpers.clients import scripted_client
from helpers.payloads import MIB, arena_figures, pattern
from helpers.scenes import Waiter
from helpers.timing import eventually
import numpy as np
directory = sys.argv[1]
sandbox.forget_memfd()
mounted = sandbox.mount_tmpfs(directory, "16m")
sandbox.use("64k")
def fill(leave):
    "Take all room but this many bytes."
    with open(os.path.join(directory, "filler"), "ab", buffering=0) as file:
        status = os.statvfs(directory)
        left = status.f_bavail * status.f_frsize if mounted else 0
        if left > leave:
            file.write(bytes(left - leave))
def echo(number, nbytes):
    payload = pattern(number, nbytes)
    assert np.array_equal(client.call_utility("echo", payload), payload)
with scripted_client() as client:
    channel = client._session.links[0].channel
    echo(0, MIB)
    before = channel.in_memory, channel.in_pipe
    assert before == (1, 0), before
    for leave in (300_000, 4096, 0):
        fill(leave)
        for nbytes in (10, 4 * MIB, 9 * MIB, MIB):
            echo(leave + nbytes, nbytes)
    assert not mounted or channel.in_pipe > 0
    eventually(lambda: not client._session.writer.used)
    kept = client.allocate(MIB)
    os.truncate(os.path.join(directory, "filler"), 0)
    fill(2 * MIB)
    def many(start):
        for number in range(6):
            echo(start * 10 + number, MIB + number)
    threads = [Waiter(lambda start=start: many(start), again=False) for start in range(10)]
    for thread in threads:
        thread.join()
        assert thread.error is None, thread.error
    echo(99, 100)
    os.remove(os.path.join(directory, "filler"))
    echo(100, 5 * MIB)
    del kept
print("done", os.listdir(directory), mounted)
"""


def test_bc06_the_file_system_is_filled_from_outside(tmp_path: Path) -> None:
    """Space that others take between two requests, and ten senders that race for the last of it, cost no process."""
    lines = run_script(FILLED, str(tmp_path), env={"TMPDIR": str(tmp_path)}).check(0).stdout
    skip_unless(lines != "done [] False\n")
    assert lines == "done [] True\n"


def _limit_results(core: object, limit: int) -> None:
    """Limit the size of files in the engine, and so the memory that its results go through."""
    import resource

    del core
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@methods()
@pytest.mark.parametrize("limit", [0, 100_000, 2 * MIB])
def test_bc06_the_engine_alone_runs_out(limit: int, method: str) -> None:
    """A file-size limit in the engine alone sends its results through the pipe; requests use memory as before."""
    with scripted_client(start_method=method) as client:
        client.collective_rpc(_limit_results, args=(limit,))
        payload = pattern(1, 4 * MIB)
        for _ in range(3):
            assert np.array_equal(client.call_utility("echo", payload), payload)
        assert client.call_utility("echo", b"small") == b"small"
        assert channel_of(client).in_memory == 3
        [(used, capacity, _)] = client.collective_rpc(arena_figures)
        assert capacity <= limit
        assert used == 0


@pytest.mark.parametrize("limit", [40_000, 200_000, 8 * MIB])
def test_bc06_a_file_size_limit_is_in_force(limit: int) -> None:
    """With RLIMIT_FSIZE on both sides every payload arrives, and no SIGXFSZ ends anything."""
    prepare = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    run_basics(prepare, "exec")


def test_bc06_an_address_space_limit_is_in_force() -> None:
    """With RLIMIT_AS on both sides every payload arrives: what cannot be mapped goes through the pipe."""
    prepare = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))"
    run_basics(prepare, "exec")


@pytest.mark.parametrize("limit", [0, 100 * 1024, 2 * MIB])
def test_bc06_the_configured_limit(limit: int) -> None:
    """What is beyond ``arena_limit`` travels through the pipe; ``allocate`` says that there is no room, with sizes."""
    with scripted_client(arena_limit=limit) as client:
        payload = pattern(2, 4 * MIB)
        assert np.array_equal(client.call_utility("echo", payload), payload)
        with pytest.raises(MemoryError, match=str(4 * MIB)):
            client.allocate(4 * MIB)
        assert client.call_utility("echo", 1) == 1


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind", "arena_limit"),
    [
        ("utility", "bytes", 0),
        ("utility", "array", 8 << 30),
        ("request", "bytes", 0),
        pytest.param("request", "array", 8 << 30, marks=pytest.mark.stress),
    ],
)
def test_bc17_frames_over_two_gib(way: str, kind: str, arena_limit: int) -> None:
    """2 GiB and a byte are delivered equal, through the pipe and through memory; a request's come back, too."""
    payload: Any = os.urandom(MIB) * 2048 + b"!"
    checksum = zlib.crc32(payload)
    if kind == "array":
        payload = np.frombuffer(payload, np.uint8)
    with scripted_client(arena_limit=arena_limit) as client:
        if way == "utility":
            assert client.collective_rpc(_examine, args=(payload,)) == [(len(payload), checksum)]
        else:
            client.collective_rpc(answer_with_checksum)
            client.add_request(pool_request("a", payload))
            there, back = take_one_output(client, "a", timeout=120.0).pooling_output
            assert there == checksum
            assert back == payload if kind == "bytes" else np.array_equal(back, payload)
            del back
        assert client.call_utility("echo", 1) == 1


def _examine(core: object, payload: Any) -> tuple[int, int]:
    del core
    return len(payload), zlib.crc32(payload)


# -- BC-09: a frozen function ------------------------------------------------------------------------------------------


def _jump(core: object, seconds: float) -> None:
    """Let minutes pass in this process from one moment to the next."""
    del core
    for name in ("monotonic", "time", "perf_counter"):
        real = getattr(time, name)
        setattr(time, name, lambda real=real: real() + seconds)


def test_bc09_clocks_that_jump_kill_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function frozen for ten minutes, client and engine, goes on: calls in flight are answered, nobody is dead."""
    with scripted_client() as client:
        pid = pid_of(client)
        client.collective_rpc(_jump, args=(600.0,))
        pending = Waiter(lambda: client.call_utility("deferred", "late", 0.5), again=False)
        with frozen(pid):
            reader = Waiter(client.get_output)
            eventually(lambda: client.utility_results)
            for name in ("monotonic", "time", "perf_counter"):
                real = getattr(time, name)
                monkeypatch.setattr(time, name, lambda real=real: real() + 600.0)
            time.sleep(0.3)
            assert client.is_alive
        pending.join(10)
        assert (pending.error, pending.result) == (None, "late")
        assert client.call_utility("echo", 1) == 1
        client.check_health()
        assert client.is_alive
        assert pid_of(client) == pid
        assert reader.is_alive()
    monkeypatch.undo()
    reader.join(10)
