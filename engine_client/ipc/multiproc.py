"""``multiprocessing``'s start methods: spawn, fork and forkserver, for hosts that want one of them.

They have limits of their own, which ``exec`` has not: an unguarded script cannot use spawn or forkserver, daemonic
processes can use none, fork in a process with threads may deadlock the child, and the fork server keeps the
environment of when it was started (what this launcher can pass on of it, it does).  It starts in the host's process
group with signals as usual: interrupted in that moment, by Ctrl-C, it prints a traceback and is started anew later.

Invariants: I11 (a child that started and cannot be handed over is killed).

Threads: ``launch_multiprocessing`` may be called from any thread; ``_run_child`` is the child's main thread.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from engine_client.errors import StartupError
from engine_client.ipc import boot
from engine_client.ipc.aside import signals_blocked
from engine_client.ipc.descriptors import above_stdio, close_all
from engine_client.ipc.engine_fds import EngineFds
from engine_client.ipc.handle import ChildHandle, has_pidfd

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess, ForkServerProcess, SpawnProcess
    from multiprocessing.process import BaseProcess

__all__ = ["MultiprocessingHandle", "before_multiprocessing_exit", "launch_multiprocessing"]

_LOST: Final = 255
"""What the fork server's client reports for a child whose exit status it could not get."""
_STATUS_WAIT: Final = 0.25
"""Seconds that the fork server gets to tell the exit status of a child that has ended."""

_FIRST_INHERITABLE: Final = 3
"""Descriptors 0 to 2 are the standard streams."""

_main_lock = threading.Lock()


class MultiprocessingHandle(ChildHandle):
    """Watches a child that ``multiprocessing`` started, which may reap it whenever the host uses that library."""

    def __init__(self, process: BaseProcess, *, is_child: bool) -> None:
        self._process = process
        self._is_child = is_child  # ours, not the fork server's
        fallback = None if has_pidfd() else os.dup(process.sentinel)
        super().__init__(process.name, process.pid or -1, fallback=fallback)

    def close(self) -> None:
        """Close the sentinel.  Idempotent; what is known of the end stays known."""
        if self._look() and self._owner == os.getpid():
            self._collect()
            self._process.close()
        super().close()

    def after_fork_in_child(self) -> None:
        """Close the sentinel, and have multiprocessing forget a child that a forked copy cannot join at its exit."""
        from multiprocessing import process  # noqa: PLC0415 (as below)

        process._children.discard(self._process)  # type: ignore[attr-defined]  # noqa: SLF001
        super().after_fork_in_child()

    def _peek(self) -> tuple[bool, int | None, bool]:
        if self._is_child:
            ended, code, reaped = super()._peek()
            return ended, self._known_code() if reaped else code, reaped
        if not self._wait_sentinel(0):
            return False, None, False
        self._process.join(_STATUS_WAIT)  # the one wait under the lock, and a short one
        code = self._known_code()
        return True, None if code == _LOST else code, True

    def _known_code(self) -> int | None:
        """Return what multiprocessing knows, if it was the one that reaped the child."""
        with suppress(ValueError, AssertionError):  # closed by somebody; or a forked copy, which must not ask
            return self._process.exitcode
        return None

    def _collect(self) -> None:
        with suppress(ValueError):  # closed already
            if self._process.exitcode is None:
                # The host reaped it; multiprocessing cannot be told, and would keep it and its pipes for ever.
                self._process._popen.returncode = _LOST  # type: ignore[attr-defined]  # noqa: SLF001
            self._process.join(0)


def launch_multiprocessing(
    method: str, *, name: str, fds: EngineFds, parent_fds: Sequence[int], entry: str, path: Sequence[str]
) -> ChildHandle:
    """Start an engine process by a start method of ``multiprocessing``; see ``launcher.launch``."""
    import multiprocessing  # noqa: PLC0415 (8 ms that the default start method does not need)

    if method == "fork" and threading.active_count() > 1:
        warnings.warn(
            "start method 'fork' in a process with other threads: locks that they hold stay locked in the engine, "
            "which may never get ready; use the default start method",
            RuntimeWarning,
            stacklevel=_level_of_the_host(),
        )
    context: Any = multiprocessing.get_context(method)
    setting = {"path": list(path)} | ({} if method == "fork" else _setting())
    with _passed_on(method, fds) as passed:
        closed = [_identity(fd) for fd in (*parent_fds, *fds)] if method == "fork" else []
        process: ForkProcess | SpawnProcess | ForkServerProcess = context.Process(
            target=_run_child,
            name=name,
            args=(entry, os.getpid(), fds, passed, closed, setting),
            daemon=False,
        )
        try:
            with _without_pseudo_main():
                _start(process, method)
            return MultiprocessingHandle(process, is_child=method != "forkserver")
        except BaseException as error:
            if process.pid is not None:
                process.kill()
                process.join(1)
            if isinstance(error, (AssertionError, OSError, RuntimeError)):
                text = f"start method {method!r} failed: {error}; the default start method may work"
                raise StartupError(text) from error
            raise


