"""Ends this engine process, and everything below it, when the process that launched it is gone.

::

    launcher ends ─▶ kernel closes the lifeline's write end ─▶ SIGKILL to our process group      (F_SETSIG, O_ASYNC)
                                                           └─▶ ... and to groups below us that left it
                  └▶ pidfd of the launcher ─▶ watcher thread ─▶ SIGKILL to the same

The kernel's way needs no Python: it works while C code holds the GIL, and in every process of the group at once
(measured: 6 ms, Linux 6.1, x86-64).  The watcher is for when a forked copy of the launcher holds the write end open,
and for systems without such signals.  An executor's own clean-up does not run on either way.

The lifeline is a pipe that nobody ever writes to.  Nothing here depends on the thread that started us, or on which
process adopts orphans: both would tell wrong.

Invariants: I5 (nothing outlives the launcher), I10 (the watcher outlives a look that fails).

Threads: ``arm`` on the main thread, ``look`` on that and on the watcher.  ``_watch`` runs in a daemon thread of its
own, which blocks in ``poll`` for as long as the launcher lives; while the engine is being built it looks around now and
then.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from engine_client.ipc.handle import has_pidfd
from engine_client.ipc.processes import Descendant, children_of_this_process, descendants, stat_of

__all__ = ["Lifeline", "arm", "is_launcher_alive", "kill_everything", "reopen", "tie"]

_LOOK: Final = 1.0
"""Seconds between looks at a launcher that cannot be watched through a descriptor."""
_LOOK_AT_START: Final = 0.1
"""Seconds between looks at what an engine starts while it is being built, when its own thread is busy."""


class Lifeline:
    """Holds the lifeline's read end, and what the watcher needs.

    All descriptors stay open as long as this process runs.

    Args:
        fd: read end of the lifeline.
        launcher_pid: whose end is our end.
        end: called then with the processes below us that left our group; kills everything.
    """

    def __init__(self, fd: int, launcher_pid: int, end: Callable[[Sequence[Descendant]], None] | None = None) -> None:
        self._fd = fd
        self._launcher_pid = launcher_pid
        self._end = kill_everything if end is None else end
        # -- set once, by arm --
        self.pidfd = -1
        self.on_strays: Callable[[list[tuple[int, int]]], None] = lambda strays: None
        self._starting = True
        # -- guarded by _lock; the watcher reads whole values --
        self._lock = threading.RLock()
        self._children: bytes | None = b""
        self.strays: tuple[Descendant, ...] = ()
        self.guards: dict[int, int] = {}  # by owner, as F_SETOWN wants it: descriptors of the same pipe

    def arm(self) -> None:
        """Tie this process to the launcher; end it at once if the launcher is gone already."""
        # A group that we do not lead is somebody else's: then this process alone.
        tie(self._fd, -os.getpid() if os.getpgrp() == os.getpid() else os.getpid())
        if has_pidfd():
            with suppress(ProcessLookupError):  # gone: found out below
                self.pidfd = os.pidfd_open(self._launcher_pid)
        # Only now, so that an end in between is seen either here or by what was just set up.
        self.leave()
        threading.Thread(target=self._watch, name="engine-lifeline", daemon=True).start()

    def leave(self, wait: float = 0.0) -> None:
        """End everything if the launcher is gone; to be called before the main thread ends this process in order.

        Otherwise its end could take the watcher with it before that has killed what is below us.

        Args:
            wait: seconds that the launcher gets to be gone.
        """
        if self._is_hung_up(wait) or not is_launcher_alive(self._launcher_pid):
            self._end(self.strays)

    def look(self) -> None:
        """Guard descendants anew if the children of this process are others than at the last look.

        To be called when such processes may have come into being; costs a few microseconds while there are none.
        """
        children = children_of_this_process()
        if children is None or children != self._children:
            with self._lock:
                self._children = children  # from before the search, which may find more
                self.guard_descendants()

    def started(self) -> None:
        """Note that the engine is built: from here on ``look`` is called when there is something to see."""
        self.look()
        self._starting = False

    def guard_descendants(self) -> None:
        """Tie processes below us that left our process group to the launcher as well, and tell who they are."""
        with self._lock:
            self._guard_locked()

    def _guard_locked(self) -> None:
        """Look for them, below this process.  Requires ``_lock``."""
        own = os.getpgrp()
        found = descendants(os.getpid())
        strays = [(stray, group) for stray in found if (group := stray.group()) is not None and group != own]
        pids = {stray.pid for stray in found}
        self.strays = tuple(stray for stray, _ in strays)
        owners = set()
        for stray, group in strays:
            # A group whose leader is not below us may hold strangers: then this process alone.
            owner = -group if group in pids else stray.pid
            owners.add(owner)
            if owner not in self.guards and (guard := reopen(self._fd)) is not None:
                tie(guard, owner)
                if stray.group() == group:
                    self.guards[owner] = guard
                else:  # it changed, or its number became another's, while we looked
                    os.close(guard)
        for owner in self.guards.keys() - owners:
            os.close(self.guards.pop(owner))
        self.on_strays([(stray.pid, stray.started) for stray in self.strays])

    def _watch(self) -> None:
        """Block until the launcher is gone, then end everything."""
        # Signals are left to the main thread, whose selector only a signal that comes to it can interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        poller = select.poll()
        poller.register(self._fd, 0)  # a hang-up is always told
        if self.pidfd >= 0:
            poller.register(self.pidfd, select.POLLIN)
        while not poller.poll(self._patience()) and is_launcher_alive(self._launcher_pid):
            if self._starting:
                with suppress(Exception):  # whatever it was, watching goes on
                    self.look()
        self._end(self.strays)

    def _patience(self) -> float | None:
        """Return for how many milliseconds the watcher may sleep."""
        if self._starting:
            return _LOOK_AT_START * 1000
        return None if self.pidfd >= 0 else _LOOK * 1000

    def _is_hung_up(self, wait: float) -> bool:
        poller = select.poll()
        poller.register(self._fd, 0)
        return bool(poller.poll(wait * 1000))


def arm(fd: int, launcher_pid: int) -> Lifeline:
    """Tie this process to its launcher, which holds the write end of ``fd``."""
    lifeline = Lifeline(fd, launcher_pid)
    lifeline.arm()
    return lifeline


def kill_everything(strays: Sequence[Descendant]) -> None:
    """Send SIGKILL to strays, to our process group if we lead it, and to ourselves."""
    for stray in strays:
        stray.kill()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def tie(fd: int, owner: int) -> None:
    """Have the kernel send SIGKILL to a process, or minus a process group, when the pipe hangs up."""
    if not hasattr(fcntl, "F_SETSIG"):  # not Linux: it could send SIGIO only, which may be handled or ignored
        return
    with suppress(OSError):  # a kernel or a sandbox without it; the watcher remains
        fcntl.fcntl(fd, fcntl.F_SETOWN, owner)
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


def reopen(fd: int) -> int | None:
    """Return another descriptor of the same pipe, with an owner of its own; None where that is not possible."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # no /proc
        return None


def is_launcher_alive(launcher_pid: int) -> bool:
    """Tell whether the launcher lives, and is not another process that got its pid."""
    if os.getppid() == launcher_pid:
        return True
    # Our parent is a fork server, or the launcher is dead and somebody adopted us.
    launcher = stat_of(launcher_pid)
    ours = stat_of(os.getpid())
    if launcher is None or ours is None:
        return launcher is not None or not os.path.exists("/proc/self")
    # Whoever launched us was there before us; ticks of 10 ms do, since an interpreter takes longer to start.
    return launcher.is_alive and launcher.started < ours.started
