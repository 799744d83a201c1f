"""Leases: whatever is made from one keeps it, nothing else does, and nonsense is refused."""

from __future__ import annotations

import array
import gc
import os
import threading

import numpy as np
import pytest

from engine_client.errors import ClosedError, RemoteProtocolError
from engine_client.ipc import arena_reader
from engine_client.ipc.arena import ArenaReader
from engine_client.ipc.arena_memory import create_memory
from engine_client.ipc.arena_table import TABLE_SIZE
from engine_client.protocol.frames import Segment
from helpers.arenas import MIB, Arena
from helpers.procs import run_script


@pytest.fixture
def arena():
    arena = Arena(parties=2)
    yield arena
    arena.close()


# -- what a lease is ---------------------------------------------------------------------------------------------------


def test_a_lease_is_the_sent_bytes_in_place(arena):
    """A lease has exactly the bytes, is writable and flat, and begins where its owner begins."""
    view = arena.exchange(b"0123456789" * 10_000)
    assert view == b"0123456789" * 10_000
    assert (view.format, view.ndim, view.readonly, view.contiguous) == ("B", 1, False, True)
    assert bytes(memoryview(view.obj).cast("B")[:10]) == b"0123456789"
    view[0] = 65
    assert bytes(memoryview(view.obj).cast("B")[:2]) == b"A1"


@pytest.mark.parametrize("length", [1, 2, 4095, 4096, 4097, 65_536, 1_000_000, 5 * MIB, 5 * MIB + 1])
def test_any_length_arrives(arena, length):
    """Lengths on and off page and class borders arrive whole."""
    data = os.urandom(length)
    assert arena.exchange(data) == data


DERIVED = {
    "itself": lambda view: view,
    "slice": lambda view: view[10:20],
    "slice of a slice": lambda view: view[10:][5:][:3],
    "view of a view": lambda view: memoryview(memoryview(view)),
    "read-only view": lambda view: view.toreadonly()[1:],
    "cast": lambda view: view.cast("Q"),
    "array": lambda view: np.frombuffer(view, np.float32),
    "array of the owner": lambda view: np.frombuffer(view.obj, np.uint8, 10),
    "reshaped slice of an array": lambda view: np.frombuffer(view, np.uint8).reshape(8, -1)[2:4, ::2].T,
    "iterator": lambda view: iter(view[5:]),
    "in a cycle": lambda view: _cycle(view[3:]),
    "array in a cycle": lambda view: _cycle(np.frombuffer(view, np.uint8)[7:]),
}


def _cycle(thing):
    cycle = [thing]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize("derived", DERIVED.values(), ids=DERIVED)
def test_whatever_is_made_from_a_lease_keeps_it(arena, derived):
    """The block stays taken as long as anything made from the view lives, and is free right after (BC-32, BC-36)."""
    view = arena.exchange(bytes(range(256)) * 1024)
    kept = derived(view)
    del view
    gc.collect()
    used = arena.writer.used
    other = arena.exchange(b"\xff" * 262_144)
    assert used > 0
    assert arena.writer.used == 2 * used
    del kept, other
    gc.collect()
    assert arena.writer.used == 0


def test_a_copy_does_not_keep_a_lease(arena):
    """Bytes, bytearray and array copies are free of the arena."""
    view = arena.exchange(bytes(range(256)))
    kept = [bytes(view), bytearray(view), array.array("B", view)]
    del view
    assert arena.writer.used == 0
    assert all(bytes(copy) == bytes(range(256)) for copy in kept)


