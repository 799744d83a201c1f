"""The memory behind an arena as its writer sees it: a file that grows in place, its mapping, and the blocks in it.

The file becomes longer in few, large steps, and is mapped anew at each; of that length only what blocks need exists as
memory.  Old mappings stay as long as anything refers to them; all of them show the same pages.  (Mapping chunk by chunk
instead would keep blocks from growing together across chunks.)

Invariants: nothing is touched before it was reserved, so there is no SIGBUS; I5 (one owner per block).

Threads: called under the lock of the ``ArenaWriter`` that owns it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from engine_client.ipc.arena_blocks import PAGE, FreeBlocks, size_class, whole_pages
from engine_client.ipc.arena_memory import describe_memory, memory_room, reserve
from engine_client.ipc.arena_table import TABLE_SIZE, Table, map_memory, prefault

__all__ = ["Allocation", "ArenaRoom", "Block", "Claim", "claiming"]

T = TypeVar("T")

_STEP: Final = 1 << 20
"""Least number of bytes by which memory grows: first to ask how much there is costs 0.1 ms."""
_FIRST_MAPPING: Final = 256 << 20
_MAPPING_FACTOR: Final = 4
"""Address space is cheap, but a new mapping must learn all pages again: 8 GiB are reached in four mappings."""


class Block:
    """A live block; free again when nobody holds it: publications, a copy under way, a local allocation."""

    __slots__ = ("holders", "offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.holders = 1  # its maker


class Claim:
    """What a call has taken so far; made before it takes anything, so that all of it can be given back."""

    __slots__ = ("block", "stamp")

    def __init__(self) -> None:
        self.block: Block | None = None
        self.stamp = 0


def claiming(function: Callable[[Claim], T], orders: deque[Any], undo: Callable[..., object]) -> T:
    """Return ``function(claim)``; if that raises, append ``(undo, claim)`` to ``orders``."""
    claim = Claim()
    try:
        try:
            return function(claim)
        except BaseException:
            orders.append((undo, claim))
            raise
    except BaseException:
        # Once more: on Python 3.10 a second interrupt may come before the first line of what handles the first.
        orders.append((undo, claim))
        raise


class Allocation(weakref.ref[Any]):
    """Tells when the last view of a local allocation is gone."""

    address = 0  # until it is registered
    block: Block


class ArenaRoom:
    """Owns the descriptor, the table, the mapping and the blocks; nothing is made before the first ``take``."""

    def __init__(self, fd: int, limit: int) -> None:
        self.table: Table | None = None
        self.mapping: mmap.mmap | None = None
        self.blocks = FreeBlocks()
        self.limit = limit - limit % PAGE
        self.fd = fd

    @property
    def is_closed(self) -> bool:
        """Tell whether ``close`` was called."""
        return self.fd < 0

    @property
    def medium(self) -> str:
        """Say, for the log, what buffers travel through."""
        return describe_memory(self.fd) if self.limit and not self.is_closed else "the pipe"

    def take(self, nbytes: int) -> Block | None:
        """Return a new block, held by its maker; None if there is no room for it."""
        if self.is_closed:
            return None
        # The rounded size fits freed blocks better; just below the limit the exact one may be all there is.
        size = size_class(nbytes)
        start = self._start_of(size)
        if start is None and whole_pages(nbytes) < size:
            size = whole_pages(nbytes)
            start = self._start_of(size)
        return None if start is None else Block(TABLE_SIZE + start, size)

    def _start_of(self, size: int) -> int | None:
        """Return where a new block of this size begins; None if there is no room."""
        start = self.blocks.take(size)
        return self.blocks.take(size) if start is None and self._grow(size) else start

    def drop(self, block: Block) -> None:
        """Let one holder of a block go."""
        block.holders -= 1
        if not block.holders and not self.is_closed:
            self.blocks.give(block.offset - TABLE_SIZE, block.size)

    def keep_only(self, blocks: Iterable[Block]) -> None:
        """Make everything free but these blocks."""
        self.blocks.keep_only((block.offset - TABLE_SIZE, block.size) for block in blocks)

    def close(self) -> None:
        """Let go of the memory and the descriptor; idempotent.  Views of the mapping keep it."""
        self.table = self.mapping = None
        self.blocks = FreeBlocks()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _grow(self, size: int) -> bool:
        """Make room for a block of ``size``; return whether there is now."""
        missing = self.blocks.missing(size)
        end = TABLE_SIZE + self.blocks.capacity
        step = min(max(missing, _STEP), self.limit - self.blocks.capacity)
        if step < missing:
            return False
        try:
            if memory_room(self.fd) < step + TABLE_SIZE:
                return False
            if self.table is None:
                for _ in reserve(self.fd, 0, TABLE_SIZE):
                    pass
                self.table = Table(self.fd)
            mapping = self._mapping_of(end + step)
            for reserved in reserve(self.fd, end, end + step):
                prefault(mapping, TABLE_SIZE + self.blocks.capacity, reserved, write=True)
                self.blocks.extend(reserved - TABLE_SIZE)
        except (OSError, MemoryError):
            return False  # safe because the pipe takes it; what was reserved before the failure is used later
        return True

    def _mapping_of(self, size: int) -> mmap.mmap:
        """Return a mapping of at least ``size`` bytes."""
        mapped = 0 if self.mapping is None else len(self.mapping)
        if self.mapping is None or mapped < size:
            generous = min(max(_FIRST_MAPPING, mapped * _MAPPING_FACTOR, size), TABLE_SIZE + self.limit)
            try:
                self.mapping = self._mapping_anew(generous)
            except (OSError, MemoryError):  # a limit of file sizes or of address space: do with less
                self.mapping = self._mapping_anew(size)
        return self.mapping

    def _mapping_anew(self, size: int) -> mmap.mmap:
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, size)
        return map_memory(self.fd, size)
