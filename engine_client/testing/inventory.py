"""What this process holds at one moment: child processes, threads, descriptors, shared memory.

``Inventory.take()`` twice and ``after.added_since(before)`` tell what came into being in between.  Everything is read
from ``/proc``; where there is none, only threads and descriptors are seen.

Of ``multiprocessing``'s two daemons, the resource tracker and the fork server, neither the processes nor their pipes
are counted: they are started once and stay, by design of the standard library.

Invariants: a process is its pid *and* its start time, a descriptor its number *and* what it refers to, so that a
number used again is not mistaken for the old one.

Threads: functions of the moment; a snapshot is immutable.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine_client.ipc.processes import stat_of

__all__ = [
    "NAME_PREFIXES",
    "Inventory",
    "ProcessKey",
    "descendants",
    "describe_process",
    "is_running",
    "key_of",
    "marked_processes",
]

NAME_PREFIXES: Final = ("engine_client", "engine-client")
"""Every name of ours in ``/dev/shm`` would start with one of these; there is to be none."""

_PROC: Final = Path("/proc")
_SHM: Final = Path("/dev/shm")  # noqa: S108  # looked at, never written
_DESCRIPTORS: Final = "/dev/fd"

_DAEMONS: Final = (
    ("multiprocessing.resource_tracker", "_resource_tracker", "_pid", "_fd"),
    ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid", "_forkserver_alive_fd"),
)
"""Module, object, and its attributes for pid and pipe: private, so they are looked for and not relied on."""


class ProcessKey(NamedTuple):
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    started: int  # clock ticks since the machine's start


def _all_pids() -> set[int]:
    try:
        return {int(name) for name in os.listdir(_PROC) if name.isdecimal()}
    except OSError:  # no /proc here: no process is seen
        return set()


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # gone, or of another user and so none of ours
        return False


def _multiprocessing_daemons() -> tuple[set[int], set[int]]:
    """Return the pids and descriptors of the resource tracker and of the fork server, where they were started."""
    pids: set[Any] = set()
    fds: set[Any] = set()
    for module_name, name, pid_name, fd_name in _DAEMONS:
        daemon = getattr(sys.modules.get(module_name), name, None)
        pids.add(getattr(daemon, pid_name, None))
        fds.add(getattr(daemon, fd_name, None))
    return pids - {None}, fds - {None}


def key_of(pid: int) -> ProcessKey | None:
    """Return the identity of the process that has this number now, or None."""
    stat = stat_of(pid, _PROC)
    return None if stat is None else ProcessKey(pid, stat.started)


def is_running(key: ProcessKey) -> bool:
    """Tell whether the process is still there, be it as a zombie."""
    return key_of(key.pid) == key


def marked_processes(mark: str, besides: Collection[int] = ()) -> set[ProcessKey]:
    """Return the other processes whose environment, as they were started with it, holds ``mark``.

    Args:
        mark: text that occurs nowhere else.
        besides: pids that need not be looked at.
    """
    ignored = {os.getpid(), *_multiprocessing_daemons()[0], *besides}
    keys = {key_of(pid) for pid in _all_pids() - ignored if _has_mark(pid, mark.encode())}
    return {key for key in keys if key is not None}


def descendants() -> set[ProcessKey]:
    """Return the children of this process and theirs, zombies too."""
    ignored, _ = _multiprocessing_daemons()
    children = _listed_children if (_PROC / "thread-self" / "children").exists() else _searched_children
    found: set[ProcessKey] = set()
    waiting = [os.getpid()]
    while waiting:
        for pid in children(waiting.pop()) - ignored:
            key = key_of(pid)
            if key is not None and key not in found:  # numbers may change hands while they are read
                found.add(key)
                waiting.append(pid)
    return found


def _listed_children(parent: int) -> set[int]:
    found: set[int] = set()
    for thread_list in _PROC.glob(f"{parent}/task/*/children"):
        with suppress(OSError):  # the thread ended meanwhile, and its children have another parent
            found.update(map(int, thread_list.read_text().split()))
    return found


def _searched_children(parent: int) -> set[int]:
    """Do the same where the kernel keeps no lists: look at every process."""
    stats = {pid: stat_of(pid, _PROC) for pid in _all_pids()}
    return {pid for pid, stat in stats.items() if stat is not None and stat.parent == parent}


def describe_process(key: ProcessKey) -> str:
    """Return number, state and command line, for a message."""
    stat = stat_of(key.pid, _PROC)
    if stat is None or stat.started != key.started:
        return f"process {key.pid} (gone meanwhile)"
    try:
        arguments = (_PROC / str(key.pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it ended between the two reads
        arguments = ""
    command = " ".join(arguments.split())[:200] or "(no command)"
    return f"process {key.pid}, child of {stat.parent}, state {stat.state}: {command}"


def _descriptors() -> dict[int, str]:
    """Return what each open descriptor refers to."""
    _, ignored = _multiprocessing_daemons()
    found: dict[int, str] = {}
    for name in os.listdir(_DESCRIPTORS):
        fd = int(name)
        try:
            status = os.fstat(fd)
        except OSError:  # the one that listed the directory
            continue
        try:
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
        except OSError:  # macOS has no links there
            target = "descriptor"
        if fd not in ignored:
            found[fd] = f"{target} (inode {status.st_dev}:{status.st_ino})"
    return found


def _mappings() -> set[str]:
    """Return the mapped files that have no name (any more): memfds and unlinked files."""
    try:
        text = (_PROC / "self" / "maps").read_text(errors="replace")
    except OSError:  # no /proc here
        return set()
    rows = (line.split(maxsplit=5) for line in text.splitlines())
    return {
        f"{row[5]} (inode {row[3]}:{row[4]})"
        for row in rows
        if len(row) == 6 and (row[5].startswith("/memfd:") or row[5].endswith("(deleted)"))
    }


def _names() -> set[str]:
    try:
        return {name for name in os.listdir(_SHM) if name.startswith(NAME_PREFIXES)}
    except OSError:  # there is no /dev/shm
        return set()


@dataclass(frozen=True)
class Inventory:
    """A snapshot; see the module."""

    pids: frozenset[int]  # of every process on this machine
    processes: frozenset[ProcessKey]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    mappings: frozenset[str]
    names: frozenset[str]

    @classmethod
    def take(cls, mark: str = "", before: Inventory | None = None) -> Inventory:
        """Look around now.

        Args:
            mark: text in the environment of the processes that this process started since then.
            before: the earlier snapshot; without one there is nobody yet who could have the mark.
        """
        marked = marked_processes(mark, before.pids) if mark and before else set()
        return cls(
            pids=frozenset(_all_pids()),
            processes=frozenset(descendants() | marked),
            threads=frozenset(threading.enumerate()),
            descriptors=frozenset(_descriptors().items()),
            mappings=frozenset(_mappings()),
            names=frozenset(_names()),
        )

    def added_since(self, before: Inventory) -> list[str]:
        """Say, one line for each, what is here and was not there."""
        return [
            *(describe_process(key) for key in sorted(self.processes - before.processes)),
            *(f"thread {thread!r}" for thread in self.threads - before.threads if thread.is_alive()),
            *(f"descriptor {fd}: {target}" for fd, target in sorted(self.descriptors - before.descriptors)),
            *(f"mapped memory {mapping}" for mapping in sorted(self.mappings - before.mappings)),
            *(f"name {_SHM / name}" for name in sorted(self.names - before.names)),
        ]
