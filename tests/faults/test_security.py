"""What others can reach: nothing that is unpickled, and no memory by name (BC-59)."""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_client import EngineDeadError, FinishReason, RemoteCallError, SerializationError, SyncMPClient
from engine_client.errors import LocalProtocolError, RemoteProtocolError
from helpers.clients import collect, make_request, pid_of, scripted_client
from helpers.payloads import BAD_SEGMENTS, MIB, arenas_of, lie, lie_here, pattern, pool_request, take_one_output
from helpers.procs import run_script
from helpers.scenes import methods

pytestmark = pytest.mark.crash

LISTENING = "0A"
ACCEPTS = 0x10000
"""``__SO_ACCEPTCON`` of /proc/net/unix."""


def busy(client: SyncMPClient) -> tuple[memoryview, Any]:
    """Have memory in both directions in use; return what is held of it."""
    block = client.allocate(MIB)
    block[:] = pattern(1, MIB)
    return block, client.call_utility("echo", block)


def sockets_of(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(link)]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def listening(pid: int) -> list[str]:
    """Return the rows of the kernel's tables that tell of a socket of this process that others could connect to."""
    found = []
    inodes = sockets_of(pid)
    for protocol in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6", "packet", "netlink", "sctp/eps"):
        table = Path(f"/proc/{pid}/net/{protocol}")
        for row in table.read_text().splitlines()[1:] if table.exists() else []:
            found += [f"{protocol}: {row}" for inode in inodes if inode in row.split()]
    for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = row.split()
        named = len(fields) > 7
        if fields[6] in inodes and (int(fields[3], 16) & ACCEPTS or named):
            found.append(f"unix: {row}")
    return found


@methods()
def test_bc59_nobody_can_connect(method: str) -> None:
    """Neither process has a socket that listens or has a name; all they have are anonymous pairs."""
    with scripted_client(start_method=method) as client:
        held = busy(client)
        mine = sockets_of(os.getpid())
        assert mine, "the pipe is a pair of sockets"
        assert listening(os.getpid()) == []
        if method != "forkserver":  # multiprocessing's own server has one in a directory of mode 0700
            assert listening(pid_of(client)) == []
        del held


def test_bc59_the_check_sees_what_listens(tmp_path: Path) -> None:
    """The check of these tests sees listening sockets of each kind."""
    import socket

    for make in (
        lambda: socket.create_server(("127.0.0.1", 0)),
        lambda: _bound(socket.socket(socket.AF_UNIX), str(tmp_path / "s")),
        lambda: _bound(socket.socket(socket.AF_UNIX), "\0engine-client-test"),
        lambda: _bound(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), ("127.0.0.1", 0)),
    ):
        with make():
            assert len(listening(os.getpid())) == 1
    assert listening(os.getpid()) == []


def _bound(socket: Any, address: Any) -> Any:
    socket.bind(address)
    return socket


def test_bc59_memory_has_no_name_and_no_other_reader() -> None:
    """All shared memory is 0600, ours, has no link in any directory, and cannot be shrunk or inherited."""
    import fcntl

    with scripted_client() as client:
        held = busy(client)
        names: set[str] = set()
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:  # the one that listed the directory
                continue
            if "engine-client" not in target:
                continue
            status = os.fstat(fd)
            assert status.st_mode & 0o7777 == 0o600
            assert (status.st_uid, status.st_nlink) == (os.geteuid(), 0)
            assert not os.get_inheritable(fd)
            if status.st_size:
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, 0)
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            names.add(target.split(":")[1].split()[0])
        assert {"engine-client-engine-requests", "engine-client-engine-results-0"} <= names
        del held


OTHER_USER = """
import os, sys
from helpers.clients import pid_of, scripted_client
from helpers.payloads import MIB
with scripted_client() as client:
    block = client.allocate(MIB)
    kept = client.call_utility("echo", block)
    pids = [os.getpid(), pid_of(client)]
    child = os.fork()
    if child == 0:
        # Between a fork and its end, as somebody else who has nothing in hand.
        os.closerange(3, 1000)
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        tried = opened = 0
        for pid in pids:
            for path in ("mem", "environ", "maps", *(f"fd/{fd}" for fd in range(3, 100)), "map_files"):
                tried += 1
                for flags in (os.O_RDONLY, os.O_RDWR):
                    try:
                        os.open(f"/proc/{pid}/{path}", flags)
                        opened += 1
                    except OSError:
                        pass
            try:
                os.kill(pid, 0)
                opened += 1
            except PermissionError:
                pass
        print(tried > 100, opened, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    assert kept.nbytes == MIB and client.call_utility("echo", 1) == 1
"""


def test_bc59_another_user_can_open_nothing() -> None:
    """Another user on this machine can open neither memory nor pipes of client and engine, for reading or writing."""
    if os.geteuid() == 0:
        assert run_script(OTHER_USER, flags=()).check(stderr=None).stdout == "True 0\n"
        return
    # Without the right to be somebody else, what the kernel decides by is shown: owner and mode of all there is.
    with scripted_client() as client:
        held = busy(client)
        for pid in (os.getpid(), pid_of(client)):
            assert os.stat(f"/proc/{pid}/fd").st_mode & 0o077 == 0
            assert os.stat(f"/proc/{pid}/mem").st_mode & 0o077 == 0
        del held


