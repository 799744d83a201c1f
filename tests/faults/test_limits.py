"""What the system limits: descriptors, processes, threads, address space, the memory of a control group (BC-06).

The call that meets a limit says so; afterwards the client works or is cleanly dead, and nothing is left.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from helpers.clients import collect, make_request, scripted_client
from helpers.procs import run_script

pytestmark = pytest.mark.crash

START = """
import os, resource, sys, threading
from engine_client import RemoteCallError
from helpers import sandbox
from helpers.clients import collect, make_request, scripted_client

def inventory():
    return len(os.listdir("/proc/self/fd")), threading.active_count(), os.path.exists("/proc/self/task") and open(
        f"/proc/self/task/{os.getpid()}/children").read()

def try_to_start(spare, before, limit, number, *messages):
    '''Start with so much to spare; tell whether that went well: if not, it says why and leaves nothing.'''
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (number, hard))
    try:
        client = scripted_client()
    except (OSError, RuntimeError) as error:  # StartupError is one
        assert any(message in str(error) for message in messages), error
        resource.setrlimit(limit, (soft, hard))
        assert inventory() == before, (inventory(), before)
        return False
    try:
        client.add_request(make_request("a", 3))
        assert len(collect(client, 1)["a"]) == 3
        assert client.call_utility("echo", bytes(1 << 20)) == bytes(1 << 20)
        client.check_health()
    finally:
        client.shutdown()
        resource.setrlimit(limit, (soft, hard))
    return True
"""


def test_bc06_a_start_for_which_descriptors_do_not_suffice() -> None:
    """With one more each time: the error is ``Too many open files``, nothing is left, until there are enough."""
    script = """
        for spare in range(40):
            before = inventory()
            taken = max(map(int, os.listdir("/proc/self/fd")))
            if try_to_start(spare, before, resource.RLIMIT_NOFILE, taken + spare, "Too many open files"):
                break
        print(spare > 2, spare < 30)
    """
    result = run_script(START + textwrap.dedent(script), flags=()).check(stderr=None)
    assert result.stdout == "True True\n"


def test_bc06_a_start_for_which_processes_or_threads_do_not_suffice() -> None:
    """The process, then the threads of either side: the error says which there are no more of, and nothing is left."""
    script = """
        sandbox.be_somebody_else()
        own = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                own += (os.stat(f"/proc/{pid}").st_uid == os.getuid()) * len(os.listdir(f"/proc/{pid}/task"))
            except OSError:
                pass
        failed = 0
        for spare in range(20):
            messages = ("Resource temporarily unavailable", "can't start new thread")
            if try_to_start(spare, inventory(), resource.RLIMIT_NPROC, own + spare - 1, *messages):
                break
            failed += 1
        print(failed > 1, failed < 19)
    """
    result = run_script(START + textwrap.dedent(script), flags=()).check(stderr=None)
    assert result.stdout == "True True\n"


def test_bc06_a_client_that_has_no_more_descriptors() -> None:
    """It sends payloads, asks for health and stacks, and streams; what it cannot map is that call's error."""
    script = """
        with scripted_client() as client:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                for size in (10, 100_000, 1 << 20, 20 << 20, 10):
                    try:  # what comes through memory has to be mapped, which takes a descriptor
                        assert client.call_utility("echo", bytes(size)) == bytes(size)
                    except (OSError, RemoteCallError) as error:
                        assert "Too many open files" in str(error) and size > 10, (size, error)
                    client.add_request(make_request(f"r{size}", 3, cache_salt="x" * size))
                    assert len(collect(client, 1)[f"r{size}"]) == 3
                client.check_health()
                assert "run_engine" in client.dump_stacks()[0]
                assert len(list(client.stream(make_request("s", 3)))) == 3
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert client.call_utility("echo", bytes(20 << 20)) == bytes(20 << 20)
        print("done")
    """
    assert run_script(START + textwrap.dedent(script), flags=()).check(stderr=None).stdout == "done\n"


def _limit(core: Any, name: str, more: int) -> None:
    """Leave this engine so much more of something than it has."""
    import resource

    del core
    now = 3
    if name == "RLIMIT_AS":
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    limit = getattr(resource, name)
    resource.setrlimit(limit, (now + more, resource.getrlimit(limit)[1]))


def _allocate(core: Any, size: int) -> int:
    del core
    return len(bytes(size))


def _open(core: Any) -> None:
    del core
    os.close(os.open("/dev/null", os.O_RDONLY))


def test_bc06_an_engine_that_has_no_more_descriptors() -> None:
    """What needs one fails in its call, by the system's own error; requests and payloads go on."""
    with scripted_client() as client:
        client.collective_rpc(_limit, args=("RLIMIT_NOFILE", 0))
        with pytest.raises(OSError, match="Too many open files"):
            client.collective_rpc(_open)
        for size in (10, 100_000, 1 << 20, 20 << 20, 10):
            try:  # as above
                assert client.call_utility("echo", bytes(size)) == bytes(size)
            except OSError as error:
                assert size > 10  # it may do
                assert "Too many open files" in str(error)  # noqa: PT017
        client.add_request(make_request("a", 3))
        assert len(collect(client, 1)["a"]) == 3
        client.check_health()
        assert "run_engine" in client.dump_stacks()[0]


def test_bc06_an_engine_that_has_no_more_address_space() -> None:
    """``MemoryError`` in the call that met it; the next one, and requests, are answered."""
    with scripted_client() as client:
        client.collective_rpc(_allocate, args=(10,))
        client.collective_rpc(_limit, args=("RLIMIT_AS", 64 << 20))
        for _ in range(3):
            with pytest.raises(MemoryError):
                client.collective_rpc(_allocate, args=(1 << 30,))
            assert client.collective_rpc(_allocate, args=(1 << 20,)) == [1 << 20]
        client.add_request(make_request("a", 3))
        assert len(collect(client, 1)["a"]) == 3
        client.check_health()


GROUP = """
from engine_client import EngineDeadError

def hog(core):
    return len(bytearray(b"x") * (600 << 20))

if __name__ == "__main__":
    with open(sys.argv[1] + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    client = scripted_client()
    try:
        client.collective_rpc(hog)
    except EngineDeadError as error:
        print("SIGKILL(-9)" in str(error), "memory is limited to 0.3 GiB" in str(error), client.is_alive)
    client.shutdown()
    with scripted_client() as client:
        client.check_health()
    print("done")
"""


def memory_group() -> Path:
    """Make a control group of 300 MiB; skip the test where that cannot be."""
    for root, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"engine-client-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(300 << 20))
        except OSError:
            group.rmdir()
            continue
        return group
    pytest.skip("needs the right to make a control group with a memory limit: root, and the file system mounted")


@pytest.mark.slow
def test_bc06_what_a_control_group_kills_is_dead() -> None:
    """An engine that is killed for its group's memory is dead at once, the error names the limit; another one works."""
    group = memory_group()
    try:
        result = run_script(START + GROUP, str(group), flags=()).check(stderr=None)
        assert result.stdout == "True True False\ndone\n"
    finally:
        group.rmdir()
