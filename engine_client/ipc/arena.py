"""Big buffers travel through shared memory: copied into it once by their sender, read in place by their receiver.

::

    sender: put(data) ── copies ──▶ [ table | block | block ... ] ──▶ receiver: lease(segment) is a view of the block
               └── Segment(length, offset, stamp) ── pipe ──────────────────────▶ ┘
    a block is free again ◀── its slot says RELEASED ◀── the last view, slice, array or tensor of it is gone

An arena has one writer and up to 1,024 readers; a *party* is the number of one.  Its memory comes into being on first
use and grows in place.  What does not fit, for whatever reason (limit, memory cgroup, file-size limit, address space),
makes ``put`` return None: the caller then uses the pipe.

Invariants: I5 (one owner per block: a range is reused only when every publication of it was released, or its reader is
known dead, and no local view lives; release is idempotent; views outlive ``close``).

Threads: everything may be called from any thread.  ``put`` copies outside of the lock.  Releases come from the garbage
collector, in any thread and at any moment: they are one store each and take no lock.  A signal handler that calls
``put`` while its thread is inside gets None; its ``cancel``, ``reclaim`` and ``close`` are done by the outer call.  One
that raises may interrupt a change between any two of its lines: the next call works out again, from what is published,
copied and allocated, what is free.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeVar

from engine_client.errors import ClosedError
from engine_client.ipc.arena_memory import create_memory
from engine_client.ipc.arena_reader import ArenaReader
from engine_client.ipc.arena_room import Allocation, ArenaRoom, Block, Claim, claiming
from engine_client.ipc.arena_table import (
    FREE,
    MAX_PARTIES,
    RELEASED,
    SENT,
    SLOTS,
    copy,
    make_owner,
    make_stamp,
    party_of,
    slot_of,
)
from engine_client.protocol.frames import Segment, new_tuple

__all__ = ["MAX_PARTIES", "ArenaReader", "ArenaWriter", "create_memory"]

T = TypeVar("T")


class ArenaWriter:
    """The sending side of an arena; ends with ``close``.

    Args:
        fd: of memory from ``create_memory``, of which this is the only writer; owned by this object from here on.
        limit: most bytes of blocks; 0 makes every ``put`` return None.
        parties: how many readers there may be.
    """

    def __init__(self, fd: int, *, limit: int, parties: int = 1) -> None:
        if not 1 <= parties <= MAX_PARTIES:
            raise ValueError(f"an arena has 1 to {MAX_PARTIES} readers, not {parties}")
        self._parties = parties
        self._lock = threading.RLock()  # a signal handler may close the client inside of put
        # What must not wait for the lock; safe without it because appending to a deque and taking from it are atomic.
        self._orders: deque[tuple[Callable[[ArenaWriter, Any], None], Any]] = deque()
        self._dropped: deque[Allocation] = deque()
        self._closed = False
        # -- guarded by _lock --
        self._busy = False
        self._torn = False  # an interrupt came in the middle of a change
        self._room = ArenaRoom(fd, limit)
        self._sent: dict[int, tuple[int, Block]] = {}  # stamp and block by slot
        self._free_slots: list[int] = []
        self._slots_used = 0  # this slot and higher ones were never used
        self._generation = 0
        self._copying: set[Block] = set()  # being filled
        self._allocations: dict[int, Allocation] = {}  # by address
        self.fallbacks = 0  # buffers that found no room

    # -- sending -------------------------------------------------------------------------------------------------------

    def put(self, data: memoryview, party: int = 0, into: list[Segment] | None = None) -> Segment | None:
        """Copy ``data`` (contiguous bytes) into the arena for one reader; None: there is no room, use the pipe.

        The segment must be sent to that reader, or given to ``cancel``.  It is appended to ``into`` before this
        returns, for callers to whom an interrupt might come in between.
        """
        self._check_party(party)
        if not data.nbytes:
            return None
        return claiming(lambda claim: self._put(claim, data, party, into), self._orders, ArenaWriter._take_back_locked)

    def _put(self, claim: Claim, data: memoryview, party: int, into: list[Segment] | None) -> Segment | None:
        placed = self._exclusively(lambda: self._place_locked(claim, data.nbytes, party))
        if placed is None:
            return None
        segment, block, target = placed
        copy(data, target)
        self._orders.append((ArenaWriter._end_copy_locked, block))
        if into is not None:
            into.append(segment)
        return segment

    def allocate(self, nbytes: int) -> memoryview:
        """Return writable memory that ``segment_of`` can publish without a copy; it is freed with its last view.

        Raises:
            ClosedError: the arena was closed.
            MemoryError: there is no room; the message names the sizes.
            ValueError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        view = self._exclusively(lambda: self._allocate_locked(max(1, nbytes)))
        if view is None:
            if self._closed:
                raise ClosedError("the shared memory was closed")
            raise MemoryError(f"no room for {nbytes} bytes of shared memory: {self!r}")
        return view[:nbytes]

    def segment_of(self, view: memoryview, party: int = 0, into: list[Segment] | None = None) -> Segment | None:
        """Publish a view for one reader without a copy; None unless all of it lies in one living allocation.

        The bytes must not be changed from here on.  A read-only view counts as lying elsewhere.  ``into`` is that of
        ``put``.
        """
        self._check_party(party)
        if not self._allocations or view.readonly or not view.nbytes:
            return None
        import ctypes  # noqa: PLC0415  # loaded since the first allocation

        address = ctypes.addressof(ctypes.c_char.from_buffer(view))

        def publish(claim: Claim) -> Segment | None:
            segment = self._exclusively(lambda: self._publish_at_locked(claim, address, view.nbytes, party))
            if segment is not None and into is not None:
                into.append(segment)
            return segment

        return claiming(publish, self._orders, ArenaWriter._take_back_locked)

    def _check_party(self, party: int) -> None:
        if not 0 <= party < self._parties:
            raise ValueError(f"there is no reader {party} in an arena for {self._parties}")

    # -- taking back ---------------------------------------------------------------------------------------------------

    def cancel(self, segment: Segment) -> None:
        """Take a segment back that was never sent; does nothing for one that was taken back or released before."""
        self._orders.append((ArenaWriter._cancel_locked, segment.stamp))
        self._settle()

    def reclaim(self, party: int) -> None:
        """Take back everything that a reader holds or was sent, because it is known to be dead."""
        self._orders.append((ArenaWriter._reclaim_locked, party))
        self._settle()

    def close(self) -> None:
        """Let go of the memory; idempotent.  Views that the caller or readers still hold stay as they are."""
        self._closed = True
        self._settle()

    def close_after_fork(self) -> None:
        """Let go of a forked child's copy: without the lock, whose holder may not exist there, and without a change."""
        self._lock = threading.RLock()
        self._closed = True
        self._close_locked()

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Return the bytes of all blocks that are not free."""
        self._settle()
        return self._room.blocks.used

    @property
    def capacity(self) -> int:
        """Return the bytes of all blocks, free ones included."""
        return self._room.blocks.capacity

    @property
    def fd(self) -> int:
        """Return the descriptor of the memory, for readers that are started; it stays this object's."""
        return self._room.fd

    @property
    def medium(self) -> str:
        """Say, for the log, what buffers travel through."""
        return self._room.medium

    def __repr__(self) -> str:
        blocks, state = self._room.blocks, "closed" if self._closed else "open"
        return f"<ArenaWriter {state} used={blocks.used} capacity={blocks.capacity} limit={self._room.limit}>"

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _exclusively(self, action: Callable[[], T]) -> T | None:
        """Return ``action()``, done under the lock and after everything that was put off; None if re-entered."""
        with self._lock:
            if self._busy:
                return None  # a signal handler, or a finalizer, on the thread that is inside
            try:
                self._busy = True
                if self._torn:
                    self._mend_locked()
                self._torn = True  # unless it is taken back below
                self._settle_locked()
                result = action()
                self._torn = False
                return result
            finally:
                self._busy = False
                if self._closed:
                    self._close_locked()

    def _settle(self) -> None:
        self._exclusively(lambda: None)

    def _settle_locked(self) -> None:
        """Do what was put off, and take back what was released since.  Requires ``_lock``."""
        while self._orders:
            order, argument = self._orders[0]
            order(self, argument)  # doing it twice does no harm, forgetting it would
            self._orders.popleft()
        while self._dropped:
            allocation = self._dropped[0]
            if self._allocations.pop(allocation.address, None) is not None:  # else the arena was closed meanwhile
                self._room.drop(allocation.block)
            self._dropped.popleft()
        if self._sent and self._room.table is not None:
            states = bytes(self._room.table.states[: self._slots_used])
            slot = states.find(RELEASED)
            while slot >= 0:
                self._retire_locked(slot)
                slot = states.find(RELEASED, slot + 1)

    def _mend_locked(self) -> None:
        """Work out again what is free, and who holds what is not.  Requires ``_lock``."""
        holders = Counter(block for _, block in self._sent.values())
        holders.update(self._copying)
        holders.update(allocation.block for allocation in self._allocations.values())
        for block, count in holders.items():
            block.holders = count
        self._room.keep_only(holders)
        self._free_slots = [slot for slot in range(self._slots_used) if slot not in self._sent]
        if (table := self._room.table) is not None:
            for slot in self._free_slots:
                table.states[slot] = FREE
        self._torn = False

    def _place_locked(self, claim: Claim, nbytes: int, party: int) -> tuple[Segment, Block, memoryview] | None:
        """Publish a new block to copy into; the copy holds it too, until it ends.  Requires ``_lock``."""
        block = claim.block = self._take_locked(nbytes)
        if block is None or self._room.mapping is None:
            return None
        self._copying.add(block)
        segment = self._publish_locked(claim, block, block.offset, nbytes, party)
        if segment is None:
            self._end_copy_locked(block)
            return None
        return segment, block, memoryview(self._room.mapping)[block.offset : block.offset + nbytes]

    def _allocate_locked(self, nbytes: int) -> memoryview | None:
        """Return all of a new block, which is held by its views.  Requires ``_lock``."""
        block = self._take_locked(nbytes)
        if block is None or self._room.mapping is None:
            return None
        try:
            import ctypes  # noqa: PLC0415  # 2 ms that a process without allocations need not pay

            owner = make_owner(self._room.mapping, block.offset, nbytes)
            allocation = Allocation(owner, self._dropped.append)
            allocation.address = ctypes.addressof(owner)
            allocation.block = block
            self._allocations[allocation.address] = allocation
        except BaseException:
            self._room.drop(block)
            raise
        return memoryview(owner).cast("B")

    def _take_locked(self, nbytes: int) -> Block | None:
        """Return a new block; count it if there is no room.  Requires ``_lock``."""
        block = None if self._closed else self._room.take(nbytes)
        self.fallbacks += block is None
        return block

    def _publish_at_locked(self, claim: Claim, address: int, nbytes: int, party: int) -> Segment | None:
        """Publish the part of an allocation that is at an address of this process.  Requires ``_lock``."""
        starts = sorted(self._allocations)
        index = bisect_right(starts, address) - 1
        if index < 0:
            return None
        block = self._allocations[starts[index]].block
        distance = address - starts[index]
        if distance + nbytes > block.size:
            return None
        return self._publish_locked(claim, block, block.offset + distance, nbytes, party)

    def _publish_locked(self, claim: Claim, block: Block, offset: int, nbytes: int, party: int) -> Segment | None:
        """Fill a slot; None if all are in use.  Requires ``_lock``."""
        table = self._room.table
        if table is None or (not self._free_slots and self._slots_used == SLOTS):
            self.fallbacks += 1
            return None
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._slots_used
            self._slots_used += 1
        self._generation += 1
        stamp = claim.stamp = make_stamp(self._generation, party, slot)
        block.holders += 1
        self._sent[slot] = stamp, block
        table.stamps[slot] = stamp
        table.states[slot] = SENT
        return new_tuple(Segment, (nbytes, offset, stamp))

    def _cancel_locked(self, stamp: int) -> None:
        if self._sent.get(slot_of(stamp), (0,))[0] == stamp:
            self._retire_locked(slot_of(stamp))

    def _reclaim_locked(self, party: int) -> None:
        for slot in [slot for slot, (stamp, _) in self._sent.items() if party_of(stamp) == party]:
            self._retire_locked(slot)

    def _retire_locked(self, slot: int) -> None:
        """End a publication.  Requires ``_lock``."""
        # Else a stray write: nothing was published there.
        if slot in self._sent and (table := self._room.table) is not None:
            _, block = self._sent.pop(slot)
            table.states[slot] = FREE
            self._free_slots.append(slot)
            self._room.drop(block)

    def _end_copy_locked(self, block: Block) -> None:
        if block in self._copying:
            self._copying.discard(block)
            self._room.drop(block)

    def _take_back_locked(self, claim: Claim) -> None:
        """Give back what an interrupted call has taken.  Requires ``_lock``."""
        self._cancel_locked(claim.stamp)
        if claim.block is not None:
            self._end_copy_locked(claim.block)

    def _close_locked(self) -> None:
        self._room.close()
        self._sent.clear()
        self._copying.clear()
        self._allocations.clear()
        self._orders.clear()
        self._dropped.clear()
