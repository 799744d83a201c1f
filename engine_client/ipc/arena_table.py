"""The table at the start of an arena: who may write which byte of it, and how mappings of an arena are made.

One slot per *publication* (one range sent to one reader).  The segment on the pipe carries the stamp of its slot, so
the reader needs nothing but the table to check what it gets, and a block can be published many times::

    | 16384 states, a byte each | 16384 stamps of 8 bytes | blocks ...

    state       FREE ──writer──▶ SENT ──reader──▶ LEASED ──reader──▶ RELEASED ──writer──▶ FREE
    may write   writer           reader           reader             writer

A byte never has two possible writers at once, so plain stores do, without a lock between processes.  Data is published
by the pipe message, never by a byte alone.  A writer that knows its reader to be dead takes SENT and LEASED slots back.

A stamp is ``generation << 24 | reader << 14 | slot``; generations never repeat, so a stale or invented segment is
recognised.

Invariants: I5 (one owner per block).

Threads: functions without state; the table's bytes as said above.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from functools import cache
from typing import Any, Final

from engine_client.ipc.arena_blocks import PAGE, size_class

__all__ = [
    "FREE",
    "LEASED",
    "MAX_PARTIES",
    "RELEASED",
    "SENT",
    "SLOTS",
    "TABLE_SIZE",
    "Table",
    "copy",
    "make_owner",
    "make_stamp",
    "map_memory",
    "party_of",
    "prefault",
    "slot_of",
]

FREE: Final = 0
SENT: Final = 1
LEASED: Final = 2
RELEASED: Final = 3

_SLOT_BITS: Final = 14
_PARTY_BITS: Final = 10
SLOTS: Final = 1 << _SLOT_BITS
"""Most ranges that are with readers at the same time."""
MAX_PARTIES: Final = 1 << _PARTY_BITS
TABLE_SIZE: Final = SLOTS * 9
assert TABLE_SIZE % PAGE == 0

_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: map many pages at once.  Measured on 16 MiB (Linux 6.18 x86-64): 10 GiB/s, page faults 1.6 to 2.8."""
_COPY_SLICE: Final = 4 << 20
"""Bytes copied at a time; a copy holds the GIL, and another thread's turn should come within a millisecond."""
_PREFAULT_SLICE: Final = 4 << 20
"""Bytes mapped in one call; the call holds the GIL for well below a millisecond."""


def make_stamp(generation: int, party: int, slot: int) -> int:
    """Return the stamp of a publication; never 0, which is the stamp of inline segments."""
    return generation << (_PARTY_BITS + _SLOT_BITS) | party << _SLOT_BITS | slot


def party_of(stamp: int) -> int:
    """Return which reader a stamp is for."""
    return stamp >> _SLOT_BITS & (MAX_PARTIES - 1)


def slot_of(stamp: int) -> int:
    """Return the slot of a stamp."""
    return stamp & (SLOTS - 1)


class Table:
    """Both columns of the table in one mapping, which lasts as long as anybody holds one of them."""

    __slots__ = ("stamps", "states")

    def __init__(self, fd: int) -> None:
        view = memoryview(mmap.mmap(fd, TABLE_SIZE))
        self.states = view[:SLOTS]
        self.stamps = view[SLOTS:].cast("Q")


def map_memory(fd: int, size: int) -> mmap.mmap:
    """Map the first ``size`` bytes of an arena.

    The mapping is never closed, only dropped: whatever was made from it keeps it alive, and its memory goes with the
    last such thing.

    Raises:
        OSError, MemoryError: the mapping cannot be had.
    """
    mapping = mmap.mmap(fd, size)
    if hasattr(mmap, "MADV_DONTDUMP"):
        with suppress(OSError):  # safe because it only keeps core files small: they would fill the unused part
            mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping


def prefault(mapping: mmap.mmap, start: int, stop: int, *, write: bool) -> None:
    """Map pages that exist already in one go, which is several times faster than one by one when they are touched."""
    if sys.platform != "linux":
        return
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    start -= start % mmap.PAGESIZE
    with suppress(OSError):  # safe because then the pages are mapped when they are touched; EINVAL before Linux 5.14
        for begin in range(start, stop, _PREFAULT_SLICE):
            mapping.madvise(advice, begin, min(_PREFAULT_SLICE, stop - begin))


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes, slice by slice."""
    for begin in range(0, len(target), _COPY_SLICE):
        target[begin : begin + _COPY_SLICE] = source[begin : begin + _COPY_SLICE]


def make_owner(mapping: mmap.mmap, offset: int, length: int) -> Any:
    """Return a ctypes array over ``length`` bytes of the mapping, or some more: what all views of a range refer to.

    Everything made from it (slices, arrays, tensors) keeps it alive, which a memoryview would not do: its slices
    refer to what the memoryview itself was made from.

    Raises:
        MemoryError: no memory for the object.
    """
    size = size_class(length)
    if offset + size > len(mapping):
        size = length
    return _owner_type(size).from_buffer(mapping, offset)


@cache
def _owner_type(size: int) -> Any:
    import ctypes  # noqa: PLC0415  # 2 ms that a process without big buffers need not pay

    return ctypes.c_ubyte * size
