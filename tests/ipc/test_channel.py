"""Channels over real socket pairs."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_client.errors import RemoteProtocolError
from engine_client.ipc.arena import ArenaReader, ArenaWriter, create_memory
from engine_client.ipc.channel import Channel
from engine_client.protocol.frames import Frame, Kind, Segment
from helpers.procs import run_script


@contextmanager
def pair(*, memory: bool = False) -> Iterator[tuple[Channel, Channel]]:
    """Two ends, with shared memory from the first to the second if asked for."""
    left, right = socket.socketpair()
    writer = reader = None
    if memory:
        fd = create_memory("test")
        writer = ArenaWriter(os.dup(fd), limit=1 << 30)
        reader = ArenaReader(fd)
    first = Channel(left.detach(), name="right", writer=writer, threshold=65536)
    second = Channel(right.detach(), name="left", reader=reader)
    try:
        yield first, second
    finally:
        first.close()
        second.close()
        if writer is not None and reader is not None:
            writer.close()
            reader.close()


def frame(header: bytes, *buffers: bytes, ref: int = 1) -> Frame:
    return Frame(Kind.UTILITY, 0, ref, header, [memoryview(buffer) for buffer in buffers])


def pump(sender: Channel, receiver: Channel) -> list[Frame]:
    """Flush and receive until nothing moves any more."""
    frames: list[Frame] = []
    while True:
        done = sender.flush()
        before = receiver.received
        frames += receiver.receive()
        if done and receiver.received == before:
            return frames


def test_a_channel_hangs_up_whoever_has_copies_of_its_end() -> None:
    """The other side reads what was sent and then the end, although the descriptor is still open elsewhere."""
    with pair() as (left, right):
        copy = os.dup(left.fileno())
        left.send(frame(b"last"))
        left.hang_up()
        left.hang_up()
        assert [f.header for f in right.receive()] == [b"last"]
        assert right.receive() == []
        assert right.hung_up
        with pytest.raises(BrokenPipeError):
            right.send(frame(b"late"))
        left.close()
        left.hang_up()
        os.close(copy)


def test_frames_arrive_in_order() -> None:
    """What one end sends, the other receives, whole and in order."""
    with pair() as (left, right):
        for index in range(50):
            left.send(frame(b"h%d" % index, b"b" * index, ref=index))
        received = pump(left, right)
        assert [bytes(f.header) for f in received] == [b"h%d" % index for index in range(50)]
        assert [f.ref for f in received] == list(range(50))
        assert [len(f.buffers[0]) for f in received] == list(range(50))


def test_a_frame_bigger_than_the_pipe_waits_in_the_backlog() -> None:
    """What does not fit is kept, counted, and sent by ``flush``; the sender's memory is free at once."""
    with pair() as (left, right):
        data = bytearray(os.urandom(3 << 20))
        copy = bytes(data)
        assert not left.send(frame(b"big", data))
        assert left.waiting
        assert 0 < left.backlog < len(data) + 100
        data[:] = bytes(len(data))
        assert left.send(frame(b"small")) is False
        received = pump(left, right)
        assert [bytes(f.header) for f in received] == [b"big", b"small"]
        assert received[0].buffers[0] == copy
        assert left.backlog == 0


def test_a_sender_leaves_the_rest_to_others_only_if_somebody_watches() -> None:
    """Until then each says that somebody must flush; and where nothing waits any more it writes by itself."""
    with pair() as (left, right):
        assert not left.send(frame(b"big", bytes(3 << 20)))
        assert not left.send(frame(b"not seen"))  # the news may be lost on the way: an interrupt
        left.is_watched = True  # as the reader does
        assert left.send(frame(b"seen"))
        received = pump(left, right)
        assert [bytes(f.header) for f in received] == [b"big", b"not seen", b"seen"]
        assert left.send(frame(b"direct"))
        assert [bytes(f.header) for f in right.receive()] == [b"direct"]


def test_what_an_interrupt_left_counted_does_not_count() -> None:
    """On Python 3.10 it may come between the count and the frame; whoever waits for room would wait for ever."""
    with pair() as (left, right):
        left._backlog.nbytes = 1 << 40  # noqa: SLF001
        assert left.backlog == 0
        assert left.send(frame(b"next"))
        assert [bytes(f.header) for f in pump(left, right)] == [b"next"]
        assert left._backlog.nbytes == 0  # noqa: SLF001