LISTING = """
import os
for name in os.listdir("/proc/self/fd"):
    if os.path.lexists(f"/proc/self/fd/{name}"):
        print(os.readlink(f"/proc/self/fd/{name}"))
"""


@methods("fork")
def test_bc59_children_of_either_side_inherit_nothing(method: str) -> None:
    """A program that host or engine starts without closing descriptors finds none of ours."""
    with scripted_client(start_method=method) as client:
        held = busy(client)
        for found in (_start_careless(None, LISTING), *client.collective_rpc(_start_careless, args=(LISTING,))):
            targets = [target for target in found.split() if "memfd" in target or "socket:" in target]
            assert targets == [], targets
        del held


def _start_careless(core: object, script: str) -> str:
    """Start a program that gets every descriptor which does not refuse to be inherited; return what it prints."""
    del core
    return subprocess.run(
        [sys.executable, "-S", "-c", script],
        close_fds=False,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    ).stdout


class Hostile:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_bc59_hostile_bytes_in_all_memory_are_only_bytes(tmp_path: Path) -> None:
    """Pickles written over payloads, status page and reports by the same user are never loaded; control goes on."""
    poison = pickle.dumps(Hostile(str(tmp_path / "mark")))
    with scripted_client() as client:
        held = busy(client)
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if "engine-client" in target and (size := os.fstat(fd).st_size):
                with mmap.mmap(fd, min(size, 4 * MIB)) as mapping:
                    # The first part of an arena is its table of words, which we leave alone here: see the next test.
                    begin = 16384 * 9 if "re" in target.split("-")[3][:2] else 0
                    if len(mapping) > begin:
                        room = os.fstat(fd).st_blocks * 512 - begin
                        for place in range(begin, min(len(mapping), begin + max(room, 0)) - len(poison), 512):
                            mapping[place : place + len(poison)] = poison
        assert client.call_utility("echo", {"still": [1]}) == {"still": [1]}
        client.add_request(make_request("a", 3))
        assert len(collect(client, 1)["a"]) == 3
        payload = pattern(2, MIB)
        assert np.array_equal(client.call_utility("echo", payload), payload)
        client.engine_status()
        del held
    assert not (tmp_path / "mark").exists()


REFUSALS = (RemoteCallError, RemoteProtocolError, LocalProtocolError, SerializationError)


@pytest.mark.parametrize("how", BAD_SEGMENTS)
def test_bc59_a_segment_that_lies_fails_its_request_only(how: str) -> None:
    """A wrong offset, length or stamp, either way, is that call's or request's error, never a read elsewhere."""
    payload = pattern(3, MIB)
    with scripted_client() as client:
        client.add_request(make_request("other", 3))
        client.collective_rpc(lie, args=(how,))
        with pytest.raises(REFUSALS, match=r"egment|range|memory"):
            client.call_utility("echo", payload)
        client.collective_rpc(lie, args=(how,))
        client.add_request(pool_request("there", payload))
        output = take_one_output(client, "there")
        if how == "negative length":  # it cannot even be written, and is then sent once more, alone
            assert np.array_equal(output.pooling_output, payload)
        else:
            assert output.finish_reason is FinishReason.ERROR
            assert output.pooling_output is None
        lie_here(client, how)
        with pytest.raises(REFUSALS):
            client.call_utility("echo", payload)
        lie_here(client, how)
        try:
            client.add_request(pool_request("here", payload))
        except REFUSALS:
            assert how == "negative length"
        else:
            assert take_one_output(client, "here").finish_reason is FinishReason.ERROR
        assert np.array_equal(client.call_utility("echo", payload), payload)
        client.add_request(pool_request("fine", payload))
        assert np.array_equal(take_one_output(client, "fine").pooling_output, payload)


def test_bc59_a_damaged_table_damages_payloads_only() -> None:
    """Random words all over the arenas' tables cost requests that use them, and no process reads where it may not."""
    payload = pattern(4, MIB)
    with scripted_client() as client:
        assert np.array_equal(client.call_utility("echo", payload), payload)
        for fd in arenas_of(client):
            with mmap.mmap(fd, 16384 * 9) as table:
                table[:] = bytes(range(256)) * (len(table) // 256)
        for _ in range(3):
            try:
                assert np.array_equal(client.call_utility("echo", payload), payload)
            except (RemoteCallError, RemoteProtocolError):
                continue
        assert client.call_utility("echo", b"small") == b"small"
        assert client.is_alive


def test_bc59_nothing_tells_the_token(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The instance token stands in no log line, no command line, no environment and no error."""
    tokens = []
    real = secrets.token_hex

    def remember(nbytes: int | None = None) -> str:
        tokens.append(real(nbytes))
        return tokens[-1]

    monkeypatch.setattr(secrets, "token_hex", remember)
    caplog.set_level(logging.DEBUG)
    client = scripted_client()
    assert [len(token) * 4 >= 64 for token in tokens] == [True]
    pid = pid_of(client)
    places = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ", "comm")]
    places.append(" ".join(client.call_utility("info")["argv"]).encode())
    with pytest.raises(EngineDeadError) as caught:
        client.call_utility("die", "sigsegv")
    places += [str(caught.value).encode(), caplog.text.encode(), repr(client).encode()]
    client.shutdown()
    assert caplog.text
    assert not [place for place in places if tokens[0].encode() in place]
