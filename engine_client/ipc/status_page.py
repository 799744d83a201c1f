"""The page of shared memory on which an engine says how it is doing, so that nobody has to ask it.

::

    engine: StatusWriter ── 8-byte stores ──▶ [words | log ring] ──▶ StatusReader: client, load balancer

Each word is written by one process and is whole when read, since an aligned 8-byte store is one instruction; two words
may be a step apart.  Nothing else is needed to write than a store, so a page costs the engine well below a microsecond
per step, and it can still be read when the engine was killed.

``EngineStatus`` tells *busy* from *stalled* by ``step_began_at`` and ``busy_since``: times are of the monotonic clock,
which all processes of a machine share.

Invariants: I5 (the memory is nameless and goes with its last holder), I7 (no wait).

Threads: the step calls belong to the engine's loop; ``log`` may come from any thread; reading from any thread.
"""

from __future__ import annotations

import enum
import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine_client.ipc.arena_memory import reserve
from engine_client.ipc.counters import Count, Counters

__all__ = ["MOST_STRAYS", "EngineState", "EngineStatus", "StatusReader", "StatusWriter"]

# Words of eight bytes, by index.
_STATE: Final = 0
_FLAGS: Final = 1
_STEPS: Final = 2
_COUNTS: Final = 3  # waiting << 32 | running: one store, so that a load balancer never sees halves
_STEP_BEGAN_AT: Final = 4  # a float, as the next one
_LAST_STEP_AT: Final = 5
_LOG_CLAIMED: Final = 6  # bytes ever written to the ring, before the bytes are there ...
_LOG_WRITTEN: Final = 7  # ... and after
_BUSY_SINCE: Final = 8  # a float

_MAGIC: Final = 12  # that this is such a page, and of which layout
_PID: Final = 9  # of the engine
_RANK: Final = 10
_STARTED_AT: Final = 11  # a float
_COUNTERS: Final = 16
_STRAYS: Final = 128  # how many, then for each pid and start

MOST_STRAYS: Final = 128
"""How many processes that left the engine's group the page has room for."""

_RING_START: Final = 4096
_RING_SIZE: Final = 4096
_SIZE: Final = _RING_START + _RING_SIZE
_MAX_LINE: Final = 1024
"""Bytes of a log record that are kept; a longer one loses its middle."""
_LOCK_TIMEOUT: Final = 0.1
"""Seconds.  In a forked copy of the engine the lock's owner may not exist: a line is not worth waiting for."""

_LAYOUT: Final = int.from_bytes(b"ec-pag.2", "little")
_EVERY: Final = 64  # steps between two looks at the arena

_SLEEPING: Final = 1
_PAUSED: Final = 2
_COUNT_MASK: Final = (1 << 32) - 1


class EngineState(enum.IntEnum):
    """What an engine says of its own life; the client's view of it is in ``protocol.lifecycle``."""

    LAUNCHED = 0
    HELLO = 1
    INIT = 2
    READY = 3
    DRAINING = 4
    ENDED = 5


_STATES: Final = {int(state): state for state in EngineState}


@dataclass(frozen=True)
class EngineStatus:
    """How an engine was doing at one moment.

    Args:
        steps: how many it has finished.
        step_began_at: monotonic seconds at which its last step began; 0.0 before the first.
        last_step_at: monotonic seconds at which a step last ended; 0.0 before the first.
        busy_since: monotonic seconds at which it began what it is doing (a step, a message); 0.0 while it waits.
        waiting: requests that wait.
        running: requests that run.
        rank: of the engine.
        condition: ``starting``, ``ready``, ``paused``, ``sleeping``, ``stalled``, ``leaving`` or ``dead``.
        tokens: how many this client has got of it so far.
        tokens_per_s: how many it gets per second, averaged over about the last five seconds.
    """

    state: EngineState = EngineState.LAUNCHED
    steps: int = 0
    step_began_at: float = 0.0
    last_step_at: float = 0.0
    waiting: int = 0
    running: int = 0
    is_sleeping: bool = False
    is_paused: bool = False
    rank: int = 0
    condition: str = "ready"
    tokens: int = 0
    tokens_per_s: float = 0.0
    busy_since: float = 0.0

    @property
    def is_in_step(self) -> bool:
        """Tell whether a step had begun and not ended."""
        return self.step_began_at > self.last_step_at

    def describe(self) -> str:
        """Tell what the engine was doing: busy in a step, or nothing."""
        load = f"{self.running} requests running, {self.waiting} waiting"
        if self.is_in_step:
            return f"it has been in one step for {time.monotonic() - self.step_began_at:.1f} s ({load})"
        if self.busy_since:
            return f"it has been in one call for {time.monotonic() - self.busy_since:.1f} s ({load})"
        return f"it is not in a step ({load})"