def test_big_buffers_go_through_shared_memory() -> None:
    """A buffer over the threshold does not pass the pipe."""
    with pair(memory=True) as (left, right):
        data = os.urandom(1 << 20)
        assert left.send(frame(b"big", data, b"small"))
        (received,) = pump(left, right)
        assert right.received < 1000
        assert received.buffers[0] == data
        assert received.buffers[1] == b"small"
        assert (left.in_memory, left.in_pipe) == (1, 0)
        del received


def test_without_room_in_shared_memory_the_pipe_serves() -> None:
    """A writer that has no room falls back to the pipe, with the same bytes."""
    left_socket, right_socket = socket.socketpair()
    writer = ArenaWriter(create_memory("test"), limit=0)
    left = Channel(left_socket.detach(), name="right", writer=writer)
    right = Channel(right_socket.detach(), name="left")
    data = os.urandom(1 << 20)
    left.send(frame(b"big", data))
    (received,) = pump(left, right)
    assert received.buffers[0] == data
    assert (left.in_memory, left.in_pipe) == (0, 1)
    for end in (left, right):
        end.close()
    writer.close()


def test_the_end_of_the_stream_comes_after_its_frames() -> None:
    """Frames sent before the other end was closed are delivered, then ``ended`` is set."""
    with pair() as (left, right):
        left.send(frame(b"last"))
        left.close()
        assert [bytes(f.header) for f in right.receive()] == [b"last"]
        right.receive()
        assert right.ended
        assert right.fault is None


def test_an_end_inside_a_frame_is_a_fault() -> None:
    """A stream that ends in mid-frame breaks the channel, for sending too."""
    with pair() as (left, right):
        left.send(frame(b"big", bytes(3 << 20)))
        right.receive()
        left.close()
        while not right.ended:
            right.receive()
        assert "frame" in str(right.fault)
        with pytest.raises(BrokenPipeError):
            right.send(frame(b"x"))


def test_garbage_is_a_fault() -> None:
    """Bytes that are no frame break the channel."""
    left, right = socket.socketpair()
    channel = Channel(right.detach(), name="left")
    left.sendall(b"GARBAGE" * 20)
    assert channel.receive() == []
    assert channel.ended
    assert channel.fault is not None
    assert "broken" in repr(channel)
    left.close()
    channel.close()


def test_garbage_behind_a_frame_is_a_fault_at_once() -> None:
    """A violation that comes in the same read as a good frame is told with it, though nothing else ever comes."""
    left, right = socket.socketpair()
    sender = Channel(left.detach(), name="right")
    channel = Channel(right.detach(), name="left")
    assert sender.send(frame(b"good"))
    os.write(sender.fileno(), b"GARBAGE" * 20)
    assert [bytes(one.header) for one in channel.receive()] == [b"good"]
    assert channel.ended
    assert "GARB" in str(channel.fault)
    sender.close()
    channel.close()


def test_frames_of_all_kinds_in_one_read_come_in_order_before_a_violation() -> None:
    """Those whose buffers are in shared memory, in the pipe, or nowhere; a fault behind them loses none."""
    with pair(memory=True) as (left, right):
        data = os.urandom(100_000)
        for number, buffers in enumerate([(), (data,), (), (b"inline",), (data, b"inline"), (), (data,)]):
            assert left.send(frame(b"h%d" % number, *buffers))
        os.write(left.fileno(), b"GARBAGE" * 20)
        received = right.receive()
        assert [bytes(one.header) for one in received] == [b"h%d" % number for number in range(7)]
        assert [list(map(len, one.buffers)) for one in received] == [
            [],
            [100_000],
            [],
            [6],
            [100_000, 6],
            [],
            [100_000],
        ]
        assert received[6].buffers[0] == data
        assert "GARB" in str(right.fault)
        assert right.received > 7 * 24 + 140
        del received


class WithoutMemory:
    """A socket for whose bytes there is no memory."""

    def __init__(self, real: socket.socket) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def recv(self, _: int) -> bytes:
        raise MemoryError


def test_without_memory_to_read_into_a_channel_uses_what_it_has() -> None:
    """It is not broken, and loses nothing; where there is none for a frame either, the fault says so."""
    with pair() as (left, right):
        right._socket = WithoutMemory(right._socket)  # type: ignore[assignment]  # noqa: SLF001
        assert right.receive() == []
        left.send(frame(b"one"))
        left.send(frame(b"two", b"inline"))
        assert [bytes(one.header) for one in right.receive()] == [b"one", b"two"]
        assert (right.ended, right.fault) == (False, None)
        right._break(MemoryError())  # noqa: SLF001
        assert "memory" in str(right.fault)


