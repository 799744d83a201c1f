"""The reader thread: order of what it tells, deadlines, and its own end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_client.deadline import Deadline
from engine_client.ipc import polling
from engine_client.ipc.channel import Channel
from engine_client.ipc.loan import Loan
from engine_client.ipc.reader import ReaderThread
from engine_client.protocol.frames import Frame, Kind
from helpers.loans import be_patient
from helpers.timing import DEADLOCK, eventually


class Recorder:
    """Notes what the reader tells, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.fail_with: BaseException | None = None
        self.seen = threading.Event()

    def note(self, *event: Any) -> None:
        self.events.append(event)
        self.seen.set()

    def on_frames(self, rank: int, frames: list[Frame]) -> None:
        if self.fail_with is not None:
            raise self.fail_with
        self.note("frames", rank, [bytes(f.header) for f in frames])

    def on_end(self, rank: int, error: BaseException | None) -> None:
        self.note("end", rank, error and type(error).__name__)

    def on_exit(self, rank: int) -> None:
        self.note("exit", rank)

    def on_deadline(self, rank: int) -> None:
        self.note("deadline", rank)

    def on_look(self, rank: int, late: float) -> None:
        assert late >= 0
        self.note("look", rank)

    def on_drained(self, rank: int) -> None:
        self.note("drained", rank)

    def is_awaited(self) -> bool:
        return True

    def on_reader_failed(self, error: BaseException) -> None:
        self.note("failed", error)

    def wait_for(self, *event: Any) -> None:
        eventually(lambda: event in self.events, DEADLOCK)


@contextmanager
def running(
    sentinel: int | None = None, spin_us: float | None = 0.0
) -> Iterator[tuple[ReaderThread, Recorder, Channel, Channel]]:
    """A reader of one channel, and that channel's other end."""
    left, right = socket.socketpair()
    ours, theirs = Channel(left.detach(), name="theirs"), Channel(right.detach(), name="ours")
    recorder = Recorder()
    reader = ReaderThread(recorder, "test-reader", spin_us)
    reader.add(0, ours, sentinel)
    assert "not running" in repr(reader)
    reader.start()
    try:
        yield reader, recorder, ours, theirs
    finally:
        reader.stop(DEADLOCK)
        reader.stop(DEADLOCK)
        assert not reader.is_alive()
        ours.close()
        theirs.close()


def frame(header: bytes, *buffers: bytes) -> Frame:
    return Frame(Kind.REPLY, 0, 1, header, [memoryview(buffer) for buffer in buffers])


def test_frames_are_delivered_in_order() -> None:
    """What arrives is told in the order in which it was sent."""
    with running() as (reader, recorder, _, theirs):
        for index in range(20):
            theirs.send(frame(b"%d" % index))
        eventually(lambda: sum(len(e[2]) for e in recorder.events) == 20, DEADLOCK)
        assert [h for e in recorder.events for h in e[2]] == [b"%d" % index for index in range(20)]
        assert "running" in repr(reader)
        assert reader.is_alive()
        assert not reader.is_current()


def test_a_backlog_is_flushed_and_its_end_told() -> None:
    """What did not fit leaves as the other side reads, and then ``on_drained`` is called."""
    with running() as (reader, recorder, ours, theirs):
        assert not ours.send(frame(b"big", bytes(5 << 20)))
        reader.wakeup()
        got: list[Frame] = []
        eventually(lambda: got.extend(theirs.receive()) or bool(got), DEADLOCK)
        recorder.wait_for("drained", 0)
        assert len(got[0].buffers[0]) == 5 << 20


def test_a_backlog_for_a_gone_peer_ends_the_wait() -> None:
    """Those who wait for room are told when the peer is gone, too."""
    with running() as (reader, recorder, ours, theirs):
        ours.send(frame(b"big", bytes(5 << 20)))
        theirs.close()
        reader.wakeup()
        eventually(lambda: any(event[0] == "end" for event in recorder.events), DEADLOCK)


def test_the_end_of_a_stream_comes_after_its_frames() -> None:
    """Frames sent before the other side left are told before its end."""
    with running() as (_, recorder, _, theirs):
        theirs.send(frame(b"last"))
        theirs.close()
        recorder.wait_for("end", 0, None)
        assert recorder.events == [("frames", 0, [b"last"]), ("end", 0, None)]


