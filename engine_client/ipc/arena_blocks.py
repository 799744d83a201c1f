"""Which parts of the arena are free: sizes and offsets only, no memory.

Freed blocks are kept apart by size and handed out last-in first-out, because the block that was used last is still in
the processor's caches and mapped by both sides.  A block of another size is split off the smallest free one that is
large enough.  Neighbours are merged only when nothing fits, so that the common case, buffers of the same few sizes over
and over, never shuffles anything.

Invariants: the live blocks and the free ones tile ``[0, capacity)`` exactly (I5: one owner per block).

Threads: none of its own; whoever uses it holds a lock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

__all__ = ["PAGE", "FreeBlocks", "size_class", "whole_pages"]

PAGE: Final = 4096
"""Blocks begin at multiples of this, and their sizes are multiples of it."""


def whole_pages(nbytes: int) -> int:
    """Return the size of the smallest block that holds ``nbytes``."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


@lru_cache(maxsize=256)  # the sizes of one program's buffers are few
def size_class(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to one of four sizes per doubling, so that freed blocks fit again."""
    step = max(PAGE, (1 << (nbytes - 1).bit_length()) >> 3) if nbytes > 1 else PAGE
    return -(-nbytes // step) * step if nbytes > 1 else PAGE


class FreeBlocks:
    """The free part of an area that starts empty and grows at its end.

    A signal handler may raise between any two steps.  Steps are in an order in which a block can then be lost, but
    never be free twice.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._starts: dict[int, list[int]] = {}  # by size; the last one was freed last
        self._sizes: list[int] = []  # its keys, sorted
        self._fragmented = False  # blocks came back since neighbours were merged

    def __repr__(self) -> str:
        return f"<FreeBlocks used={self.used} capacity={self.capacity}>"

    @property
    def used(self) -> int:
        """Return the bytes that are not free."""
        return self.capacity - sum(size * len(starts) for size, starts in self._starts.items())

    def take(self, size: int) -> int | None:
        """Return the start of a block of ``size`` bytes, from now on live; None if none is free."""
        start = self._fit(size)
        if start is None and self._fragmented:
            self._merge()
            start = self._fit(size)
        return start

    def give(self, start: int, size: int) -> None:
        """Take a live block back."""
        self._add(start, size)
        self._fragmented = True

    def extend(self, capacity: int) -> None:
        """Add what lies between the end so far and ``capacity``."""
        start, self.capacity = self.capacity, capacity
        self._add(start, capacity - start)
        self._fragmented = True  # with a free block at the old end

    def keep_only(self, live: Iterable[tuple[int, int]]) -> None:
        """Make everything free but these blocks: ``(start, size)``."""
        by_size: dict[int, list[int]] = {}
        end = 0
        for start, size in [*sorted(live), (self.capacity, 0)]:
            if start > end:
                by_size.setdefault(start - end, []).append(end)
            end = start + size
        sizes = sorted(by_size)
        self._starts, self._sizes, self._fragmented = by_size, sizes, False

    def missing(self, size: int) -> int:
        """Return by how many bytes the area must grow until a block of ``size`` fits at its end."""
        if self._fragmented:
            self._merge()
        tails = (length for length, starts in self._starts.items() if self.capacity - length in starts)
        return size - next(tails, 0)

    def _fit(self, size: int) -> int | None:
        index = bisect_left(self._sizes, size)
        if index == len(self._sizes):
            return None
        length = self._sizes[index]
        starts = self._starts[length]
        if len(starts) == 1:  # never an empty list, and never a size without a list
            del self._sizes[index], self._starts[length]
        start = starts.pop()
        if length > size:
            self._add(start + size, length - size)
        return start

    def _add(self, start: int, size: int) -> None:
        starts = self._starts.get(size)
        if starts is None:
            self._starts[size] = [start]
            insort(self._sizes, size)
        else:
            starts.append(start)

    def _merge(self) -> None:
        """Make one block of free neighbours."""
        merged: dict[int, int] = {}  # sizes by start
        end = begin = -1
        for start, size in sorted((start, size) for size, starts in self._starts.items() for start in starts):
            begin = begin if start == end else start
            end = start + size
            merged[begin] = end - begin
        by_size: dict[int, list[int]] = {}
        for start, size in merged.items():
            by_size.setdefault(size, []).append(start)
        sizes = sorted(by_size)
        self._starts, self._sizes, self._fragmented = by_size, sizes, False
