"""The engines of one client: ends them, with everything below them and nothing else.

::

    ask ──half the time──▶ SIGTERM ──the other half──▶ SIGKILL        all ranks at once, until all are gone
     └───────────┬────────────┴──────────────┬────────────┘
                 └─▶ a leader has ended: kill its process group, kill recorded descendants, only then reap it

As long as a leader is a zombie, no other process can get its pid or its group's number, so what is killed is the
engine's own.  A process that left the group by ``setsid`` is found by having been recorded while the engine lived.

Invariants: I5 (nothing outlives the client), I6 (works in finalizers: no thread is started, none is joined),
I7 (bounded by the deadline and a second), I8 (nothing blocks under the lock).

Threads: every method may be called from any thread, several at once, and in the middle of one another (a finalizer in
the same thread); ``_lock`` is reentrant for that.  In a forked copy of its process a group does nothing.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from engine_client.deadline import Deadline
from engine_client.ipc.exits import exit_name
from engine_client.ipc.handle import ChildHandle
from engine_client.ipc.processes import Descendant, descendants, find_descendant

__all__ = ["How", "ProcessGroup"]

_log = logging.getLogger("engine_client.session")

How = Literal["ended", "asked", "terminated", "killed", "stuck"]
"""How an engine came to its end: by itself before anything was done, when asked, by SIGTERM, by SIGKILL, not at all."""

_KILL_WAIT: Final = 0.7
"""Seconds that the kernel gets to take away what was killed; with the rest of a stop it stays within a second."""
_SWEEP_WAIT: Final = 0.2
"""Seconds that killed grandchildren get to vanish; they are not our children, so all we can do is look."""
_LOOK: Final = 0.02
"""Seconds between looks at what has no descriptor that would wake us."""


@dataclass
class _Member:
    """One engine, and what was found below it."""

    rank: int
    handle: ChildHandle
    strays: Callable[[], Iterable[tuple[int, int]]]
    recorded: dict[int, Descendant] = field(default_factory=dict)
    asked: bool = False
    how: How | None = None
    buried: bool = False


class ProcessGroup:
    """Owns the handles of one client's engines; ends with ``shutdown`` or ``kill_now``, then ``close``."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.RLock()
        # -- guarded by _lock --
        self._members: dict[int, _Member] = {}
        self._swept: list[Descendant] = []  # killed behind their engines, perhaps not gone yet

    def add(self, rank: int, handle: ChildHandle, strays: Callable[[], Iterable[tuple[int, int]]] = lambda: ()) -> None:
        """Own a process that was just started.

        Args:
            rank: its number here.
            handle: of the process.
            strays: tells which processes have left its group, by its own account: pid, and ``Descendant.started``.
        """
        with self._lock:
            self._members[rank] = _Member(rank, handle, strays)

    def handle(self, rank: int) -> ChildHandle:
        """Return the handle of a rank."""
        return self._members[rank].handle

    def exit_name(self, rank: int) -> str:
        """Return how a rank ended: ``"exit code 3"``, ``"SIGKILL(-9)"``, ``"unknown"``, or that it still runs."""
        handle = self._members[rank].handle
        return "still running" if handle.is_alive() else exit_name(handle.exitcode)

    def record_descendants(self) -> None:
        """Note what is below each living engine, so that it can be found when the engine has died."""
        if self._is_foreign():
            return
        for member in self._some(None):
            if not member.buried:
                # A pid that was recorded stays: its process may have left the tree meanwhile.
                for found in descendants(member.handle.pid):
                    member.recorded.setdefault(found.pid, found)

    def reap(self, rank: int) -> bool:
        """Clean up behind a rank if it has ended; return whether it has."""
        member = self._members.get(rank)
        if member is None or self._is_foreign() or member.handle.is_alive():
            return False
        self._bury(member)
        return True

    def shutdown(
        self, deadline: Deadline, ask: Callable[[], None], *, ranks: Iterable[int] | None = None
    ) -> dict[int, How]:
        """End engines; return how each came to its end.

        Returns as soon as all are gone, and at most a second after the deadline.  Idempotent; a second call, also
        one at the same time, joins in with its own deadline.  An interruption kills at once what is left.

        Args:
            deadline: up to half of it, engines may end by themselves; up to its end, by SIGTERM.
            ask: asks them to end; must not block, and is called only if one is alive that was not asked before.
            ranks: which engines; None: all.
        """
        if self._is_foreign():
            return {}
        members = self._some(ranks)
        try:
            self._end_politely(members, deadline, ask)
        except BaseException:
            self._kill(members)
            raise
        self._warn_of_kill(members, deadline)
        self._kill(members)
        return {member.rank: member.how if member.buried and member.how else "stuck" for member in members}

    def kill_now(self, ranks: Iterable[int] | None = None) -> None:
        """Send SIGKILL to engines, by default all, and what is below them; wait, at most a second, until it is gone."""
        if not self._is_foreign():
            self._kill(self._some(ranks))

    def close(self) -> None:
        """Close the sentinels.  Idempotent; how each engine ended stays known."""
        for member in self._some(None):
            member.handle.close()

    def forget(self, rank: int) -> None:
        """Let go of an engine that was buried; unknown ones are ignored."""
        with self._lock:
            member = self._members.pop(rank, None)
        if member is not None:
            member.handle.close()

    def after_fork_in_child(self) -> None:
        """Close, in a forked copy, what the copy must not hold; takes no lock, since its holder may not exist here."""
        members, self._members = self._members, {}
        self._lock = threading.RLock()
        for member in members.values():
            member.handle.after_fork_in_child()

    def _end_politely(self, members: list[_Member], deadline: Deadline, ask: Callable[[], None]) -> None:
        living = self._living(members)
        if not living:
            return
        self.record_descendants()
        self._mark(living, "asked")
        left = deadline.remaining()
        if self._ask(living, ask) and self._wait_gone(living, Deadline(None if left is None else left / 2)):
            return
        living = self._living(living)
        self.record_descendants()
        self._mark(living, "terminated")
        for member in living:
            member.handle.terminate()
            member.handle.send_signal(signal.SIGCONT)  # one that is stopped sees SIGTERM only when it goes on
        self._wait_gone(living, deadline)

    def _ask(self, living: list[_Member], ask: Callable[[], None]) -> bool:
        """Ask engines to end, once; return whether that can have reached them."""
        with self._lock:
            if not self._note_asked(living):
                return True
        try:
            ask()
        except Exception:  # noqa: BLE001 (whatever keeps us from asking, SIGTERM comes next)
            return False
        return True

    @staticmethod
    def _note_asked(living: list[_Member]) -> bool:
        """Note that these are asked; return whether one of them was not before."""
        news = [member for member in living if not member.asked]
        for member in news:
            member.asked = True
        return bool(news)

    def _kill(self, members: list[_Member]) -> None:
        """Kill what is left of some engines and wait, within a bound, until all that we killed is gone."""
        living = self._living(members)
        if living:
            self.record_descendants()
            self._mark(living, "killed")
            for member in living:
                member.handle.kill()
            self._wait_gone(living, Deadline(_KILL_WAIT))
        with self._lock:
            swept, self._swept = self._swept, []
        _wait_swept(swept, Deadline(_SWEEP_WAIT))

    def _some(self, ranks: Iterable[int] | None) -> list[_Member]:
        with self._lock:
            members = list(self._members.items())
        wanted = None if ranks is None else set(ranks)
        return [member for rank, member in members if wanted is None or rank in wanted]

    def _living(self, members: list[_Member]) -> list[_Member]:
        """Return those that still run, and bury those that do not."""
        living = []
        for member in members:
            if member.handle.is_alive():
                living.append(member)
            else:
                self._bury(member)
        return living

    def _mark(self, members: Iterable[_Member], how: How) -> None:
        for member in members:
            if member.how != "killed":  # a thread that joined in later does not take it back
                member.how = how

    def _wait_gone(self, members: list[_Member], deadline: Deadline) -> bool:
        """Bury engines as they end; return whether all have, before the deadline."""
        while living := self._living(members):
            if deadline.expired():
                return False
            sentinels = [member.handle.sentinel for member in living]
            left = deadline.remaining()
            if -1 in sentinels or not all(member.handle.is_prompt for member in living):
                left = deadline.capped(_LOOK)
            poller = select.poll()
            for fd in sentinels:
                if fd >= 0:
                    poller.register(fd, select.POLLIN)
            poller.poll(None if left is None else left * 1000)
        return True

    def _bury(self, member: _Member) -> None:
        """Kill what an ended engine has left, then let go of its pid.  Idempotent, and safe to interrupt."""
        with self._lock:
            if not member.buried:
                self._bury_locked(member)

    def _bury_locked(self, member: _Member) -> None:
        member.how = member.how or "ended"
        handle = member.handle
        # Reaped by the host: then the number is the group's own only while no process has it as its pid.
        if not handle.is_reaped or not _is_pid_used(handle.pid):
            _kill_group(handle.pid)
        for pid, started in member.strays():
            if pid not in member.recorded and (stray := find_descendant(pid, started)) is not None:
                member.recorded[pid] = stray
        below = [found for found in member.recorded.values() if found.is_running()]
        for found in below:
            for deeper in descendants(found.pid):
                deeper.kill()
            found.kill()
        handle.reap()
        self._swept += below
        member.recorded.clear()
        member.buried = True

    def _is_foreign(self) -> bool:
        return os.getpid() != self._owner

    def _warn_of_kill(self, members: list[_Member], deadline: Deadline) -> None:
        for member in self._living(members):
            _log.warning(
                "engine rank %d (pid %d) did not end within %g s and is killed; what it was doing is cut short",
                member.rank,
                member.handle.pid,
                deadline.timeout,
            )

    def __repr__(self) -> str:
        states = ", ".join(f"{member.rank}: {self.exit_name(member.rank)}" for member in self._some(None))
        return f"<{type(self).__name__} {{{states}}}>"


def _is_pid_used(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _kill_group(group: int) -> None:
    """Send SIGKILL to a process group that a child of ours led."""
    with suppress(ProcessLookupError, PermissionError):  # empty; or, on macOS, zombies alone
        os.killpg(group, signal.SIGKILL)


def _wait_swept(swept: list[Descendant], deadline: Deadline) -> None:
    """Wait a moment until the kernel has taken away what was killed behind engines."""
    while any(found.is_running() for found in swept) and not deadline.expired():
        time.sleep(0.002)