def test_a_broken_stream_is_told_with_its_fault() -> None:
    """Garbage ends the stream with a RemoteProtocolError; the thread lives on."""
    with running() as (reader, recorder, _, theirs):
        os.write(theirs.fileno(), b"garbage" * 10)
        recorder.wait_for("end", 0, "RemoteProtocolError")
        assert reader.is_alive()


def test_a_dead_process_is_told_after_what_it_had_sent() -> None:
    """Outputs sent before a crash are delivered, then the exit; an open descriptor elsewhere does not matter."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sentinel = os.pidfd_open(process.pid)
    try:
        with running(sentinel) as (_, recorder, _, theirs):
            for _ in range(100):
                assert theirs.send(frame(b"output", bytes(500)))
            process.kill()
            recorder.wait_for("exit", 0)
            assert sum(len(event[2]) for event in recorder.events[:-1]) == 100
            assert recorder.events[-1] == ("exit", 0)
    finally:
        process.kill()
        process.communicate()
        os.close(sentinel)


def test_what_is_there_is_told_before_an_exit_that_was_seen_first() -> None:
    """A process that ends before its last frame arrives, from a descendant, is told after that frame."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sentinel = os.pidfd_open(process.pid)
    go = threading.Event()
    try:
        with running(sentinel) as (reader, recorder, _, theirs):
            reader.call(go.wait)
            process.kill()
            assert select.select([sentinel], [], [], DEADLOCK)[0]
            theirs.send(frame(b"last"))
            go.set()
            recorder.wait_for("exit", 0)
            assert recorder.events == [("frames", 0, [b"last"]), ("exit", 0)]
    finally:
        go.set()
        process.kill()
        process.communicate()
        os.close(sentinel)


def test_a_deadline_is_told_once() -> None:
    """``on_deadline`` comes when it is due, once; a removed rank has none."""
    with running() as (reader, recorder, *_):
        reader.set_deadline(0, Deadline(0.02))
        recorder.wait_for("deadline", 0)
        reader.set_deadline(1, Deadline(0.02))
        reader.set_deadline(0, Deadline(DEADLOCK))
        reader.remove(0)
        recorder.wait_for("deadline", 1)
        assert recorder.events == [("deadline", 0), ("deadline", 1)]


def test_it_is_time_to_look_at_an_engine() -> None:
    """``on_look`` comes once, at the last of the moments that were given; a removed rank has none."""
    with running() as (reader, recorder, *_):
        reader.look_at(0, Deadline(DEADLOCK))
        reader.look_at(0, Deadline(0.02))
        recorder.wait_for("look", 0)
        reader.look_at(0, Deadline(0.02))
        reader.remove(0)
        reader.look_at(1, Deadline(0.04))
        recorder.wait_for("look", 1)
        assert recorder.events == [("look", 0), ("look", 1)]


def test_a_removed_rank_is_watched_no_longer() -> None:
    """After ``remove`` nothing of the rank is told."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sentinel = os.pidfd_open(process.pid)
    try:
        with running(sentinel) as (reader, recorder, _, theirs):
            reader.remove(0)
            reader.remove(0)
            reader.set_deadline(7, Deadline(0))
            recorder.wait_for("deadline", 7)
            theirs.send(frame(b"unseen"))
            process.kill()
            process.wait()
            reader.set_deadline(8, Deadline(0))
            recorder.wait_for("deadline", 8)
            assert recorder.events == [("deadline", 7), ("deadline", 8)]
    finally:
        process.kill()
        process.communicate()
        os.close(sentinel)


@pytest.mark.parametrize("error", [ValueError("handler"), SystemExit(1)])
def test_whatever_ends_the_thread_is_told(error: BaseException) -> None:
    """An exception of the handler, SystemExit included, is reported and not printed."""
    with running() as (reader, recorder, _, theirs):
        recorder.fail_with = error
        theirs.send(frame(b"x"))
        recorder.wait_for("failed", error)
        eventually(lambda: not reader.is_alive(), DEADLOCK)


def test_a_reader_that_never_started_releases_its_descriptors() -> None:
    """``stop`` before ``start`` leaves nothing."""
    before = len(os.listdir("/proc/self/fd"))
    reader = ReaderThread(Recorder(), "never")
    reader.stop(1.0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_reader_can_stop_itself() -> None:
    """``stop`` on the reader's own thread does not wait for itself."""
    with running() as (reader, recorder, _, theirs):
        current: list[bool] = []

        def stop(rank: int, frames: list[Frame]) -> None:
            current.append(reader.is_current())
            reader.stop(DEADLOCK)

        recorder.on_frames = stop  # type: ignore[method-assign]
        theirs.send(frame(b"x"))
        eventually(lambda: not reader.is_alive(), DEADLOCK)
        assert current == [True]


