"""A guard that fails when something is left: a process, a thread, a descriptor, shared memory.

::

    with LeakGuard():
        ...                      # LeakError unless everything that came into being here is gone within ten seconds

As a pytest fixture, around every test::

    @pytest.fixture(autouse=True)
    def leak_guard():
        with LeakGuard():
            yield

The guard is patient, because the kernel needs a moment to take away what was killed.  When the patience ends, it tells
what is left, with the Python stacks of this process and of the engines among what is left, and then kills the
processes, so that one leak fails one test.

Processes are found as descendants, and by a mark that the guard puts into the environment, which a process inherits
and keeps when its parent dies.  The mark is not seen in what a forked process forks; those are found while their
parents live.

Threads: use from one thread; guards nest.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

from engine_client.deadline import Deadline
from engine_client.testing.inventory import Inventory, ProcessKey, is_running

__all__ = ["LeakError", "LeakGuard", "eventually"]

T = TypeVar("T")

_MARK: Final = "ENGINE_CLIENT_LEAK_GUARD"
_PATIENCE: Final = 10.0
_STACKS_WAIT: Final = 0.5
"""Seconds that an engine gets to write its stacks."""


class LeakError(AssertionError):
    """Something is left; the message says what."""


def eventually(condition: Callable[[], T], timeout: float = _PATIENCE, interval: float = 0.005) -> T:
    """Return the first true value of ``condition()``, asking again and again.

    Raises:
        AssertionError: it was not true in time.
    """
    deadline = Deadline(timeout)
    while True:
        value = condition()
        if value:
            return value
        if deadline.expired():
            name = getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"{name} is still {value!r} after {timeout} s")
        time.sleep(interval)


class LeakGuard:
    """Compares what there is before and after; see the module.

    Args:
        patience: seconds that what was ended gets to disappear.
    """

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._patience = patience
        self._token = f"{os.getpid()}-{time.monotonic_ns()}"
        self._outer: str | None = None  # the mark of the guard around this one
        self._before: Inventory | None = None

    def __repr__(self) -> str:
        return f"<LeakGuard {'armed' if self._before else 'idle'} {self._token}>"

    def __enter__(self) -> LeakGuard:
        self._outer = os.environ.get(_MARK)
        os.environ[_MARK] = f"{self._outer or ''},{self._token}"
        self._before = Inventory.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outer is None:
            os.environ.pop(_MARK, None)
        else:
            os.environ[_MARK] = self._outer
        if error is None:
            self.check()
        else:  # the error tells more than what it left behind
            self.kill_leftovers()

    def leaks(self) -> list[str]:
        """Say what is left at this moment, one line for each."""
        assert self._before is not None, "the guard was not entered"
        return Inventory.take(self._token, self._before).added_since(self._before)

    def check(self) -> None:
        """Wait until nothing is left.

        Raises:
            LeakError: something still is after the patience; the processes among it are killed.
        """
        deadline = Deadline(self._patience)
        pause = 0.002
        while left := self.leaks():
            if deadline.expired():
                stacks = self._stacks()
                self.kill_leftovers()
                raise LeakError("\n  ".join([f"left after {self._patience} s:", *left]) + f"\n{stacks}")
            gc.collect()  # a cycle may hold what is to go
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def kill_leftovers(self) -> None:
        """Kill every process that was started inside and still runs, and reap those that are children."""
        for key in self._new_processes():
            with suppress(OSError):  # it ended by itself
                os.kill(key.pid, signal.SIGKILL)
            with suppress(OSError):  # not a child of this process: its own parent reaps it
                os.waitpid(key.pid, 0)

    def _new_processes(self) -> list[ProcessKey]:
        assert self._before is not None, "the guard was not entered"
        return sorted(Inventory.take(self._token, self._before).processes - self._before.processes)

    def _stacks(self) -> str:
        """Return the stacks of this process's threads, and of those leftover processes that can be asked."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            parts = [f"stacks of this process ({os.getpid()}):\n{file.read()}"]
        for key in self._new_processes():
            text = _ask_for_stacks(key)
            if text:
                parts.append(f"stacks of process {key.pid}:\n{text}")
        return "\n".join(parts)


def _ask_for_stacks(key: ProcessKey) -> str:
    """Have an engine write its stacks, as ``dump_stacks`` would, and return them; empty when it cannot."""
    try:
        status = Path(f"/proc/{key.pid}/status").read_text()
        caught = int(status.split("SigCgt:", 1)[1].split(maxsplit=1)[0], 16)
        if not caught >> (signal.SIGUSR2 - 1) & 1:
            return ""
        links = {link: os.readlink(link) for link in Path(f"/proc/{key.pid}/fd").iterdir()}
        memory = next(link for link, target in links.items() if target.startswith("/memfd:") and "fault" in target)
        os.kill(key.pid, signal.SIGUSR2)
        deadline = Deadline(_STACKS_WAIT)
        text = ""
        while not text.strip("\0\n ") and is_running(key) and not deadline.expired():
            time.sleep(0.01)
            text = memory.read_text(errors="replace")
    except (OSError, IndexError, StopIteration):  # gone, a zombie, or no engine of ours
        return ""
    return text.strip("\0")
