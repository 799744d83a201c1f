"""Nameless shared memory: its descriptor, its growth, and how much of it the machine can still give.

``create_memory`` makes a descriptor without a name anywhere: nothing can collide, nobody else can open it, and the
kernel takes it away with the last process that holds it, also after SIGKILL.  ``reserve`` turns part of it into memory
that exists; only such a part may be touched, since touching what the kernel cannot provide is SIGBUS, not an error.
``memory_room`` tells beforehand how much there is, because asking a memory cgroup for more than it has does not fail:
the process is killed.

Where there is no ``memfd_create`` (before Linux 3.17, some sandboxes, macOS) the memory is an unlinked temporary file.

Invariants: I5 (nothing outlives the processes that hold it), I11 (a half-made descriptor is closed).

Threads: stateless; callable from any.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from typing import Final

from engine_client.ipc.descriptors import above_stdio

__all__ = ["create_memory", "describe_memory", "memory_room", "reserve"]

_PREFIX: Final = "engine-client-"
_MFD_NOEXEC_SEAL: Final = 0x8
"""Linux 6.3: never executable.  Without it newer kernels complain in their log, or refuse (``vm.memfd_noexec``)."""
_SLICE: Final = 1 << 20
"""Bytes reserved in one system call.  A signal makes it start over, so it must be shorter than a profiler's timer."""
_MARGIN: Final = 32 << 20
"""Bytes left to the others: the check and the reservation are not one act, and the receiver needs memory too."""
_ROOMY: Final = 256 << 20
"""A file system with this many bytes free will do for a temporary file."""
_Names = tuple[str, str, tuple[str, ...]]
_V2: Final[_Names] = ("memory.current", "inactive_file", ("memory.max", "memory.high"))
_V1: Final[_Names] = ("memory.usage_in_bytes", "total_inactive_file", ("memory.limit_in_bytes",))
"""Of each cgroup version: bytes in use, the part of them that the kernel gives back on demand, the limits."""
_UNLIMITED: Final = 1 << 60
"""Version 1 says no limit by a number that is about the largest there is."""


def create_memory(name: str) -> int:
    """Return a descriptor (3 or above, close-on-exec, mode 0600) of new, nameless memory of size 0.

    Args:
        name: shown by the system's tools; need not be unique.

    Raises:
        OSError: there are no descriptors left, or neither ``memfd_create`` nor a writable directory.
    """
    try:
        return _protect(above_stdio(_memfd(_PREFIX + name[:200])))
    except (AttributeError, OSError):
        return _temporary_file()  # if it was for want of descriptors, this says so


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:
        return os.memfd_create(name, flags)  # the kernel is older than the flag


def _protect(fd: int) -> int:
    """Close ``fd`` to other users, and make it impossible for anybody to shrink it under a mapping."""
    try:
        os.fchmod(fd, 0o600)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _temporary_file() -> int:
    """Return a file that has no name, in memory if there is enough of it, else on disk."""
    import tempfile  # noqa: PLC0415  # costs 10 ms at start-up

    directory = "/dev/shm"  # noqa: S108  # opened there without a name, or with a random one and mode 0600
    if _free_space(directory) < _ROOMY:
        directory = tempfile.gettempdir()
    with tempfile.TemporaryFile(prefix=_PREFIX, dir=directory, buffering=0) as file:
        return fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)


def describe_memory(fd: int) -> str:
    """Say in a few words, for the log, what memory from ``create_memory`` is."""
    with suppress(AttributeError, OSError):  # no seals here, or not of this file
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return "shared memory (memfd_create)"
    try:
        place = os.path.dirname(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:  # no /proc here
        place = "the directory for temporary files"
    return f"shared memory (no memfd_create here: an unlinked temporary file in {place})"


def _free_space(directory: str) -> int:
    """Return the bytes that a directory's file system can give; 0 where we cannot write."""
    if not os.access(directory, os.W_OK | os.X_OK):
        return 0
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def reserve(fd: int, start: int, stop: int) -> Iterator[int]:
    """Make bytes ``start`` to ``stop`` exist, slice by slice; yield the end of what exists so far.

    The bytes must never have been written: where the system has no ``posix_fallocate`` they are overwritten by zeros.

    Raises:
        OSError: there is no more room; what was yielded before stays usable.
    """
    while start < stop:
        end = min(start + _SLICE, stop)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, start, end - start)
        else:
            start += os.pwrite(fd, bytes(end - start), start)
            end = start
        start = end
        yield end


def memory_room(fd: int, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Return how many bytes ``reserve`` may ask for without risk: 0 or more, ``sys.maxsize`` where nothing tells.

    It is the least of what the file system, the system's memory and the memory cgroups (versions 1 and 2, all levels
    that can be seen) have left, less a margin.
    """
    rooms = [sys.maxsize, *_file_system_room(fd), *_system_room(proc), *_cgroup_rooms(proc, cgroups)]
    return max(0, min(rooms) - _MARGIN)


def _file_system_room(fd: int) -> Iterator[int]:
    status = os.fstatvfs(fd)
    if status.f_blocks:  # zero blocks: a memfd, which no file system limits
        yield status.f_bavail * status.f_frsize + _MARGIN  # reserving fails here without harm: no margin needed


def _system_room(proc: str) -> Iterator[int]:
    for line in _read(f"{proc}/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup_rooms(proc: str, cgroups: str) -> Iterator[int]:
    for line in _read(f"{proc}/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory" or "memory" in controllers.split(","):
            mounts, names = [f"{cgroups}/memory"], _V1
        elif not controllers:
            mounts, names = [cgroups, f"{cgroups}/unified"], _V2
        else:
            continue
        for mount in mounts:
            directory = mount + path.rstrip("/")
            # In a container the path may be the host's, which cannot be seen: what can be seen is the mount itself.
            while len(directory) >= len(mount):
                yield from _group_room(directory, *names)
                directory = directory.rpartition("/")[0]


def _group_room(directory: str, usage_name: str, reclaimable_name: str, limit_names: tuple[str, ...]) -> Iterator[int]:
    texts = [_read(f"{directory}/{name}").strip() for name in limit_names]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < _UNLIMITED]
    if limits and (usage := _read(f"{directory}/{usage_name}").strip()).isdigit():
        yield min(limits) - int(usage) + _reclaimable(directory, reclaimable_name)


def _reclaimable(directory: str, name: str) -> int:
    """Return the page cache that counts as used, but that the kernel drops before it kills anybody."""
    for line in _read(f"{directory}/memory.stat").splitlines():
        if line.startswith(name + " "):
            return int(line.split()[1])
    return 0


def _read(path: str) -> str:
    files: list[FileIO] = []
    try:
        # One C call: an interrupt that came between opening and keeping the file would leave it open.
        files.extend(map(FileIO, (path,)))  # a third of the time of reading text
        return files[0].read().decode("ascii", "replace")
    except OSError:
        return ""  # safe because a limit that cannot be read is one that we do not know
    finally:
        for file in files:
            file.close()
