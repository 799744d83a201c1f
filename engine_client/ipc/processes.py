"""What the system knows of processes: who descends from whom, and whether memory is limited.

A process that calls ``setsid`` leaves its group, and one whose parent dies leaves the tree.  So descendants have to be
recorded while the engine lives, as pid *and* time of creation: a pid alone may come to mean a stranger.

Whoever asks may be short of descriptors, and what is asked about may vanish at any moment; both mean "not found".

psutil is loaded only when there is a child to look at: most engines have none, and it takes 10 ms and 2 MB.

Threads: stateless; called from anywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import psutil

__all__ = [
    "Descendant",
    "Stat",
    "children_of_this_process",
    "descendants",
    "find_descendant",
    "is_stopped",
    "memory_hint",
    "stat_of",
    "vitals",
]

_UNLIMITED: Final = 1 << 60
"""Bytes from which on a limit is none: the old cgroups write the largest number of pages for it."""
_SAME_START: Final = 100
"""Hundredths of a second."""


class Descendant:
    """One process that was found below another; never another process that got its pid later."""

    __slots__ = ("_process", "pid")

    def __init__(self, process: psutil.Process) -> None:
        self.pid = process.pid
        self._process = process  # keeps the time of creation and compares it

    @property
    def started(self) -> int:
        """Return when it was created, in hundredths of a second; 0 when it is gone."""
        import psutil  # noqa: PLC0415 (see the module docstring)

        with suppress(psutil.Error, OSError):
            return int(self._process.create_time() * 100)
        return 0

    def is_running(self) -> bool:
        """Tell whether it still runs; a zombie does not."""
        import psutil  # noqa: PLC0415 (see the module docstring)

        with suppress(psutil.Error, OSError):  # it ended while we looked
            return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        return False

    def kill(self) -> None:
        """Send SIGKILL if it still is the process that was recorded."""
        import psutil  # noqa: PLC0415 (see the module docstring)

        with suppress(psutil.Error, OSError):  # it is gone, or it runs as somebody else and is not ours to end
            self._process.kill()

    def group(self) -> int | None:
        """Return its process group, None when it is gone."""
        with suppress(ProcessLookupError):
            group = os.getpgid(self.pid)
            return group if self.is_running() else None
        return None

    def __repr__(self) -> str:
        return f"<Descendant pid={self.pid}>"


def descendants(pid: int) -> list[Descendant]:
    """Return all processes below ``pid``, whatever group or session they are in; none when it is gone."""
    if _has_children(pid) is False:
        return []
    try:
        import psutil  # noqa: PLC0415 (see the module docstring)
    except (ImportError, OSError):  # so late in the interpreter's end, or without descriptors: the lifeline is left
        return []
    try:
        return [Descendant(process) for process in psutil.Process(pid).children(recursive=True)]
    except (psutil.Error, OSError):  # it ended while we looked
        return []


def find_descendant(pid: int, started: int) -> Descendant | None:
    """Return the process that another one has recorded by pid and ``started``; None when it is gone."""
    try:
        import psutil  # noqa: PLC0415 (see the module docstring)
    except (ImportError, OSError):  # as above
        return None
    with suppress(psutil.Error, OSError):  # it is gone
        found = Descendant(psutil.Process(pid))
        # To the second, since each process reckons with a time of the machine's start that it has read itself.
        if abs(found.started - started) <= _SAME_START:
            return found
    return None


def children_of_this_process() -> bytes | None:
    """Return something that changes when children come or go: empty without children, None where nothing tells.

    Made to be asked often: a few microseconds while there are none.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return b""
    found = []
    try:
        for task in os.listdir("/proc/self/task"):
            with (
                suppress(FileNotFoundError, ProcessLookupError),
                open(f"/proc/self/task/{task}/children", "rb") as file,
            ):
                found.append(file.read())
    except OSError:  # no /proc
        return None
    return b"".join(found) or None


def _has_children(pid: int) -> bool | None:
    """Tell whether a process has children; None where the system does not say."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                if file.read(1):
                    return True
    except OSError:  # no /proc, a kernel without this file, or the process is gone
        return None
    return False


class Stat(NamedTuple):
    """What Linux says of a process in ``/proc/<pid>/stat`` (``man 5 proc``)."""

    state: str  # one letter: R runs, S sleeps, T is stopped, t is held by a debugger, Z has ended, ...
    parent: int
    started: int  # clock ticks since the machine's start

    @property
    def is_alive(self) -> bool:
        """Tell whether it has not ended; a zombie has."""
        return self.state not in "ZX"


def stat_of(pid: int, proc: str | os.PathLike[str] = "/proc") -> Stat | None:
    """Return a process's state, parent and start; None when it is gone, or where there is no ``proc``."""
    try:
        with open(os.path.join(proc, str(pid), "stat"), "rb") as file:
            # The name, in parentheses, may hold anything; behind the last one are state, parent, ...
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[19])) if len(fields) > 19 else None


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped, so that it can do nothing."""
    stat = stat_of(pid)
    return stat is not None and stat.state in "Tt"


def vitals(pid: int) -> tuple[int | None, float | None]:
    """Return the bytes that a process has in memory, and the seconds since its start; None for what is not known."""
    import psutil  # noqa: PLC0415 (see the module docstring)

    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        with process.oneshot():
            return process.memory_info().rss, max(0.0, time.time() - process.create_time())
    return None, None


def memory_hint(root: str = "/") -> str:
    """Return a sentence for somebody whose process was killed: is memory limited, and has the limit killed before?

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    limits = []
    kills = 0
    for directory, limit_name, events_name in _memory_groups(root):
        limit = _read_number(os.path.join(directory, limit_name))
        if limit is not None and limit < _UNLIMITED:
            limits.append(limit)
        kills = max(kills, _read_count(os.path.join(directory, events_name), "oom_kill"))
    if not limits:
        return "no memory limit found; the kernel log says whether the machine ran out of memory"
    text = f"memory is limited to {min(limits) / 2**30:.1f} GiB here (control group)"
    if kills:
        return f"{text}, and {kills} processes were killed for it so far: it probably ran out of memory"
    return f"{text}; nothing was killed for it so far"


def _memory_groups(root: str) -> Iterator[tuple[str, str, str]]:
    """Yield the directories of our memory control groups with the names of their files for limit and events."""
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:  # no control groups on this system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, names = os.path.join(root, "sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.oom_control")
        elif not controllers:
            top, names = os.path.join(root, "sys/fs/cgroup"), ("memory.max", "memory.events")
        else:
            continue
        # In a container the path may be the host's and not exist; the top is then our own group.
        while path.strip("/"):
            yield os.path.join(top, path.strip("/")), *names
            path = os.path.dirname(path)
        yield top, *names


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return int(file.read())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _read_count(path: str, name: str) -> int:
    with suppress(OSError, ValueError), open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
