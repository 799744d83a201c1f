"""The table's stamps, and mappings that last as long as what was made from them."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys

import pytest
from hypothesis import given, strategies as st

from engine_client.ipc import arena_table
from engine_client.ipc.arena_memory import create_memory, reserve
from engine_client.ipc.arena_table import (
    FREE,
    MAX_PARTIES,
    SLOTS,
    TABLE_SIZE,
    Table,
    make_owner,
    make_stamp,
    map_memory,
    party_of,
    prefault,
    slot_of,
)

SIZE = TABLE_SIZE + 100_000


@pytest.fixture
def fd():
    fd = create_memory("test")
    list(reserve(fd, 0, SIZE))
    yield fd
    os.close(fd)


@given(st.integers(1, (1 << 40) - 1), st.integers(0, MAX_PARTIES - 1), st.integers(0, SLOTS - 1))
def test_a_stamp_holds_its_parts(generation, party, slot):
    """A stamp fits 64 bits, is never 0, tells reader and slot, and differs in every generation."""
    stamp = make_stamp(generation, party, slot)
    assert 0 < stamp < 1 << 64
    assert (party_of(stamp), slot_of(stamp)) == (party, slot)
    assert make_stamp(generation + 1, party, slot) != stamp


def test_two_mappings_show_one_table(fd):
    """What one side writes the other reads; a new table is all free; the columns do not touch each other."""
    ours, theirs = Table(fd), Table(fd)
    assert set(theirs.states) == {FREE}
    ours.states[SLOTS - 1] = 3
    ours.stamps[0] = 1 << 63
    assert theirs.states[SLOTS - 1] == 3
    assert theirs.stamps[0] == 1 << 63
    assert len(theirs.stamps) == len(theirs.states) == SLOTS


def test_a_mapping_goes_with_the_last_thing_made_from_it(fd):
    """A mapping that was dropped lives on in an owner's slice, and is unmapped when that goes."""
    open_before = len(os.listdir("/proc/self/fd"))
    mapping = map_memory(fd, SIZE)
    view = memoryview(make_owner(mapping, TABLE_SIZE, 10)).cast("B")[2:5]
    del mapping
    view[:] = b"abc"
    assert os.pread(fd, 3, TABLE_SIZE + 2) == b"abc"
    assert len(os.listdir("/proc/self/fd")) == open_before + 1
    del view
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_mappings_stay_out_of_core_files(fd):
    """The mapping is marked as not to be dumped (dd), since a dump would fill the part that does not exist."""
    mapping = map_memory(fd, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    with open("/proc/self/smaps") as file:
        text = file.read()
    flags = text[text.index(f"{address:08x}-") :].partition("VmFlags:")[2].partition("\n")[0].split()
    assert "dd" in flags


def test_systems_without_these_calls_do_without(fd, monkeypatch):
    """Without MADV_DONTDUMP, without populating, or refused by the kernel, a mapping works all the same."""
    with monkeypatch.context() as patch:
        patch.delattr(mmap, "MADV_DONTDUMP")
        mapping = map_memory(fd, SIZE)
    prefault(mapping, TABLE_SIZE + 5, SIZE, write=False)
    with monkeypatch.context() as patch:
        patch.setattr(arena_table, "_MADV_POPULATE_WRITE", 9999)
        prefault(mapping, TABLE_SIZE, SIZE, write=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        prefault(mapping, TABLE_SIZE, SIZE, write=True)
    assert mapping[SIZE - 1] == 0


def test_owners_are_of_few_types_and_never_reach_beyond_the_mapping(fd):
    """Ranges of about the same size share a ctypes type; at the mapping's end an owner is as long as its range."""
    mapping = map_memory(fd, SIZE)
    first, second = (make_owner(mapping, TABLE_SIZE, length) for length in (70_000, 79_999))
    assert type(first) is type(second)
    assert len(first) >= 79_999
    last = make_owner(mapping, SIZE - 5, 5)
    assert len(last) == 5
