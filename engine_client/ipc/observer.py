"""The engines of this machine as anybody may see them who runs as the same user: their status pages, read only.

::

    /proc/PID/fd/N ─▶ memfd:engine-client-engine-status-… ─▶ StatusReader (a mapping that cannot be written)

The pages are nameless and nothing listens, but Linux lets a process open what another one of the same user has open.
Nothing is asked of the engines, which do not notice.

It needs Linux with ``/proc``, and the same user and PID namespace; an engine that is not dumpable, or a kernel that
keeps even reading ``/proc`` to root, is not seen.

Threads: any; stateless.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from engine_client.ipc.counters import Reading
from engine_client.ipc.processes import stat_of
from engine_client.ipc.status_page import EngineState, EngineStatus, StatusReader

__all__ = ["RunningEngine", "running_engines"]

_MEMFD: Final = "/memfd:engine-client-engine-status"
_FILE: Final = "engine-client-"
"""In the name of a page where there is no ``memfd_create``."""
_LONG_STEP: Final = 5.0
"""Seconds in one step from which on it is told how long."""


@dataclass(frozen=True)
class RunningEngine:
    """One engine, as it is seen from outside.

    Args:
        status: as ``client.engine_status()`` tells it; ``condition`` is ``starting``, ``ready``, ``paused``,
            ``sleeping``, ``in a step for … s``, ``leaving`` or ``dead``.
        counted: what it has done since it started; zeros if it is an engine that does not count.
        pid: its process.
        client: the process that has launched it; 0 when it is dead.
        memory: bytes that it has in memory.
        uptime: seconds since it started.
    """

    status: EngineStatus
    counted: Reading
    pid: int
    client: int
    memory: int
    uptime: float


def running_engines(pid: int | None = None) -> list[RunningEngine]:
    """Return the engines that can be seen, by client and rank; dead ones are there as long as their client keeps them.

    Args:
        pid: only those that this process has open: an engine, or a client with all its engines; None: any process.

    Raises:
        OSError: there is no ``/proc``, or no such process, or it is another user's.
    """
    pages: dict[tuple[int, int], StatusReader] = {}
    try:
        if pid is None:
            for name in filter(str.isdigit, os.listdir("/proc")):
                with suppress(OSError):  # it is another user's, or has ended
                    _open_pages(int(name), pages)
        else:
            _open_pages(pid, pages)
        found = [_describe(page) for page in pages.values() if page.pid]
    finally:
        for page in pages.values():
            page.close()
    return sorted(found, key=lambda engine: (engine.client, engine.status.rank, engine.pid))


def _open_pages(pid: int, pages: dict[tuple[int, int], StatusReader]) -> None:
    """Open the pages that a process has open, but those that are open already, by device and inode."""
    directory = f"/proc/{pid}/fd"
    for name in os.listdir(directory):
        path = f"{directory}/{name}"
        with suppress(OSError):  # it has been closed meanwhile
            target = os.readlink(path)
            if target.startswith(_MEMFD) or (_FILE in target and not target.startswith("/memfd:")):
                status = os.stat(path)
                key = status.st_dev, status.st_ino
                if key not in pages:
                    _open_page(path, key, pages)


def _open_page(path: str, key: tuple[int, int], pages: dict[tuple[int, int], StatusReader]) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pages[key] = StatusReader(fd, is_foreign=True)
    except ValueError:  # too short, or something else
        os.close(fd)
    except BaseException:
        os.close(fd)
        raise


def _describe(page: StatusReader) -> RunningEngine:
    pid, now = page.pid, time.monotonic()
    stat = stat_of(pid)
    condition = _condition(page.snapshot(), now, is_alive=stat is not None and stat.is_alive)
    status = replace(page.snapshot(), condition=condition)
    parent = stat.parent if stat is not None else 0
    return RunningEngine(status, page.counters.read(), pid, parent, _memory(pid), now - page.started_at)


def _condition(status: EngineStatus, now: float, *, is_alive: bool) -> str:
    if not is_alive:
        return "dead"
    if status.state != EngineState.READY:
        return "starting" if status.state < EngineState.READY else "leaving"
    seconds = now - status.step_began_at
    if status.is_in_step and seconds > _LONG_STEP:
        return f"in a step for {seconds:.0f} s"
    return "sleeping" if status.is_sleeping else "paused" if status.is_paused else "ready"


def _memory(pid: int) -> int:
    """Return how many bytes a process has in memory; 0 when it is gone."""
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