def test_a_gone_peer_breaks_the_channel_for_good() -> None:
    """Sending to a closed end raises, now and later, and keeps nothing."""
    with pair() as (left, right):
        right.close()
        for _ in range(2):
            with pytest.raises(BrokenPipeError):
                left.send(frame(b"x", bytes(100_000)))
        assert left.backlog == 0
        with pytest.raises(BrokenPipeError):
            left.flush()


def test_a_broken_channel_keeps_nothing_of_whoever_met_it() -> None:
    """Whoever was sending when it broke can be collected, though the channel remembers why it is broken."""

    class Owner:
        def send(self, channel: Channel) -> None:
            with pytest.raises(BrokenPipeError):
                channel.send(frame(b"x"))

    with pair() as (left, right):
        right.close()
        owner = Owner()
        owner.send(left)
        reference = weakref.ref(owner)
        del owner
        gc.collect()
        assert reference() is None
        with pytest.raises(BrokenPipeError):
            left.send(frame(b"x"))


def test_a_closed_channel_refuses() -> None:
    """After ``close`` sending raises and the descriptor is forgotten."""
    with pair() as (left, right):
        left.close()
        left.close()
        assert left.fileno() == -1
        assert "closed" in repr(left)
        with pytest.raises(BrokenPipeError, match="closed"):
            left.send(frame(b"x"))
        assert right.receive() == []


def test_a_peer_that_leaves_with_bytes_unread_is_an_end_like_any_other() -> None:
    """ECONNRESET is the end of the stream, after what the peer had sent."""
    with pair() as (left, right):
        right.send(frame(b"mine"))
        left.send(frame(b"unread"))
        right.close()
        assert [bytes(f.header) for f in left.receive()] == [b"mine"]
        left.receive()
        assert left.ended


def test_threads_send_whole_frames() -> None:
    """Frames of many threads do not mix."""
    with pair(memory=True) as (left, right):
        total = 8 * 60
        frames: list[Frame] = []

        def send(number: int) -> None:
            for index in range(60):
                size = (index % 7) * 40_000
                left.send(frame(b"%d" % number, bytes([number]) * size))

        threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        while len(frames) < total:
            left.flush()
            for received in right.receive():
                number = int(bytes(received.header))
                assert bytes(received.buffers[0]).count(number) == len(received.buffers[0])
                frames.append(received._replace(buffers=()))
        for thread in threads:
            thread.join()


# An interrupt may fall into a finalizer, which cannot raise it: that one is printed, and counts for nothing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_the_middle_of_sending_keeps_the_stream_whole() -> None:
    """A signal handler that raises at any moment of ``send`` neither splits nor repeats bytes."""
    with pair() as (left, right):
        interrupts = 0
        received: list[Frame] = []
        stop = threading.Event()

        def read() -> None:
            before = -1
            while not stop.is_set() or right.received != before:
                before = right.received
                received.extend(right.receive())
                select.select([right.fileno()], [], [], 0.01)  # else the threads take the interpreter from each other

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        old = signal.signal(signal.SIGALRM, interrupt)
        reader = threading.Thread(target=read)
        reader.start()
        sent = index = 0
        while index < 400:
            try:
                index += 1
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + (index % 50) * 0.00001)
                left.send(frame(b"%d" % index, bytes([index % 256]) * 300_000))
                signal.setitimer(signal.ITIMER_REAL, 0)
                sent += 1
            except KeyboardInterrupt:
                interrupts += 1
        signal.signal(signal.SIGALRM, old)
        while not left.flush():
            select.select([], [left.fileno()], [], 0.1)
        stop.set()
        reader.join()
        assert right.fault is None
        assert len(received) >= sent
        assert interrupts
        for got in received:
            assert got.buffers[0] == bytes([int(bytes(got.header)) % 256]) * 300_000


def test_a_send_from_within_a_send_joins_the_backlog() -> None:
    """A signal handler that sends on a thread inside ``send`` does not deadlock, and both frames arrive whole."""
    with pair() as (left, right):
        inner = 0
        is_over = False

        def handler(*_: object) -> None:
            nonlocal inner
            inner += 1
            left.send(frame(b"inner", b"i" * 10))
            if not is_over:  # one after the other: on a slow machine they would leave no time for anything else
                signal.setitimer(signal.ITIMER_REAL, 0.0001)

        received: list[Frame] = []
        old = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0001)
        try:
            for _ in range(2000):
                left.send(frame(b"outer", b"o" * 1000))
                received += right.receive()
        finally:
            is_over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        received += pump(left, right)
        assert sum(bytes(f.header) == b"outer" for f in received) == 2000
        assert sum(bytes(f.header) == b"inner" for f in received) == inner > 0


