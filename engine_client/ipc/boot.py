"""What runs first in an engine process: make an ordinary process of whatever the host left us, then call the entry.

A host may have closed descriptors 0 to 2, blocked signals in the launching thread, or ignored SIGCHLD; all of that
is inherited and would trip the engine, its executor, or libraries that they load.  So is its garbage, after a fork.

Threads: none yet.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from engine_client.ipc.engine_fds import EngineFds

__all__ = ["NEW_OBJECTS", "begin", "main", "resolve", "secure_signals", "secure_std_fds", "spare_collections"]

NEW_OBJECTS: Final = 20_000
"""How many objects an engine makes before Python looks for garbage cycles among them.

More than those of a step of 4,096 requests, three for each token, which are gone when it is over.  With Python's own
700, a search came four times in a step of 1,024.
"""


def main() -> None:
    """Run the entry that ``launcher.BOOT`` was started with; the arguments are those of ``launcher``."""
    _, _, _, entry, launcher_pid, sentinel, *rest = sys.argv
    fds, sys.path[:0] = EngineFds.from_args(rest)
    del sys.argv[1:]
    if int(sentinel) >= 0:
        os.set_inheritable(int(sentinel), False)
    begin(fds)
    resolve(entry)(fds, int(launcher_pid))


def begin(fds: EngineFds) -> None:
    """Set this process up; after this, descriptors 0 to 2 are open and ours are not inherited further."""
    for fd in fds:
        os.set_inheritable(fd, False)
    secure_std_fds()
    secure_signals()
    spare_collections()


def resolve(entry: str) -> Callable[[EngineFds, int], Any]:
    """Import ``"module:function"``."""
    module, _, function = entry.partition(":")
    found: Callable[[EngineFds, int], Any] = getattr(import_module(module), function)
    return found


def spare_collections() -> None:
    """Have Python look for garbage cycles less often, unless the host has it do so even less; see ``NEW_OBJECTS``.

    What is there already is left out: after a fork it is the host's, which finalizes its garbage itself, and only once.
    """
    gc.freeze()
    first, *others = gc.get_threshold()
    if 0 < first < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *others)


def secure_std_fds() -> None:
    """Open those of descriptors 0 to 2 that are closed on ``/dev/null``, and give Python streams to go with them.

    Otherwise the next files opened get these numbers, and what a library prints goes into them.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)  # as standard descriptors are
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A line that an engine prints is to be seen at once, in a pipe or a notebook's cell, too, and not at the end.
        sys.stdout.reconfigure(line_buffering=True)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            # Many libraries write to sys.stderr without a look at whether there is one.
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def secure_signals() -> None:
    """Undo what a host does with signals for itself: handlers, wakeup descriptor, blocked signals, SIGCHLD ignored."""
    with suppress(ValueError):  # not the main thread, so nobody is there to be woken
        signal.set_wakeup_fd(-1)
        for signum in signal.valid_signals():
            handler = signal.getsignal(signum)
            if callable(handler) and handler is not signal.default_int_handler:  # came with a fork
                signal.signal(signum, signal.SIG_DFL)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # else no child's exit code could be known
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        handler = signal.getsignal(signal.SIGINT)
        if handler is not None:
            # An interrupt that came while we were in the host's process group was for the host; ignored, it is dropped.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
