"""Starts engine processes: a fresh interpreter by default, or one of ``multiprocessing``'s start methods.

::

    launch ─ exec ──▶ python <flags> -c BOOT ... ─▶ ipc.boot.main ──┐
           └ spawn, fork, forkserver ─────────────▶ ipc.boot.begin ─┴─▶ engine.main.run_engine(fds, launcher pid)

The start carries descriptors only.  Configuration, classes, ``sys.path`` and ``sys.argv`` travel later, in the INIT
message; environment, working directory and interpreter flags (-O, -W, -X, ...) are those of this process.  With
``exec`` nothing of the host's ``__main__`` is imported, so it needs no guard and no file: it works from scripts on
standard input, ``python -c``, notebooks, zip applications, threads and daemonic processes.

Invariants: I11 (a child that started and cannot be handed over is killed and reaped here).

Threads: ``launch`` may be called from any thread.  The child does not depend on the thread that started it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import engine_client
from engine_client.errors import StartupError
from engine_client.ipc.engine_fds import EngineFds
from engine_client.ipc.handle import ChildHandle, has_pidfd

if TYPE_CHECKING:
    import subprocess

    from engine_client.config import StartMethod

__all__ = ["ENTRY", "interpreter_flags", "launch"]

ENTRY = "engine_client.engine.main:run_engine"

PACKAGE_PARENT = os.path.dirname(os.path.abspath(next(iter(engine_client.__path__))))
"""The directory or zip archive that holds this package; absolute, since the host may change its directory later."""

# "" is the working directory, where anything may lie.  The package's parent is on the path only while the package is
# imported: it may be site-packages, whose modules must not come before the standard library's.  So what the package's
# own __init__ needs is imported first.
BOOT = """\
import sys
if sys.path[:1] == [""]: del sys.path[0]
import importlib, typing
sys.path.insert(0, sys.argv[1])
import engine_client
del sys.path[0]
from engine_client.ipc.boot import main
main()
"""


def launch(
    method: StartMethod,
    *,
    name: str,
    fds: EngineFds,
    parent_fds: Sequence[int] = (),
    entry: str = ENTRY,
    path: Sequence[str] = (),
) -> ChildHandle:
    """Start a process that leads a session of its own and calls ``entry`` with ``fds`` and our pid.

    The caller closes ``fds`` afterwards, whether this succeeds or not.

    Args:
        method: how to start it.
        name: the process's name, for messages.
        fds: the child's ends; it gets copies, and nothing else of ours.
        parent_fds: our own ends, which a forked child must close.
        entry: ``"module:function"``.
        path: what to put in front of the child's ``sys.path``.

    Raises:
        StartupError: the process could not be started this way.
    """
    if min(fds) <= 2:
        raise ValueError(f"descriptors 0 to 2 cannot be passed to an engine: {fds}")
    _refuse_while_importing_main()
    if method == "exec":
        return _launch_exec(name, fds, entry, path)
    from engine_client.ipc.multiproc import launch_multiprocessing  # noqa: PLC0415 (the default needs none of it)

    return launch_multiprocessing(method, name=name, fds=fds, parent_fds=parent_fds, entry=entry, path=path)


def interpreter_flags() -> list[str]:
    """Return the command-line options that give a new interpreter the flags of this one."""
    flags = sys.flags
    letters = "d" * flags.debug + "B" * flags.dont_write_bytecode + "O" * flags.optimize + "S" * flags.no_site
    letters += "v" * flags.verbose + "b" * flags.bytes_warning + "q" * flags.quiet
    if flags.isolated:
        letters += "I"
    else:
        letters += "E" * flags.ignore_environment + "s" * flags.no_user_site
        letters += "P" * getattr(flags, "safe_path", False)  # since 3.11
    given = sys._xoptions.items()  # noqa: SLF001 (documented; there is no other way to learn of them)
    xoptions = [name if value is True else f"{name}={value}" for name, value in given]
    return [
        *(f"-{letter}" for letter in letters),
        *(f"-W{option}" for option in sys.warnoptions),
        *(word for option in xoptions for word in ("-X", option)),
    ]


def _executable() -> str | bytes:
    """Return the interpreter to start: what ``multiprocessing.set_executable`` was told, else our own."""
    spawn = sys.modules.get("multiprocessing.spawn")
    executable: str | bytes | None = spawn.get_executable() if spawn is not None else sys.executable
    if getattr(sys, "frozen", False):
        raise StartupError(
            "a frozen application is no Python interpreter, which start method 'exec' needs: use start method 'spawn' "
            "and call multiprocessing.freeze_support() first thing in the application"
        )
    if not executable:
        raise StartupError("sys.executable is not set, so no Python interpreter can be started")
    return executable


def _launch_exec(name: str, fds: EngineFds, entry: str, path: Sequence[str]) -> ChildHandle:
    executable = _executable()
    pipe = None if has_pidfd() else os.pipe()
    try:
        write_end = -1 if pipe is None else pipe[1]
        pid = _spawn(
            [
                executable,
                *interpreter_flags(),
                "-c",
                BOOT,
                PACKAGE_PARENT,
                name,
                entry,
                str(os.getpid()),
                str(write_end),
                *fds.to_args(),
                *path,
            ],
            [*fds] if pipe is None else [*fds, write_end],
        )
        try:
            handle = ChildHandle(name, pid, fallback=None if pipe is None else pipe[0])
        except BaseException:
            _kill(pid)
            raise
        pipe = pipe and (-1, pipe[1])  # the read end is the handle's now
    finally:
        for fd in pipe or ():
            if fd >= 0:
                os.close(fd)
    return handle


def _spawn(command: Sequence[str | bytes], pass_fds: Sequence[int]) -> int:
    """Run a command in a session of its own and return its pid, with nobody else to wait for it."""
    import subprocess  # noqa: PLC0415 (8 ms that only a launching process needs)

    # Made before it is started, so that the pid is known whatever interrupts the start.
    popen: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)
    try:
        popen.__init__(  # type: ignore[misc]  # see above
            command, stdin=subprocess.DEVNULL, pass_fds=pass_fds, start_new_session=True
        )
    except BaseException as error:
        _abandon(popen)
        if isinstance(error, OSError):
            raise StartupError(f"cannot start {command[0]!r}: {error}") from error
        raise
    # The handle waits by other means; a Popen that thinks it has ended neither warns, nor waits, nor reports 0 for a
    # process that the host has reaped.
    popen.returncode = 0
    return popen.pid


def _abandon(popen: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a start that failed or was interrupted half way."""
    if getattr(popen, "pid", None) is not None and popen.returncode is None:
        _kill(popen.pid)
    popen.returncode = 0


def _kill(pid: int) -> None:
    """Kill and reap a child that only we know of."""
    import signal  # noqa: PLC0415 (on this path alone)

    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # the host ignores SIGCHLD, or reaped it
        os.waitpid(pid, 0)


def _refuse_while_importing_main() -> None:
    """Fail in a ``multiprocessing`` child that is still running its parent's main file for the second time.

    There an unguarded script would start an engine for each child, and with start method spawn a chain without end.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        raise StartupError(
            "an engine cannot be started while a multiprocessing child imports the main file: put the start under "
            'if __name__ == "__main__":'
        )