def test_leases_may_end_in_any_order_and_thread(arena):
    """Views dropped in other threads, in an order of their own, give all their blocks back."""
    views = [arena.exchange(os.urandom(10_000)) for _ in range(30)]
    groups = [views[n::3][::-1] for n in range(3)]
    views.clear()
    threads = [threading.Thread(target=group.clear) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.writer.used == 0


# -- nonsense ----------------------------------------------------------------------------------------------------------


def test_a_segment_is_leased_once(arena):
    """Neither a living nor a released lease can be had a second time."""
    segment = arena.writer.put(memoryview(bytes(1000)))
    view = arena.reader.lease(segment)
    with pytest.raises(RemoteProtocolError, match="leased before"):
        arena.reader.lease(segment)
    del view
    with pytest.raises(RemoteProtocolError, match="leased before"):
        arena.reader.lease(segment)
    assert arena.writer.used == 0
    with pytest.raises(RemoteProtocolError, match="leased before"):
        arena.reader.lease(segment)


def test_a_segment_is_for_its_reader_only(arena):
    """A segment for reader 1 is refused by reader 0, and still good for reader 1."""
    segment = arena.writer.put(memoryview(b"x" * 1000), 1)
    with pytest.raises(RemoteProtocolError, match="for reader 1"):
        arena.readers[0].lease(segment)
    assert arena.readers[1].lease(segment) == b"x" * 1000


@pytest.mark.parametrize(
    "change",
    [
        {"stamp": 0},
        {"stamp": (1 << 64) - 1},
        {"stamp": 1 << 24},
        {"stamp": 2 << 24 | 16383},
        {"length": 0},
        {"length": -5},
        {"length": 1 << 62},
        {"length": (1 << 64) - 1},
        {"offset": 0},
        {"offset": -1},
        {"offset": -(1 << 63)},
        {"offset": TABLE_SIZE - 1},
        {"offset": 1 << 40},
        {"offset": (1 << 63) - 1},
    ],
    ids=str,
)
def test_nonsense_is_refused_and_harms_nothing(arena, change):
    """A wrong stamp, offset or length raises RemoteProtocolError, and the true segment can be leased afterwards."""
    if change.get("stamp") == 1 << 24:
        arena.writer.cancel(arena.writer.put(memoryview(b"older")))  # generation 1 has been there, in this very slot
    segment = arena.writer.put(memoryview(b"y" * 1000))
    with pytest.raises(RemoteProtocolError):
        arena.reader.lease(segment._replace(**change))
    assert arena.reader.lease(segment) == b"y" * 1000


def test_memory_that_was_never_used_has_no_segments():
    """A segment that comes before the writer used the memory is refused."""
    reader = ArenaReader(create_memory("test"))
    with pytest.raises(RemoteProtocolError, match="never used"):
        reader.lease(Segment(10, TABLE_SIZE, 1 << 24))
    reader.discard(Segment(10, TABLE_SIZE, 1 << 24))
    reader.close()


def test_a_range_beyond_the_file_is_refused(arena):
    """A valid stamp with a length beyond the end of the memory is refused (BC-59)."""
    segment = arena.writer.put(memoryview(b"z" * 1000))
    size = os.fstat(arena.fd).st_size
    with pytest.raises(RemoteProtocolError, match=f"in {size} bytes"):
        arena.reader.lease(segment._replace(length=size - segment.offset + 1))


# -- failing to map (BC-64) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["map_memory", "Table", "make_owner"])
@pytest.mark.parametrize("error", [(OSError, 12, "no memory"), (OSError, 24, "too many files"), (MemoryError, "none")])
def test_a_failed_mapping_can_be_tried_again(arena, monkeypatch, what, error):
    """When mapping fails, that error is raised; nothing is lost, and the next try gets the bytes."""
    segment = arena.writer.put(memoryview(b"again" * 1000))

    kind, *details = error

    def fail(*args):
        raise kind(*details)

    with monkeypatch.context() as patch:
        patch.setattr(arena_reader, what, fail)
        with pytest.raises(kind, match=details[-1]):
            arena.reader.lease(segment)
    assert arena.reader.lease(segment) == b"again" * 1000
    assert arena.writer.used == 0


def test_an_interrupt_leaves_the_segment(arena, monkeypatch):
    """An interrupt between mapping and leasing leaves the segment to be leased."""
    segment = arena.writer.put(memoryview(b"int" * 1000))
    with monkeypatch.context() as patch:
        patch.setattr(arena_reader, "make_owner", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            arena.reader.lease(segment)
    assert arena.reader.lease(segment) == b"int" * 1000


def _interrupt(*args):
    raise KeyboardInterrupt


def test_one_reader_of_three_fails():
    """Of three readers the second cannot map; the others and the writer go on, and it succeeds later (BC-64)."""
    arena = Arena(parties=3)
    segments = [arena.writer.put(memoryview(bytes([n]) * 5000), n) for n in range(3)]
    second = arena.readers[1]
    low = os.open("/dev/null", os.O_RDONLY)
    good = os.dup(arena.fd)
    second.close()
    broken = ArenaReader(low, party=1)
    with pytest.raises(RemoteProtocolError):
        broken.lease(segments[1])
    broken.close()
    arena.readers[1] = ArenaReader(good, party=1)
    assert [reader.lease(segment)[0] for reader, segment in zip(arena.readers, segments, strict=True)] == [0, 1, 2]
    assert arena.writer.used == 0
    arena.close()


def test_no_descriptor_for_a_mapping():
    """Out of descriptors a lease raises OSError; when there are some again it succeeds (BC-64, EMFILE)."""
    run_script("""
        import os, resource
        from engine_client.ipc.arena import ArenaReader, ArenaWriter, create_memory

        fd = create_memory("test")
        writer = ArenaWriter(fd, limit=1 << 24)
        reader = ArenaReader(os.dup(fd))
        reader.lease(writer.put(memoryview(b"warm-up")))
        segment = writer.put(memoryview(b"x" * 100000))
        reader = ArenaReader(os.dup(fd))
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
        fds = []
        try:
            while True:
                fds.append(os.dup(2))
        except OSError:
            pass
        try:
            reader.lease(segment)
        except OSError as error:
            assert error.errno == 24
        else:
            raise SystemExit("no error")
        for each in fds:
            os.close(each)
        assert reader.lease(segment) == b"x" * 100000
        assert writer.used == 0
    """).check()


def test_no_address_space_for_a_mapping():
    """Under RLIMIT_AS a lease raises OSError or MemoryError; with the limit lifted it succeeds (BC-64, ENOMEM)."""
    run_script("""
        import os, resource
        from engine_client.ipc.arena import ArenaReader, ArenaWriter, create_memory

        fd = create_memory("test")
        writer = ArenaWriter(fd, limit=1 << 24)
        reader = ArenaReader(os.dup(fd))
        reader.lease(writer.put(memoryview(b"warm-up")))
        segment = writer.put(memoryview(b"x" * 8000000))
        reader = ArenaReader(os.dup(fd))
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 20), unlimited[1]))
        try:
            reader.lease(segment)
        except (OSError, MemoryError):
            pass
        else:
            raise SystemExit("no error")
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        assert reader.lease(segment) == b"x" * 8000000
        assert writer.used == 0
    """).check()


# -- discard -----------------------------------------------------------------------------------------------------------


def test_a_discarded_segment_is_given_back(arena):
    """A segment whose frame is not decoded is given back unread, once; after that it cannot be leased."""
    segment = arena.writer.put(memoryview(bytes(1000)))
    arena.reader.discard(segment)
    assert arena.writer.used == 0
    arena.reader.discard(segment)
    with pytest.raises(RemoteProtocolError, match="not published"):
        arena.reader.lease(segment)


def test_discarding_what_is_not_ours_does_nothing(arena):
    """A leased segment, one of another reader, and nonsense are left alone."""
    leased, foreign = (arena.writer.put(memoryview(b"kept"), party) for party in range(2))
    view = arena.reader.lease(leased)
    for segment in (leased, foreign, leased._replace(stamp=7)):
        arena.reader.discard(segment)
    assert view == b"kept"
    assert arena.readers[1].lease(foreign) == b"kept"
    arena.reader.close()
    arena.reader.discard(leased)
    assert arena.writer.used == 4096


# -- the end -----------------------------------------------------------------------------------------------------------


def test_views_outlive_their_reader(arena):
    """After close kept views are intact and writable, and still released when dropped; new leases are refused."""
    data = os.urandom(300_000)
    view = arena.exchange(data)
    array_of_it = np.frombuffer(view, np.uint8)[1000:]
    segment = arena.writer.put(memoryview(b"late"))
    arena.reader.close()
    arena.reader.close()
    with pytest.raises(ClosedError):
        arena.reader.lease(segment)
    assert view == data
    view[2000] = 7
    assert array_of_it[1000] == 7
    arena.writer.cancel(segment)
    del view
    assert arena.writer.used > 0
    del array_of_it
    assert arena.writer.used == 0


def test_views_outlive_everything_and_memory_goes_with_them():
    """With reader, writer and descriptor closed, a view is intact; the memory is given back with it (BC-32)."""
    arena = Arena()
    data = os.urandom(300_000)
    view = arena.exchange(data)
    kept = np.frombuffer(view, np.uint8)[5:]
    del view
    arena.writer.close()
    arena.reader.close()
    assert arena.mapped()
    assert bytes(kept) == data[5:]
    del kept
    gc.collect()
    assert not arena.mapped()
    assert arena.descriptors() == 1
    os.close(arena.fd)


def test_a_reader_shows_its_state(arena):
    """A reader tells its party and whether it is closed."""
    reader = arena.readers[1]
    assert repr(reader).startswith("<ArenaReader party=1 fd=")
    reader.close()
    assert repr(reader) == "<ArenaReader party=1 closed>"


def test_an_idle_reader_maps_nothing():
    """Before the first lease nothing is mapped, and ctypes is not imported."""
    run_script("""
        import os, sys
        from engine_client.ipc.arena import ArenaReader, ArenaWriter, create_memory

        fd = create_memory("test")
        reader, writer = ArenaReader(os.dup(fd)), ArenaWriter(fd, limit=1 << 30)
        with open("/proc/self/maps") as file:
            assert "memfd" not in file.read()
        assert "ctypes" not in sys.modules
        segment = writer.put(memoryview(b"abc"))
        assert "ctypes" not in sys.modules
        assert reader.lease(segment) == b"abc"
        assert "ctypes" in sys.modules
    """).check()


@pytest.mark.parametrize("where", ["global", "cycle", "thread", "default argument"])
def test_views_may_live_until_interpreter_exit(where):
    """A view that is dropped while the interpreter ends, wherever it is kept, causes no noise (BC-32)."""
    run_script(f"""
        import os, threading, time
        from engine_client.ipc.arena import ArenaReader, ArenaWriter, create_memory

        fd = create_memory("test")
        reader, writer = ArenaReader(os.dup(fd)), ArenaWriter(fd, limit=1 << 30)
        view = reader.lease(writer.put(memoryview(b"x" * 100000)))
        allocated = writer.allocate(100000)
        where = {where!r}
        if where == "cycle":
            cycle = [view[5:], allocated[5:]]
            cycle.append(cycle)
            del view, allocated, cycle
        elif where == "thread":
            def hold(view, allocated, ready):
                ready.set()
                time.sleep(0.3)
                del view, allocated
            ready = threading.Event()
            threading.Thread(target=hold, args=(view, allocated, ready)).start()
            ready.wait()
            del view, allocated
        elif where == "default argument":
            def keep(view=view, allocated=allocated): pass
            del view, allocated
    """).check()


def test_what_could_not_be_given_back_is_given_back_with_the_next_lease(arena, monkeypatch):
    """While the table cannot be mapped, a discard waits; nothing is lost to the writer."""
    lost, segment = (arena.writer.put(memoryview(bytes(MIB))) for _ in range(2))
    reader = arena.readers[0]
    with monkeypatch.context() as patch:
        patch.setattr(arena_reader, "Table", lambda fd: _raise(MemoryError("no address space")))
        with pytest.raises(MemoryError):
            reader.lease(lost)
        reader.discard(lost)
        reader.discard(Segment(5, -1, 0))
    view = reader.lease(segment)
    one = arena.writer.used
    del view
    assert arena.writer.used == 0 < one < 2 * MIB


def _raise(error):
    raise error
