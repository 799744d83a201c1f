"""Run by every interpreter that has this directory on PYTHONPATH: refuses what FORBID names (see helpers.sandbox).

``shm``: whatever touches /dev/shm.  ``semaphores``: also every semaphore, queue, pool, manager and shared block.
"""

import os
import sys

_FILES = ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink")


def _hook(event, args):
    if event in _FILES and args and _is_shm(args[0]):
        raise FileNotFoundError(2, "No such file or directory (forbidden)", args[0])


def _is_shm(path):
    return isinstance(path, (str, bytes)) and os.fsdecode(path).startswith("/dev/shm")


def _forbid_looking():
    """Refuse the looks that the audit hook is not told of."""
    for name, answer in (("access", False), ("statvfs", None), ("stat", None)):
        real = getattr(os, name)

        def look(path, *args, real=real, answer=answer, **kwargs):
            if not _is_shm(path):
                return real(path, *args, **kwargs)
            if answer is None:
                raise FileNotFoundError(2, "No such file or directory (forbidden)", path)
            return answer

        setattr(os, name, look)


def _forbid_semaphores():
    import _multiprocessing
    import _posixshmem
    import multiprocessing.context
    import multiprocessing.managers

    def refuse(*args, **kwargs):
        raise OSError(38, "Function not implemented (forbidden)")

    class SemLock:
        SEM_VALUE_MAX = 1
        __new__ = refuse
        _rebuild = refuse

    _multiprocessing.SemLock = SemLock
    _posixshmem.shm_open = refuse
    multiprocessing.managers.BaseManager.start = refuse
    for name in [
        "Lock",
        "RLock",
        "Condition",
        "Semaphore",
        "BoundedSemaphore",
        "Event",
        "Barrier",
        "Queue",
        "JoinableQueue",
        "SimpleQueue",
        "Pool",
        "Manager",
        "Value",
        "Array",
        "RawValue",
        "RawArray",
    ]:
        setattr(multiprocessing.context.BaseContext, name, refuse)


if os.environ.get("FORBID"):
    sys.addaudithook(_hook)
    _forbid_looking()
    if "semaphores" in os.environ["FORBID"]:
        _forbid_semaphores()
