"""The receiving side of an arena: leases of what the writer published.

A lease is a view that reads and writes the writer's memory in place.  It ends when the last thing made from it is
gone: slices, arrays and tensors, also in reference cycles.  The range is then the writer's again.

Invariants: I5 (a range is leased once; release is idempotent; a view stays intact after ``close`` and after the death
of both the writer and the channel).

Threads: everything may be called from any thread.  Releases come from the garbage collector, in any thread and at any
moment: they are one store each and take no lock.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from operator import setitem
from typing import Any, Final

from engine_client.errors import ClosedError, RemoteProtocolError
from engine_client.ipc.arena_table import (
    LEASED,
    RELEASED,
    SENT,
    SLOTS,
    TABLE_SIZE,
    Table,
    make_owner,
    map_memory,
    party_of,
    prefault,
    slot_of,
)
from engine_client.protocol.frames import Segment

__all__ = ["ArenaReader"]


_LEASES: Final[dict[int, weakref.ref[Any]]] = {}
"""Keeps the references alive that watch, by number.  Leases outlive their reader, so they cannot be kept there."""
_NUMBERS: Final = count()


class _States(list[Any]):
    """Holds the states of a table, which every release looks up here: a forked copy replaces them by its own."""

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__  # type: ignore[assignment]  # a list has none, but an identity


_ALL_STATES: Final[weakref.WeakSet[_States]] = weakref.WeakSet()


def _release(states: _States, slot: int, number: int) -> Callable[[Any], Any]:
    """Return what ends a lease when its last view is gone: a call that marks its slot and forgets its reference.

    It takes the next item of an iterator, which is C code from end to end.  Between two lines of Python, an interrupt
    of the thread that happens to drop the view would lose the release, and would itself be lost.
    """
    mark = map(setitem, states, (slot,), (RELEASED,))
    forget = map(_LEASES.pop, (number,), (None,))
    return partial(next, zip(mark, forget))  # noqa: B905  # strict would look for a second item


def _leave_to_the_parent() -> None:
    """Let the views that this forked process drops release nothing: the parent's may still live."""
    for states in list(_ALL_STATES):
        states[0] = bytearray(SLOTS)


os.register_at_fork(after_in_child=_leave_to_the_parent)


class ArenaReader:
    """One reader of an arena; ends with ``close``, which its leases outlive.

    Args:
        fd: of the memory that the writer has; owned by this object from here on.
        party: which of the writer's readers this is.
    """

    def __init__(self, fd: int, *, party: int = 0) -> None:
        self._party = party
        self._lock = threading.RLock()  # a signal handler may close the client inside of lease
        # -- guarded by _lock --
        self._fd = fd
        self._table: Table | None = None
        self._states = _States()
        self._to_discard: list[Segment] = []  # could not be given back yet
        self._mapping: mmap.mmap | None = None
        self._faulted = 0  # what lies before is mapped page by page already, or was skipped

    def lease(self, segment: Segment) -> memoryview:
        """Return a writable view of a published range; it starts at offset 0 of its ``obj``.

        Raises:
            ClosedError: the reader was closed.
            OSError, MemoryError: the memory cannot be mapped; the range can still be leased.
            RemoteProtocolError: nothing like this was published for this reader, or it was leased before.
        """
        length, offset, _ = segment
        with self._lock:
            table, slot = self._published_locked(segment)
            mapping = self._mapped_locked(offset, length)
            owner = make_owner(mapping, offset, length)
            view = memoryview(owner).cast("B")[:length]
            # A weakref.finalize in small: half the time for each lease, and nothing at interpreter exit.
            number = next(_NUMBERS)
            _LEASES[number] = weakref.ref(owner, _release(self._states, slot, number))
            table.states[slot] = LEASED
            self._discard_locked()
        return view

    def discard(self, segment: Segment) -> None:
        """Give a published range back that will not be leased; does nothing for anything else."""
        with self._lock:
            self._to_discard.append(segment)
            self._discard_locked()

    def _discard_locked(self) -> None:
        """Give back what is to be given back; while the table cannot be mapped, it has to wait.  Requires ``_lock``."""
        while self._to_discard:
            try:
                table, slot = self._published_locked(self._to_discard[-1])
            except (ClosedError, RemoteProtocolError):
                pass  # safe because what is not ours to give back needs nothing
            except (OSError, MemoryError):
                return  # safe because the next lease, which needs the table as well, tries again
            else:
                table.states[slot] = RELEASED
            self._to_discard.pop()

    def _published_locked(self, segment: Segment) -> tuple[Table, int]:
        """Return the table and the slot of a range that can be leased.  Requires ``_lock``."""
        if self._fd < 0:
            raise ClosedError("the shared memory was closed")
        if self._table is None:
            if os.fstat(self._fd).st_size < TABLE_SIZE:
                raise RemoteProtocolError(f"{segment} refers to shared memory that was never used")
            self._table = Table(self._fd)
            self._states.append(self._table.states)
            _ALL_STATES.add(self._states)
        table, slot = self._table, slot_of(segment.stamp)
        if party_of(segment.stamp) != self._party:
            raise RemoteProtocolError(f"{segment} is for reader {party_of(segment.stamp)}, this is {self._party}")
        if table.stamps[slot] != segment.stamp or table.states[slot] != SENT:
            raise RemoteProtocolError(f"{segment} was not published, or it was leased before")
        return table, slot

    def _mapped_locked(self, offset: int, length: int) -> mmap.mmap:
        """Return a mapping that covers a range.  Requires ``_lock``."""
        end = offset + length
        if length < 1 or offset < TABLE_SIZE:
            raise RemoteProtocolError(f"shared memory has no range of {length} bytes at {offset}")
        if self._mapping is None or end > len(self._mapping):
            size = os.fstat(self._fd).st_size
            if end > size:
                raise RemoteProtocolError(f"a range of {length} bytes at {offset} in {size} bytes of shared memory")
            try:
                self._mapping = map_memory(self._fd, size)
            except (OSError, MemoryError):  # the file is longer than what exists: address space may do for that
                self._mapping = map_memory(self._fd, end)
            self._faulted = TABLE_SIZE
        if end > self._faulted:
            prefault(self._mapping, max(offset, self._faulted), end, write=False)
            self._faulted = end
        return self._mapping

    def close(self) -> None:
        """Let go of the memory; idempotent.  Leases stay as they are, and are still released one by one."""
        with self._lock:
            self._table = self._mapping = None
            self._states = _States()  # that of the table goes with its last lease
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def close_after_fork(self) -> None:
        """Let go of a forked child's copy, without the lock, whose holder may not exist there."""
        self._lock = threading.RLock()
        self.close()

    def __repr__(self) -> str:
        return f"<ArenaReader party={self._party} {'closed' if self._fd < 0 else f'fd={self._fd}'}>"