class StatusWriter:
    """The engine's side of its page.  Calls after ``close`` change nothing.

    Args:
        fd: of the page's memory; owned by this object from here on.

    Raises:
        OSError, ValueError: the memory cannot be had; ``fd`` is then still the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._use(_map(fd))
        self._fd = fd
        self._log_lock = threading.Lock()
        self.results: Any = None  # the ``ArenaWriter`` whose use is shown
        self._words[_PID] = os.getpid()
        self._times[_STARTED_AT] = time.monotonic()
        self._words[_MAGIC] = _LAYOUT

    def _use(self, page: memoryview) -> None:
        self._words = page.cast("Q")
        self._times = page.cast("d")
        self._ring = page[_RING_START:]
        self.counters = _counters(page)

    def set_rank(self, rank: int) -> None:
        """Say which of several engines this is."""
        self._words[_RANK] = rank

    def set_state(self, state: EngineState) -> None:
        """Say which phase of its life the engine has reached."""
        self._words[_STATE] = state

    def draining(self) -> None:
        """Say that what is in flight is being finished and nothing new is taken."""
        self._words[_STATE] = EngineState.DRAINING

    def set_flags(self, *, is_sleeping: bool, is_paused: bool) -> None:
        """Say whether the engine sleeps, and whether its scheduler is paused."""
        self._words[_FLAGS] = _SLEEPING * is_sleeping | _PAUSED * is_paused

    def step_begin(self) -> None:
        """Say that a step begins."""
        self._times[_STEP_BEGAN_AT] = self._times[_BUSY_SINCE] = time.monotonic()

    def step_end(self, waiting: int, running: int) -> None:
        """Say that the step is done, and how many requests are left."""
        self._words[_COUNTS] = waiting << 32 | running
        self._words[_STEPS] = steps = self._words[_STEPS] + 1
        self._times[_LAST_STEP_AT] = self._times[_BUSY_SINCE] = time.monotonic()
        if not steps % _EVERY:
            self._show_results()

    def busy(self) -> None:
        """Say that something else than a step begins: a message, an answer."""
        self._times[_BUSY_SINCE] = time.monotonic()

    def waits(self) -> None:
        """Say that the engine waits for news: whatever it was doing is done."""
        self._times[_BUSY_SINCE] = 0.0

    def idle(self, waiting: int, running: int) -> None:
        """Say how many requests there are, outside of a step."""
        self._words[_COUNTS] = waiting << 32 | running
        self._show_results()

    def _show_results(self) -> None:
        writer, words = self.results, self.counters.words
        if writer is not None:
            words[Count.ARENA_FALLBACKS] = writer.fallbacks
            words[Count.ARENA_USED], words[Count.ARENA_CAPACITY] = writer.used, writer.capacity

    def set_strays(self, strays: Sequence[tuple[int, int]]) -> None:
        """Say which processes below the engine have left its process group: pid and start of each."""
        for index, (pid, started) in enumerate(strays[:MOST_STRAYS]):
            self._words[_STRAYS + 1 + 2 * index] = pid
            self._words[_STRAYS + 2 + 2 * index] = started
        self._words[_STRAYS] = min(len(strays), MOST_STRAYS)

    def log(self, text: str) -> None:
        """Keep a log record, of one or several lines, where it can be read after a crash."""
        line = text.encode("utf-8", "backslashreplace") + b"\n"
        if len(line) > _MAX_LINE:
            line = line[: _MAX_LINE // 2] + b" ... " + line[5 - _MAX_LINE // 2 :]
        if not self._log_lock.acquire(timeout=_LOCK_TIMEOUT):
            return  # safe because it is only a log line
        try:
            written = self._words[_LOG_WRITTEN]
            self._words[_LOG_CLAIMED] = written + len(line)
            begin = written % _RING_SIZE
            fits = min(len(line), _RING_SIZE - begin)
            self._ring[begin : begin + fits] = line[:fits]
            self._ring[: len(line) - fits] = line[fits:]
            self._words[_LOG_WRITTEN] = written + len(line)
        finally:
            self._log_lock.release()

    def close(self) -> None:
        """Let go of the page and close its descriptor; idempotent."""
        self._use(memoryview(bytearray(_SIZE)))
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        return f"<StatusWriter {'closed' if self._fd < 0 else f'fd={self._fd}'}>"


class StatusReader:
    """Another process's view of an engine's page.  After ``close`` it goes on to tell the last that was seen.

    Args:
        fd: of the page's memory; owned by this object from here on.
        is_foreign: somebody else's page, to be looked at and not changed; it must be there already.

    Raises:
        OSError, ValueError: the memory cannot be had, or is no such page; ``fd`` is then still the caller's.
    """

    def __init__(self, fd: int, *, is_foreign: bool = False) -> None:
        self._use(memoryview(mmap.mmap(fd, _SIZE, access=mmap.ACCESS_READ)) if is_foreign else _map(fd))
        if is_foreign and self._words[_MAGIC] != _LAYOUT:
            raise ValueError("this is not the status page of an engine, or one of another version")
        self._fd = fd

    def _use(self, page: memoryview) -> None:
        self._page = page
        self._words = page.cast("Q")
        self._times = page.cast("d")
        self.counters = _counters(page)

    @property
    def pid(self) -> int:
        """Return the engine's process; 0 before it has opened the page."""
        return self._words[_PID]

    @property
    def started_at(self) -> float:
        """Return the monotonic seconds at which the engine opened the page."""
        return self._times[_STARTED_AT]

    @staticmethod
    def prepare(fd: int) -> None:
        """Give new memory the size of a page, before anybody uses it.

        Raises:
            OSError: there is not even that much.
        """
        for _ in reserve(fd, os.fstat(fd).st_size, _SIZE):
            pass

    @property
    def fd(self) -> int:
        """Return the descriptor of the page, for further readers; it stays this object's."""
        return self._fd

    def snapshot(self) -> EngineStatus:
        """Return how the engine is doing."""
        words, times = self._words, self._times
        flags, counts = words[_FLAGS], words[_COUNTS]
        return EngineStatus(
            state=_STATES.get(words[_STATE], EngineState.LAUNCHED),  # a crashing engine may have written anything
            steps=words[_STEPS],
            step_began_at=times[_STEP_BEGAN_AT],  # before the next one: a step that ends meanwhile has ended
            last_step_at=times[_LAST_STEP_AT],
            busy_since=times[_BUSY_SINCE],
            waiting=counts >> 32,
            running=counts & _COUNT_MASK,
            is_sleeping=bool(flags & _SLEEPING),
            is_paused=bool(flags & _PAUSED),
            rank=words[_RANK],
        )

    def counts(self) -> tuple[int, int]:
        """Return how many requests wait and run: ``snapshot`` for a load balancer in a hurry."""
        counts = self._words[_COUNTS]
        return counts >> 32, counts & _COUNT_MASK

    def strays(self) -> list[tuple[int, int]]:
        """Return pid and start of the processes below the engine that have left its process group."""
        count = min(self._words[_STRAYS], MOST_STRAYS)
        values = list(self._words[_STRAYS + 1 : _STRAYS + 1 + 2 * count])
        return list(zip(values[::2], values[1::2], strict=True))

    def log_lines(self) -> list[str]:
        """Return the last lines that the engine logged, oldest first."""
        written = self._words[_LOG_WRITTEN]
        ring = bytes(self._page[_RING_START:])
        # What was claimed by the time the copy was made may be overwritten in it.
        begin = max(0, self._words[_LOG_CLAIMED] - _RING_SIZE)
        if begin >= written:
            return []
        split = begin % _RING_SIZE
        text = (ring[split:] + ring[:split])[: written - begin]
        if begin:
            text = text.partition(b"\n")[2]  # the first line has lost its beginning
        return text.decode("utf-8", "replace").splitlines()

    def close(self) -> None:
        """Keep a private copy, let go of the page and close its descriptor; idempotent."""
        self._use(memoryview(bytes(self._page)))
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        return f"<StatusReader {'closed' if self._fd < 0 else f'fd={self._fd}'} {self.snapshot()}>"


def _counters(page: memoryview) -> Counters:
    part = page[8 * _COUNTERS : 8 * _COUNTERS + Counters.SIZE]
    return Counters(part.cast("Q"), part.cast("d"))


def _map(fd: int) -> memoryview:
    """Return the page; it is unmapped when the last view of it is gone."""
    StatusReader.prepare(fd)
    return memoryview(mmap.mmap(fd, _SIZE))