def test_signals_are_left_to_the_main_thread() -> None:
    """The reader takes no signal, so one that is sent to the process interrupts what the main thread waits in."""
    with running() as (reader, recorder, _, theirs):
        theirs.send(frame(b"x"))
        eventually(lambda: bool(recorder.events), DEADLOCK)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "test-reader"]
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text(encoding="ascii")
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        assert blocked & 1 << (signal.SIGINT - 1)
        assert reader.is_alive()


def watch(reader: ReaderThread, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Return a list that gets the timeout of each of the reader's waits."""
    timeouts: list[float | None] = []
    select = reader._selector.select  # noqa: SLF001
    monkeypatch.setattr(reader._selector, "select", lambda t=None: (timeouts.append(t), select(t))[1])  # noqa: SLF001
    return timeouts


def test_a_reader_polls_while_somebody_expects_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """From ``expect`` to the next frame, or to the end of the time; before and after it sleeps."""
    with running(spin_us=DEADLOCK * 1e6) as (reader, recorder, _, theirs):
        timeouts = watch(reader, monkeypatch)
        reader.expect(is_answer=False)
        eventually(lambda: timeouts.count(0) > 100, DEADLOCK)
        theirs.send(frame(b"one"))
        recorder.wait_for("frames", 0, [b"one"])
        eventually(lambda: timeouts[-1] is None, DEADLOCK)
        polls = timeouts.count(0)
        theirs.send(frame(b"two"))
        recorder.wait_for("frames", 0, [b"two"])
        assert timeouts.count(0) == polls
    with running(spin_us=10_000) as (reader, _, _, _):
        timeouts = watch(reader, monkeypatch)
        reader.expect(is_answer=True)
        eventually(lambda: timeouts and timeouts[-1] is None, DEADLOCK)


def test_answers_that_come_quickly_are_polled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some in a row, without being told to; a stream is not, and neither is what takes long."""
    monkeypatch.setattr(polling, "_SHORT", DEADLOCK)
    with running(spin_us=None) as (reader, recorder, _, theirs):
        timeouts = watch(reader, monkeypatch)

        def exchange(*, is_answer: bool) -> int:
            before = timeouts.count(0)
            reader.expect(is_answer=is_answer)
            if reader.poll_seconds and is_answer:
                eventually(lambda: timeouts.count(0) > before, DEADLOCK)
            theirs.send(frame(b"word"))
            recorder.wait_for("frames", 0, [b"word"])
            recorder.events.clear()
            eventually(lambda: bool(timeouts) and timeouts[-1] is None, DEADLOCK)
            return timeouts.count(0) - before

        assert [exchange(is_answer=True) for _ in range(3)] == [0, 0, 0]
        assert exchange(is_answer=True) > 0
        assert exchange(is_answer=False) == 0
        monkeypatch.setattr(polling, "_SHORT", 0.0)
        assert exchange(is_answer=True) > 0  # as was decided before
        assert exchange(is_answer=True) == 0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a machine that is busy elsewhere be as quick as it has to be."""
    be_patient(monkeypatch)


def exchange_until_lent(reader: ReaderThread, recorder: Recorder, theirs: Channel) -> Loan:
    """Ask and answer in quick succession until the next answer is the caller's to read; return its loan."""
    for _ in range(20):
        loan = reader.expect(is_answer=True, can_read=True)
        if loan is not None:
            return loan
        recorder.seen.clear()
        theirs.send(frame(b"word"))
        assert recorder.seen.wait(DEADLOCK)
    raise AssertionError("the reader does not stand aside")


@pytest.mark.usefixtures("patient")
def test_in_quick_succession_callers_read_for_themselves() -> None:
    """After some exchanges the reader stands aside; what the caller has taken is not told to anybody else."""
    with running(spin_us=None) as (reader, recorder, _, theirs):
        loan = exchange_until_lent(reader, recorder, theirs)
        recorder.events.clear()
        theirs.send(frame(b"mine"))
        taken: list[Any] = []
        assert loan.next(reader.poll_seconds) is not None
        assert loan.take(taken)
        reader.has_read(time.monotonic())
        assert reader.expect(is_answer=True, can_read=True) is loan
        assert [bytes(each.header) for each in taken] == [b"mine"]
        theirs.send(frame(b"left"))
        assert loan.next(reader.poll_seconds) is not None
        reader.give_up(time.monotonic())
        recorder.wait_for("frames", 0, [b"left"])
        assert recorder.events == [("frames", 0, [b"left"])]
        assert not loan.take([])


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("what", ["another wait", "a request", "a wakeup", "its removal", "its stop"])
def test_the_reader_takes_back_what_it_has_lent(what: str) -> None:
    """As soon as anybody needs it: what was read by the borrower, and not taken, comes first."""
    with running(spin_us=None) as (reader, recorder, _, theirs):
        loan = exchange_until_lent(reader, recorder, theirs)
        recorder.events.clear()
        theirs.send(frame(b"looked at"))
        assert loan.next(reader.poll_seconds) is not None
        theirs.send(frame(b"behind"))
        act: dict[str, Callable[[], object]] = {
            "another wait": lambda: reader.expect(is_answer=False),
            "a request": lambda: reader.call(lambda: None),
            "a wakeup": reader.wakeup,
            "its removal": lambda: reader.remove(0),
            "its stop": lambda: reader.stop(DEADLOCK),
        }
        act[what]()
        eventually(lambda: reader._loan is None, DEADLOCK)  # noqa: SLF001
        assert loan.next(0.01) is None or not loan.take([])
        if "its" not in what:
            recorder.wait_for("frames", 0, [b"looked at", b"behind"])


@pytest.mark.usefixtures("patient")
def test_a_death_is_told_after_what_was_lent() -> None:
    """The exit of a process is seen while a caller polls; what the caller has left is delivered before it."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sentinel = os.pidfd_open(process.pid)
    try:
        with running(sentinel, spin_us=None) as (reader, recorder, _, theirs):
            loan = exchange_until_lent(reader, recorder, theirs)
            recorder.events.clear()
            theirs.send(frame(b"looked at"))
            assert loan.next(reader.poll_seconds) is not None
            theirs.send(frame(b"behind"))
            process.kill()
            recorder.wait_for("exit", 0)
            assert recorder.events == [("frames", 0, [b"looked at", b"behind"]), ("exit", 0)]
    finally:
        process.kill()
        process.communicate()
        os.close(sentinel)


def test_a_reader_whose_callers_fall_silent_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some milliseconds without a read, and it sleeps in its selector, without a timeout."""
    be_patient(monkeypatch, tick=0.01)
    with running(spin_us=None) as (reader, recorder, _, theirs):
        timeouts = watch(reader, monkeypatch)
        exchange_until_lent(reader, recorder, theirs)
        eventually(lambda: reader._loan is None and timeouts[-1] is None, DEADLOCK)  # noqa: SLF001
        recorder.events.clear()
        theirs.send(frame(b"later"))
        recorder.wait_for("frames", 0, [b"later"])


@pytest.mark.usefixtures("patient")
def test_a_reader_of_two_channels_lends_none() -> None:
    """A caller could only wait for one of them."""
    with running(spin_us=None) as (reader, recorder, _, theirs):
        left, right = socket.socketpair()
        other, far = Channel(left.detach(), name="other"), Channel(right.detach(), name="far")
        reader.add(1, other, None)
        with pytest.raises(AssertionError, match="does not stand aside"):
            exchange_until_lent(reader, recorder, theirs)
        reader.remove(1)
        exchange_until_lent(reader, recorder, theirs)
        other.close()
        far.close()


@pytest.mark.usefixtures("patient")
def test_a_rank_that_is_removed_when_it_would_be_lent_is_not() -> None:
    """By whoever gets the answer after which the reader stands aside: nothing of the rank is read any more."""
    with running(spin_us=None) as (reader, recorder, ours, theirs):
        tell = recorder.on_frames
        found: list[Loan | None] = []

        def remove(rank: int, frames: list[Frame]) -> None:
            found.append(reader._loan)  # noqa: SLF001
            if found[-1] is not None:
                reader.remove(rank)
            tell(rank, frames)

        recorder.on_frames = remove  # type: ignore[method-assign]
        with pytest.raises(AssertionError):  # nobody answers any more
            while True:
                recorder.seen.clear()
                assert reader.expect(is_answer=True, can_read=True) is None
                theirs.send(frame(b"word"))
                assert recorder.seen.wait(1.0)
        loan = found[-1]
        assert loan is not None
        assert loan.next(0.01) is None
        assert reader._loan is None  # noqa: SLF001
        assert reader.is_alive()
        assert [bytes(each.header) for each in ours.receive()] == [b"word"]


def test_a_thread_with_the_number_of_a_reader_that_has_ended_is_none() -> None:
    """The system gives numbers again at once; a call after the end must not be taken for one on the reader's thread."""
    with running() as (reader, *_):
        number = reader._thread.ident  # noqa: SLF001
        reader.stop(DEADLOCK)
        found: list[tuple[int, bool]] = []
        for _ in range(200):
            thread = threading.Thread(target=lambda: found.append((threading.get_ident(), reader.is_current())))
            thread.start()
            thread.join(DEADLOCK)
        assert number in [each for each, _ in found]
        assert not any(is_current for _, is_current in found)


@pytest.mark.usefixtures("patient")
def test_a_second_channel_ends_a_loan() -> None:
    """A rank that comes is watched, and so is the one that was lent."""
    with running(spin_us=None) as (reader, recorder, _, theirs):
        loan = exchange_until_lent(reader, recorder, theirs)
        left, right = socket.socketpair()
        other, far = Channel(left.detach(), name="other"), Channel(right.detach(), name="far")
        reader.add(1, other, None)
        far.send(frame(b"new"))
        recorder.wait_for("frames", 1, [b"new"])
        theirs.send(frame(b"old"))
        recorder.wait_for("frames", 0, [b"old"])
        assert not loan.take([])
        reader.remove(1)
        reader.stop(DEADLOCK)
        other.close()
        far.close()


@pytest.mark.usefixtures("patient")
def test_an_exit_in_the_round_in_which_a_loan_is_made_ends_it() -> None:
    """The last answer of a quick succession, and the exit, are seen at once: all is read to its end."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sentinel = os.pidfd_open(process.pid)
    held, go = threading.Event(), threading.Event()
    try:
        with running(sentinel, spin_us=None) as (reader, recorder, _, theirs):
            exchange_until_lent(reader, recorder, theirs)
            reader.wakeup()
            eventually(lambda: reader._loan is None, DEADLOCK)  # noqa: SLF001
            for _ in range(2):  # so that the next answer is one that a loan would follow
                recorder.seen.clear()
                assert reader.expect(is_answer=True, can_read=True) is None
                theirs.send(frame(b"word"))
                assert recorder.seen.wait(DEADLOCK)
            recorder.events.clear()
            reader.call(lambda: (held.set(), go.wait()))
            assert held.wait(DEADLOCK)
            assert reader.expect(is_answer=True, can_read=True) is None
            theirs.send(frame(b"last"))
            theirs.close()
            process.kill()
            assert select.select([sentinel], [], [], DEADLOCK)[0]
            go.set()
            recorder.wait_for("exit", 0)
            assert recorder.events == [("frames", 0, [b"last"]), ("end", 0, None), ("exit", 0)]
    finally:
        go.set()
        process.kill()
        process.communicate()
        os.close(sentinel)
