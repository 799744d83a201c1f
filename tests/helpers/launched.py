"""Entry functions that tests launch in place of an engine, and what a launching test needs.

An entry is called in the child as ``entry(fds, launcher_pid)``; it may use ``fds.channel``, a socket, to tell the test
how things are.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine_client.engine import lifeline
from engine_client.engine.lifeline import Lifeline
from engine_client.ipc.engine_fds import EngineFds
from engine_client.ipc.handle import ChildHandle
from engine_client.ipc.launcher import launch

PATH = (str(Path(__file__).parent.parent),)
"""What a child needs on ``sys.path`` to import this file as ``helpers.launched``."""


class Ends:
    """Both ends of what connects a launcher with a child."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        read_end, self.lifeline = os.pipe()
        memory = [os.memfd_create("test") for _ in range(4)]
        self.fds = EngineFds(_high(theirs.detach()), _high(read_end), *map(_high, memory))

    def parent_fds(self) -> list[int]:
        return [self.channel.fileno(), self.lifeline]

    def close_child_ends(self) -> None:
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)

    def close_lifeline(self) -> None:
        fd, self.lifeline = self.lifeline, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        self.close_child_ends()
        self.close_lifeline()
        self.channel.close()


def _high(fd: int) -> int:
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return high


class Child:
    """A launched child and our ends."""

    def __init__(self, handle: ChildHandle, ends: Ends) -> None:
        self.handle = handle
        self.ends = ends

    def ask(self, order: dict[str, Any]) -> None:
        self.ends.channel.sendall(json.dumps(order).encode() + b"\n")

    def hear(self, timeout: float = 30) -> dict[str, Any] | None:
        """Return the child's next word, None when it has hung up."""
        self.ends.channel.settimeout(timeout)
        text = b""
        while not text.endswith(b"\n"):
            with suppress(ConnectionResetError):
                if byte := self.ends.channel.recv(1):
                    text += byte
                    continue
            return None
        heard: dict[str, Any] = json.loads(text)
        return heard

    def close(self) -> None:
        self.handle.kill()
        self.handle.join(10)
        with suppress(ProcessLookupError):  # the child is a zombie, or its group lives on, or the test has cleaned up
            os.killpg(self.handle.pid, signal.SIGKILL)
        self.handle.reap()
        self.handle.close()
        self.ends.close()


def start(entry: str, method: str = "exec", name: str = "rank 0") -> Child:
    """Launch ``helpers.launched:<entry>``."""
    ends = Ends()
    try:
        handle = launch(
            method, name=name, fds=ends.fds, parent_fds=ends.parent_fds(), entry=f"helpers.launched:{entry}", path=PATH
        )
    except BaseException:
        ends.close()
        raise
    ends.close_child_ends()
    return Child(handle, ends)


@contextmanager
def started(entry: str, method: str = "exec") -> Iterator[Child]:
    child = start(entry, method)
    try:
        yield child
    finally:
        child.close()


def tell(fds: EngineFds, word: dict[str, Any]) -> None:
    os.write(fds.channel, json.dumps(word).encode() + b"\n")


def wait_for_order(fds: EngineFds) -> dict[str, Any] | None:
    """Return the launcher's next word, None when it has hung up."""
    text = b""
    while not text.endswith(b"\n"):
        byte = os.read(fds.channel, 1)
        if not byte:
            return None
        text += byte
    heard: dict[str, Any] = json.loads(text)
    return heard


def describe(fds: EngineFds, launcher_pid: int) -> None:
    """Say what this process is like, then end."""
    tell(fds, description(fds, launcher_pid))