def _level_of_the_host() -> int:
    """Return the stack level, for a warning of the caller, at which the code that is not this package's begins."""
    level = 1
    frame = sys._getframe(1)  # noqa: SLF001 (documented)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("engine_client."):
        frame = frame.f_back
        level += 1
    return level


@contextmanager
def _passed_on(method: str, fds: EngineFds) -> Iterator[list[Any]]:
    """Give what a child gets for these descriptors: copies if it is forked, since a copy of us closes ours."""
    if method != "fork":
        yield [_Passed(fd) for fd in fds]
        return
    copies: list[int] = []
    try:
        copies += (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_INHERITABLE) for fd in fds)
        yield copies
    finally:
        close_all(copies)


def _start(process: BaseProcess, method: str) -> None:
    """Start a process; give the fork server another place for its socket if the path of the usual one is too long.

    Until it has left our process group, a child gets the interrupts that are for us; blocked, they wait until ``boot``
    drops them.  The fork server's children inherit nothing of this thread: what is blocked in it would be in all of
    them, the host's too.
    """
    if method == "spawn":
        from multiprocessing import resource_tracker  # noqa: PLC0415 (as above)

        resource_tracker.ensure_running()  # it would unblock the signal here, or keep it blocked over there
    if method != "forkserver":
        with signals_blocked(signal.SIGINT):
            process.start()
        return
    try:
        process.start()
    except OSError as error:
        # What the socket module raises for such a path has no errno; what the system refuses has one.
        if error.errno is not None:
            raise
        _move_temporary_directory()
        process.start()


def _move_temporary_directory() -> None:
    """Let ``multiprocessing`` use a directory of its own right in ``/tmp``, until the end of this process."""
    import shutil  # noqa: PLC0415 (as above)
    import tempfile  # noqa: PLC0415 (as above)
    from multiprocessing import process, util  # noqa: PLC0415 (as above)

    directory = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
    util.Finalize(None, shutil.rmtree, args=(directory, True), exitpriority=-100)
    # Where the library keeps the name.
    process.current_process()._config["tempdir"] = directory  # type: ignore[attr-defined]  # noqa: SLF001


def before_multiprocessing_exit(callback: Callable[[], None]) -> Callable[[], object]:
    """Have ``callback`` called at the interpreter's end before ``multiprocessing`` joins its children, for ever.

    Return a function that takes this back.
    """
    from multiprocessing import util  # noqa: PLC0415 (as above)

    return util.Finalize(None, callback, exitpriority=10).cancel


class _Passed:
    """A descriptor that travels to the child with its arguments, and is a number there."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd  # noqa: PLC0415 (as above)

        return _receive, (DupFd(self.fd),)


def _receive(passed: Any) -> int:
    fd: int = passed.detach()
    return above_stdio(fd)


def _setting() -> dict[str, Any]:
    """Return what a child takes from elsewhere than from us: the fork server, or multiprocessing's first import."""
    setting: dict[str, Any] = {"environment": dict(os.environ)}
    with suppress(FileNotFoundError):  # the directory was removed
        setting["directory"] = os.getcwd()
    return setting


def _identity(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return fd, status.st_dev, status.st_ino


def _run_child(
    entry: str,
    launcher_pid: int,
    shape: EngineFds,
    passed: list[int],
    closed: list[tuple[int, int, int]],
    setting: dict[str, Any],
) -> None:
    """Be what a process started by ``exec`` is, then call the entry."""
    for fd, device, inode in closed:
        with suppress(OSError):  # closed by a hook that runs after a fork
            if _identity(fd) == (fd, device, inode):  # not a number that was used again
                os.close(fd)
    if os.getpgrp() != os.getpid():
        os.setsid()
    if "environment" in setting:
        os.environ.clear()
        os.environ.update(setting["environment"])
        with suppress(OSError, KeyError):  # removed meanwhile, or before
            os.chdir(setting["directory"])
    sys.path[:0] = setting["path"]
    fds = shape.replaced(passed)
    boot.begin(fds)
    boot.resolve(entry)(fds, launcher_pid)


@contextmanager
def _without_pseudo_main() -> Iterator[None]:
    """Hide the file name of a main module that is no file, such as ``<stdin>``, which a child could not run."""
    main = sys.modules.get("__main__")
    name = getattr(main, "__file__", None)
    if main is None or name is None or getattr(main, "__spec__", None) is not None or os.path.exists(name):
        yield
        return
    with _main_lock:
        del main.__file__
        try:
            yield
        finally:
            main.__file__ = name
