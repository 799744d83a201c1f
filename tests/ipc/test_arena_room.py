"""The arena's memory grows as far as limits allow, and failing to grow harms nobody."""

from __future__ import annotations

import mmap
import os

import pytest

from engine_client.ipc import arena_room
from engine_client.ipc.arena_memory import create_memory
from engine_client.ipc.arena_room import ArenaRoom
from engine_client.ipc.arena_table import TABLE_SIZE
from helpers.procs import run_script

KIB = 1024
MIB = 1 << 20


@pytest.fixture
def make_room():
    rooms = []

    def make(limit):
        rooms.append(ArenaRoom(create_memory("test"), limit))
        return rooms[-1]

    yield make
    for room in rooms:
        room.close()


def test_nothing_is_made_before_it_is_needed(make_room):
    """A new room has no table, no mapping and an empty file, also with a limit beyond the machine's memory."""
    fd = create_memory("test")
    room = ArenaRoom(fd, 64 << 30)
    assert room.table is room.mapping is None
    assert os.fstat(fd).st_size == 0
    block = room.take(100)
    assert block is not None
    assert os.fstat(fd).st_blocks * 512 <= 2 * MIB
    room.close()


def test_a_block_is_free_when_its_last_holder_is_gone(make_room):
    """Blocks count their holders; the memory of a dropped one is reused, not added to."""
    room = make_room(8 * MIB)
    block = room.take(MIB)
    block.holders += 1
    room.drop(block)
    assert room.blocks.used == MIB
    room.drop(block)
    assert room.blocks.used == 0
    assert room.take(MIB).offset == block.offset
    assert room.blocks.capacity == MIB


def test_the_limit_is_exact(make_room):
    """Blocks add up to the limit and no further; just below it a block is as tight as it must be."""
    room = make_room(5 * MIB + 100)
    tight = room.take(5 * MIB - 1000)
    assert tight.size == 5 * MIB
    assert room.take(1) is None
    room.drop(tight)
    assert room.take(5 * MIB + 100) is None
    assert room.blocks.capacity == 5 * MIB


def test_a_limit_of_nothing_is_no_room(make_room):
    """A limit of zero, or below a page, gives no block and touches nothing."""
    for limit in (0, 4095):
        room = make_room(limit)
        assert room.take(1) is None
        assert room.table is None


def test_small_blocks_share_a_step_of_growth(make_room):
    """Memory grows by a megabyte at least, and a block that is split off it needs no further growth."""
    room = make_room(8 * MIB)
    room.take(4 * KIB)
    assert room.blocks.capacity == MIB
    for _ in range(3):
        room.take(64 * KIB)
    assert room.blocks.capacity == MIB


def test_old_mappings_show_the_same_memory(make_room, monkeypatch):
    """After growth beyond the mapping, a view through the old one and the new one show the same bytes."""
    monkeypatch.setattr(arena_room, "_FIRST_MAPPING", MIB)
    room = make_room(64 * MIB)
    block = room.take(512 * KIB)
    old = memoryview(room.mapping)
    room.take(32 * MIB)
    assert len(room.mapping) > len(old)
    old[block.offset] = 77
    assert room.mapping[block.offset] == 77


def test_without_address_space_for_more_the_mapping_is_tight(make_room, monkeypatch):
    """Where the generous mapping is refused, a mapping of just what is needed does."""
    real = arena_room.map_memory

    def tight_only(fd, size):
        if size > TABLE_SIZE + 4 * MIB:
            raise OSError(12, "Cannot allocate memory")
        return real(fd, size)

    monkeypatch.setattr(arena_room, "map_memory", tight_only)
    room = make_room(64 * MIB)
    assert room.take(2 * MIB) is not None
    assert len(room.mapping) == TABLE_SIZE + 2 * MIB
    assert room.take(3 * MIB) is None
    assert room.take(2 * MIB) is not None


def test_a_machine_without_room_is_not_asked_for_it(make_room, monkeypatch):
    """When the memory group has too little left, growth is not even tried; later it is."""
    monkeypatch.setattr(arena_room, "memory_room", lambda fd: 3 * MIB)
    room = make_room(64 * MIB)
    assert room.take(4 * MIB) is None
    assert room.blocks.capacity == 0
    assert room.take(2 * MIB) is not None
    monkeypatch.undo()
    assert room.take(4 * MIB) is not None


def test_what_was_reserved_before_the_end_of_room_is_used(make_room, monkeypatch):
    """When growth fails half way, the half is there for smaller blocks."""
    real = os.posix_fallocate

    def limited(fd, offset, length):
        if offset + length > TABLE_SIZE + 3 * MIB:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    room = make_room(64 * MIB)
    assert room.take(8 * MIB) is None
    assert room.blocks.capacity == 3 * MIB
    assert room.take(3 * MIB) is not None


def test_without_room_for_the_table_nothing_works_and_nothing_breaks(make_room, monkeypatch):
    """A file system that is full from the start refuses every block, until it is not full any more."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _no_space)
        room = make_room(64 * MIB)
        assert room.take(MIB) is None
        assert room.table is None
    assert room.take(MIB) is not None


def _no_space(fd, offset, length):
    raise OSError(28, "No space left on device")


def test_a_file_size_limit_is_kept():
    """Under RLIMIT_FSIZE blocks are given out below the limit and refused above it, without a signal."""
    run_script("""
        import resource
        from engine_client.ipc.arena_memory import create_memory
        from engine_client.ipc.arena_room import ArenaRoom

        limit = 10 << 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        room = ArenaRoom(create_memory("test"), 1 << 30)
        blocks = [room.take(1 << 20) for _ in range(20)]
        given = [block for block in blocks if block]
        assert 8 <= len(given) <= 9, given
        for block in given:
            room.mapping[block.offset + block.size - 1] = 1
        assert room.take(64 << 20) is None
    """).check()


def test_an_address_space_limit_is_kept():
    """Under RLIMIT_AS, where 256 MiB cannot be mapped, blocks are given out as far as address space goes."""
    run_script("""
        import resource
        from engine_client.ipc.arena_memory import create_memory
        from engine_client.ipc.arena_room import ArenaRoom

        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        room = ArenaRoom(create_memory("test"), 1 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (now + (64 << 20), now + (64 << 20)))
        block = room.take(8 << 20)
        assert block is not None
        room.mapping[block.offset + block.size - 1] = 1
        assert room.take(128 << 20) is None
        assert room.take(8 << 20) is not None
    """).check()


def test_closing_is_final(make_room):
    """After close there are no blocks, late drops change nothing, and views of the mapping stay."""
    room = make_room(8 * MIB)
    block = room.take(MIB)
    view = memoryview(room.mapping)[block.offset :]
    assert not room.is_closed
    room.close()
    room.close()
    assert room.is_closed
    assert room.take(1) is None
    room.drop(block)
    assert room.blocks.used == room.blocks.capacity == 0
    view[0] = 1
    assert isinstance(view.obj, mmap.mmap)