def description(fds: EngineFds, launcher_pid: int) -> dict[str, Any]:
    import engine_client

    open_fds = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            open_fds[name] = os.readlink(f"/proc/self/fd/{name}")
    return {
        "pid": os.getpid(),
        "launcher": launcher_pid,
        "parent": os.getppid(),
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "flags": [
            getattr(sys.flags, n)
            for n in dir(sys.flags)
            if not n.startswith(("_", "n_")) and n not in {"count", "index"}
        ],
        "warnoptions": sys.warnoptions,
        "xoptions": sys._xoptions,
        "path": sys.path,
        "argv": sys.argv,
        "cwd": os.readlink("/proc/self/cwd"),
        "package": engine_client.__file__,
        "fds": open_fds,
        "ours": list(fds),
        "inheritable": [os.get_inheritable(fd) for fd in fds],
        "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "sigchld": int(signal.getsignal(signal.SIGCHLD)),
        "sigterm": str(signal.getsignal(signal.SIGTERM)),
        "streams": [stream is not None for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "environment": os.environ.get("ENGINE_CLIENT_TEST_WORD"),
        "main_file": getattr(sys.modules["__main__"], "__file__", None),
    }


def obey(fds: EngineFds, launcher_pid: int, line: Lifeline | None = None) -> None:
    """Say hello, then do as told until the launcher hangs up."""
    faulthandler.disable()  # pytest's: a forked child's planned death is no news
    tell(fds, {"pid": os.getpid()})
    while (order := wait_for_order(fds)) is not None:
        ((what, argument),) = order.items()
        if what == "return":
            return
        if what == "guard":
            line.guard_descendants()
            tell(fds, {"guards": len(line.guards)})
        elif what == "native":
            tell(fds, {})  # what follows does not come back
            NATIVE[argument]()
        else:
            tell(fds, {"pid": ORDERS[what](argument)})


def _spawn(where: str) -> int:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=where == "session", stdout=subprocess.PIPE)
    child.stdout.read(1)
    return child.pid


def _fork(where: str) -> int:
    pid = os.fork()
    if pid == 0:
        if where == "session":
            os.setsid()
        time.sleep(600)
        os._exit(0)
    return pid


def _shell(script: str) -> int:
    """Start a shell in a session of its own; its first two descriptors are the launcher's to give."""
    return subprocess.Popen(["sh", "-c", script], start_new_session=True).pid


def _raise(code: int) -> None:
    raise SystemExit(code)


ORDERS: dict[str, Callable[[Any], int | None]] = {
    "spawn": _spawn,  # a grandchild, in this process "group" or in a "session" of its own
    "fork": _fork,
    "shell": _shell,
    "exit": os._exit,
    "raise": _raise,
    "signal": signal.raise_signal,
}
NATIVE = {"free": lambda: ctypes.CDLL(None).sleep(600), "holds the GIL": lambda: ctypes.PyDLL(None).sleep(600)}


def armed(fds: EngineFds, launcher_pid: int) -> None:
    """Arm the lifeline, then do as told."""
    line = lifeline.arm(fds.lifeline, launcher_pid)
    obey(fds, launcher_pid, line)
    line.leave(0.05)


def armed_without_signals(fds: EngineFds, launcher_pid: int) -> None:
    """As on a system where the kernel cannot send SIGKILL for a descriptor."""
    del fcntl.F_SETSIG
    armed(fds, launcher_pid)


def armed_without_pidfd(fds: EngineFds, launcher_pid: int) -> None:
    """As on a kernel that has no pidfd."""
    lifeline.has_pidfd = lambda: False
    lifeline._LOOK = 0.1
    armed(fds, launcher_pid)


def armed_by_nothing_but_looks(fds: EngineFds, launcher_pid: int) -> None:
    del fcntl.F_SETSIG
    armed_without_pidfd(fds, launcher_pid)


def armed_late(fds: EngineFds, launcher_pid: int) -> None:
    """Arm the lifeline when the launcher is gone already."""
    tell(fds, {"pid": os.getpid()})
    while os.getppid() == launcher_pid:
        time.sleep(0.005)
    armed(fds, launcher_pid)


def ignore_sigterm(fds: EngineFds, launcher_pid: int) -> None:
    """Ignore SIGTERM and every order."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(fds, {"pid": os.getpid()})
    time.sleep(600)


def flush_when_asked(fds: EngineFds, launcher_pid: int) -> None:
    """Write a file for some time when the launcher hangs up; SIGTERM makes it no faster."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    tell(fds, {"pid": os.getpid()})
    order = wait_for_order(fds)
    tell(fds, {})
    wait_for_order(fds)
    until = time.monotonic() + order["seconds"]
    with open(order["path"], "w") as file:
        while (left := until - time.monotonic()) > 0:
            file.write("flushed\n")
            file.flush()
            time.sleep(min(left, 0.02))
        file.write("all\n")