def test_a_forked_copy_closes_without_the_lock() -> None:
    """``close_after_fork`` needs no lock."""
    with pair() as (left, _):
        fd = left.fileno()
        with left._lock:  # noqa: SLF001  # as a thread that was sending at the moment of the fork
            left.close_after_fork()
            left.close_after_fork()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_a_peer_that_is_gone_sends_no_signal():
    """Writing to a closed channel raises BrokenPipeError, and no SIGPIPE ends a host that does not ignore it."""
    run_script(
        """
        import signal, socket
        from engine_client.ipc.channel import Channel
        from engine_client.protocol.frames import Frame
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        left, right = socket.socketpair()
        channel = Channel(left.detach(), name="right")
        right.close()
        for size in 1, 100_000:  # in one part, and in two
            try:
                channel.send(Frame(6, 0, 0, bytes(size)))
            except BrokenPipeError as error:
                print("right" in str(error))
            channel._broken = None
        channel.close()
        """
    ).check()


@contextmanager
def shared() -> Iterator[tuple[Channel, Channel, ArenaWriter, ArenaReader]]:
    """Two ends with memory from the first to the second, which has not got it yet; and both sides of the memory."""
    left, right = socket.socketpair()
    fd = create_memory("test")
    writer, reader = ArenaWriter(os.dup(fd), limit=1 << 30), ArenaReader(fd)
    first = Channel(left.detach(), name="right", writer=writer, threshold=65536)
    second = Channel(right.detach(), name="left")
    try:
        yield first, second, writer, reader
    finally:
        for made in (first, second, writer, reader):
            made.close()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_send_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was placed for a frame that is not sent is free again, after a second interrupt with the next send."""
    with shared() as (left, right, writer, _):
        for name in ("_queue", "_cancel_revoked"):
            with monkeypatch.context() as patch:
                patch.setattr(left, "_queue", interrupt)
                patch.setattr(left, name, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    left.send(frame(b"lost", bytes(100_000)))
        left.send(frame(b"sent"))
        assert writer.used == 0
        assert [f.header for f in pump(left, right)] == [b"sent"]


def test_without_memory_for_the_rest_a_frame_is_refused_or_goes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first byte is written it is taken back; after that it is finished from the caller's memory."""

    def no_memory(_: object) -> None:
        raise MemoryError

    with pair() as (left, right):
        with monkeypatch.context() as patch:
            patch.setattr("engine_client.ipc.outgoing.Outgoing.owned", no_memory)
            assert not left.send(frame(b"begun", bytes(3 << 20)))
            with pytest.raises(MemoryError):
                left.send(frame(b"refused", bytes(100)))
        left.send(frame(b"later"))
        assert [f.header for f in pump(left, right)] == [b"begun", b"later"]


def test_what_starts_and_steers_an_engine_stays_in_the_pipe() -> None:
    """An INIT of any size arrives before there is shared memory; what the peer has not got fails that frame alone."""
    with shared() as (left, right, writer, reader):
        data = memoryview(bytes(100_000))
        left.send(Frame(Kind.INIT, 0, 1, b"init", [data]))
        left.send(Frame(Kind.ADD, 0, 2, b"add", [data[:10], data, data[:0]]))
        init, add = pump(left, right)
        assert init.buffers[0] == data
        assert isinstance(add.error, RemoteProtocolError)
        assert (add.ref, list(add.buffers)) == (2, [])
        right.connect_memory(writer=writer, reader=reader, threshold=1000)
        left.send(Frame(Kind.ADD, 0, 3, b"add", [data[:10], data, data[:0]]))
        (add,) = pump(left, right)
        assert [len(buffer) for buffer in add.buffers] == [10, 100_000, 0]


def test_buffers_that_cannot_be_mapped_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame of which one buffer cannot be had comes without any, and its memory is free."""
    with shared() as (left, right, writer, reader):
        right.connect_memory(writer=writer, reader=reader, threshold=1000)
        lease, seen = reader.lease, []

        def fail_at_the_second(segment: Segment) -> memoryview:
            seen.append(segment)
            if len(seen) == 2:
                raise OSError(12, "cannot map")
            return lease(segment)

        monkeypatch.setattr(reader, "lease", fail_at_the_second)
        left.send(frame(b"x", *[bytes(100_000)] * 3))
        (got,) = pump(left, right)
        assert "cannot map" in str(got.error)
        assert writer.used == 0
