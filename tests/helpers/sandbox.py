"""Machines that lack something, for scripts: no /dev/shm or a tiny one, no semaphores, no memfd, other pid namespaces.

A script calls ``use`` before it does anything else.  Mounts are made in a private namespace, so nobody else sees them.
Where that is not allowed, an audit hook takes its place that refuses, in the script and in its engines, whatever the
mount would have made impossible, and more: not even to look at /dev/shm.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = [
    "FORBIDDING",
    "SHM",
    "be_somebody_else",
    "can_unshare",
    "forbid",
    "forget_memfd",
    "make_readonly",
    "mount_tmpfs",
    "use",
]

SHM = "/dev/shm"
FORBIDDING = str(Path(__file__).parent / "forbidding")
"""In front of ``PYTHONPATH`` it forbids an interpreter what ``FORBID`` in its environment names."""

_NEWNS = 0x00020000
_NEWUSER = 0x10000000
_NODES = ("null", "zero", "full", "random", "urandom", "tty")
_private = False


def can_unshare() -> bool:
    """Tell whether a process here can have mounts and pids of its own."""
    return subprocess.run(["unshare", "-m", "-p", "-f", "true"], capture_output=True, check=False).returncode == 0


def use(kind: str) -> None:
    """Give this process, and what it starts from now on, another /dev/shm.

    Args:
        kind: ``absent``, ``readonly``, ``unwritable`` (mode 0555, and root's privilege to write all the same is gone),
            or the size of a tmpfs such as ``64k`` and ``1m``.
    """
    if not _unshare():
        forbid("shm")
    elif kind == "absent":
        _hide_shm()
    elif kind == "readonly":
        mount_tmpfs(SHM, "1m", "ro")
    elif kind == "unwritable":
        mount_tmpfs(SHM, "1m", "mode=0555")
        _drop_override()
    else:
        mount_tmpfs(SHM, kind, "mode=1777")


def mount_tmpfs(path: str | Path, size: str, options: str = "mode=1777") -> bool:
    """Mount an empty file system of a size in memory; return whether that was possible."""
    if not _unshare():
        return False
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},{options}", "none", str(path)], check=True)
    return True


def make_readonly(*besides: str | Path) -> bool:
    """Make the root file system read-only but for these directories; return whether that was possible."""
    if not _unshare():
        return False
    for directory in besides:
        subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", "/"], check=True)
    return True


def forbid(what: str) -> None:
    """Refuse something here, and in every process that is started from now on: ``shm``, or ``shm,semaphores``."""
    os.environ["FORBID"] = what
    os.environ["PYTHONPATH"] = FORBIDDING + os.pathsep + os.environ.get("PYTHONPATH", "")
    source = Path(FORBIDDING, "sitecustomize.py").read_text()
    exec(compile(source, "sitecustomize.py", "exec"), {"__name__": "sitecustomize"})


def forget_memfd() -> None:
    """Have this process do without ``memfd_create``; it makes the memory of its engines, too."""
    with suppress(AttributeError):
        del os.memfd_create


def be_somebody_else() -> None:
    """Be a user whom limits count for, if this is root, whom they do not; files can be read all the same."""
    if os.getuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(8, 1, 0, 0, 0) == 0  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # as below
    kept = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, kept)) == 0
    for capability in (1, 2):  # for what is executed, too
        assert libc.prctl(47, 2, capability, 0, 0) == 0  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE
    assert libc.prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE: /proc/self is this process's own


def _unshare() -> bool:
    """Get mounts of our own, once; return whether there are."""
    global _private  # noqa: PLW0603  # namespaces are the process's, too
    if not _private:
        user, group = os.getuid(), os.getgid()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEWNS if user == 0 else _NEWNS | _NEWUSER) != 0:
            return False
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        done = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, check=False)
        _private = done.returncode == 0
    return _private


def _hide_shm() -> None:
    """Put a /dev in place that has the usual devices and no shm."""
    with tempfile.TemporaryDirectory() as directory:
        mount_tmpfs(directory, "64k", "mode=0755")
        for name in _NODES:
            node = Path(directory, name)
            node.touch()
            subprocess.run(["mount", "--bind", f"/dev/{name}", str(node)], check=True)
        Path(directory, "fd").symlink_to("/proc/self/fd")
        subprocess.run(["mount", "--move", directory, "/dev"], check=True)
    assert not os.path.exists(SHM)


def _drop_override() -> None:
    """Give up CAP_DAC_OVERRIDE, here and in what is started from here."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(24, 1, 0, 0, 0) == 0  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    assert libc.capget(header, sets) == 0
    for index in range(3):
        sets[index] &= ~2
    assert libc.capset(header, sets) == 0
    assert not os.access(SHM, os.W_OK)
