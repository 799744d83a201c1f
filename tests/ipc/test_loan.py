"""A channel that is lent: each frame has one taker, whatever happens to the borrower, and whenever the loan ends."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from engine_client.ipc.channel import Channel
from engine_client.ipc.loan import Loan, can_lend
from engine_client.protocol.frames import RESTRICTED, Frame, Kind
from helpers.interrupts import act_everywhere, interrupt_everywhere
from helpers.timing import DEADLOCK, eventually, took_at_most


def lend(channel: Channel) -> Loan:
    loan = Loan(0, channel)
    loan.open()
    return loan


@contextmanager
def lent() -> Iterator[tuple[Loan, Channel, Channel]]:
    """A loan of a channel, that channel, and its other end."""
    left, right = socket.socketpair()
    ours, theirs = Channel(left.detach(), name="engine 0"), Channel(right.detach(), name="ours")
    try:
        yield lend(ours), ours, theirs
    finally:
        ours.close()
        theirs.close()


def send(channel: Channel, *headers: bytes) -> None:
    for header in headers:
        channel.send(Frame(Kind.REPLY, 0, 1, header))


def header_of(frame: Frame | None) -> bytes | None:
    return None if frame is None else bytes(frame.header)


def headers(frames: list[Any]) -> list[bytes]:
    return [bytes(frame.header) for frame in frames]


def take_one(loan: Loan, seconds: float = DEADLOCK) -> list[bytes]:
    """Read and take one frame as a caller does."""
    taken: list[Any] = []
    me = loan.borrow()
    if me is None:
        return []
    try:
        if loan.next(seconds) is not None:
            loan.take(taken)
    finally:
        loan.give_back(me)
    return headers(taken)


def test_a_frame_is_the_next_one_until_it_is_taken() -> None:
    """Read once, it can be looked at again; frames that came together are taken one by one, without reading."""
    with lent() as (loan, _, theirs):
        send(theirs, b"one", b"two")
        assert header_of(loan.next(DEADLOCK)) == header_of(loan.next(0.0)) == b"one"
        assert [take_one(loan) for _ in range(2)] == [[b"one"], [b"two"]]
        assert take_one(loan, 0.001) == []
        assert "open" in repr(loan)


def test_one_borrower_at_a_time() -> None:
    """Whoever comes second gets nothing until the first has given back; who has nothing gives nothing back."""
    with lent() as (loan, *_):
        first = loan.borrow()
        assert first is not None
        assert loan.borrow() is None
        loan.give_back([0])
        assert loan.borrow() is None
        loan.give_back(first)
        assert loan.borrow() is not None


def test_what_is_not_taken_is_the_channel_s_in_order() -> None:
    """Frames that were looked at, those behind them, and bytes that were no whole frame yet."""
    with lent() as (loan, ours, theirs):
        send(theirs, b"one", b"two", b"three", bytes(30_000), b"last")
        assert take_one(loan) == [b"one"]
        assert header_of(loan.next(0.0)) == b"two"
        loan.end()
        assert "over" in repr(loan)
        assert headers(ours.receive()) == [b"two", b"three", bytes(30_000), b"last"]
        assert ours.received > 30_000


def test_what_no_borrower_can_take_stays() -> None:
    """A frame with buffers, half a frame, and what breaks the protocol are for who receives from the channel."""
    for data in (b"ECF1", b"no frame at all, but some text that is long enough"):
        with lent() as (loan, ours, theirs):
            _write(theirs, data)
            assert loan.next(0.01) is None
            loan.end()
            assert ours.receive() == []
            assert bool(ours.fault) == (data != b"ECF1")
    with lent() as (loan, ours, theirs):
        theirs.send(Frame(Kind.REPLY, 0, 1, b"with", [memoryview(b"buffer")]))
        assert loan.next(DEADLOCK) is None
        loan.end()
        (frame,) = ours.receive()
        assert bytes(frame.buffers[0]) == b"buffer"


def test_nothing_is_read_before_it_is_open() -> None:
    """What its maker has in hand comes first; who polls meanwhile reads as soon as that is delivered."""
    with lent() as (_, ours, theirs):
        loan = Loan(0, ours)
        send(theirs, b"one")
        assert loan.next(0.01) is None
        opener = threading.Timer(0.05, loan.open)
        opener.start()
        assert take_one(loan) == [b"one"]
        opener.join()
        loan.end()
        loan.end()


def test_nothing_is_read_or_taken_after_the_end() -> None:
    """What has come stays in the pipe, and what was looked at is the channel's, once."""
    with lent() as (loan, ours, theirs):
        send(theirs, b"one")
        assert header_of(loan.next(DEADLOCK)) == b"one"
        loan.end()
        assert not loan.take([])
        assert headers(ours.receive()) == [b"one"]
        send(theirs, b"two")
        assert header_of(loan.next(0.01)) in {None, b"one"}
        assert not loan.take([])
        assert headers(ours.receive()) == [b"two"]


def test_the_end_comes_while_somebody_polls() -> None:
    """Who polls stops at once, and nobody reads any more when ``end`` returns."""
    with lent() as (loan, ours, theirs):
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(take_one(loan)))
        thread.start()
        eventually(lambda: bool(loan._borrower) and loan._is_reading(), DEADLOCK)  # noqa: SLF001
        with took_at_most(5.0):
            loan.end()
        assert not loan._is_reading()  # noqa: SLF001
        thread.join(DEADLOCK)
        send(theirs, b"one")
        assert found == [[]]
        assert headers(ours.receive()) == [b"one"]


def test_an_end_at_any_point_leaves_each_frame_one_taker() -> None:
    """Wherever a borrower stands when the loan ends, its frame is either its own or the channel's, and none is lost."""
    with lent() as (_, ours, theirs):
        loans: list[Loan] = []
        got: list[bytes] = []
        sent = 0

        def operation() -> None:
            nonlocal sent
            loans.append(lend(ours))
            send(theirs, b"%d" % sent, b"%d" % (sent + 1))
            sent += 2
            got.extend(take_one(loans[-1], 0.5))
            loans[-1].end()
            got.extend(headers(ours.receive()))
            assert got == [b"%d" % number for number in range(sent)]

        assert act_everywhere(operation, lambda: loans and loans[-1].end()) > 20


@pytest.mark.parametrize("gap", [0, 1, 2, 3])
def test_an_interrupt_at_any_point_loses_no_frame(gap: int) -> None:
    """A borrower that is interrupted, twice even, has its frame or has left it; the loan can always be ended."""
    with lent() as (_, ours, theirs):
        loans: list[Loan] = []
        taken: list[Any] = []
        sent = 0

        def prepare() -> None:
            nonlocal sent
            loans.append(lend(ours))
            send(theirs, b"%d" % sent, b"%d" % (sent + 1))
            sent += 2

        def operation() -> None:
            loan = loans[-1]
            me = loan.borrow()
            assert me is not None
            try:
                if loan.next(0.5) is not None:
                    loan.take(taken)
            finally:
                loan.give_back(me)

        def check(where: str) -> None:
            del where
            loans[-1].end()
            got = headers(taken) + headers(ours.receive())
            taken.clear()
            assert got == [b"%d" % (sent - 2), b"%d" % (sent - 1)]

        assert interrupt_everywhere(operation, check, prepare, gap) > 10


def test_a_channel_that_has_ended_or_is_closed_says_nothing() -> None:
    """The borrower gets no frame and no error; whoever receives next sees the end."""
    with lent() as (loan, ours, theirs):
        send(theirs, b"last")
        theirs.close()
        assert take_one(loan) == [b"last"]
        assert loan.next(0.01) is None
        loan.end()
        assert ours.receive() == []
        assert ours.ended
        assert not ours.can_be_lent()
    with lent() as (loan, ours, _):
        ours.close()
        assert loan.next(0.01) is None


def test_a_handler_s_own_error_comes_out() -> None:
    """Many a handler of SIGALRM raises TimeoutError, which is an OSError: it is not taken for the channel's."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("alarm")

    old = signal.signal(signal.SIGALRM, ring)
    try:
        with lent() as (loan, ours, theirs):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(TimeoutError, match="alarm"):
                loan.next(DEADLOCK)
            send(theirs, b"one")
            assert take_one(loan) == [b"one"]
            assert ours.received == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_what_an_untrusted_peer_sends_is_marked() -> None:
    """As ``receive`` marks it, so that it is decoded by the decoder that trusts nobody."""
    with lent() as (loan, ours, theirs):
        ours.is_restricted = True
        send(theirs, b"one")
        frame = loan.next(DEADLOCK)
        assert frame is not None
        assert frame.flags & RESTRICTED
        taken: list[Any] = []
        assert loan.take(taken)
        assert taken[0].flags & RESTRICTED
        send(theirs, b"two")
        assert loan.next(DEADLOCK) is not None
        loan.end()
        (left,) = ours.receive()
        assert left.flags & RESTRICTED


def test_a_loan_that_nobody_uses_is_idle() -> None:
    """From one look to the next nothing was read."""
    with lent() as (loan, _, theirs):
        assert loan.is_idle()
        send(theirs, b"one")
        assert take_one(loan) == [b"one"]
        assert [loan.is_idle(), loan.is_idle()] == [False, True]


def test_only_an_interpreter_with_its_lock_lends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it two threads may be inside of the same lines at once."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not can_lend()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert can_lend()


def test_a_channel_with_a_backlog_or_in_mid_frame_is_not_lent() -> None:
    """What waits to be written needs the reader, and a borrower must begin with a frame."""
    with lent() as (_, ours, theirs):
        assert ours.can_be_lent()
        _write(theirs, b"ECF1")
        eventually(lambda: ours.receive() == [] and not ours.can_be_lent(), DEADLOCK)
    with lent() as (_, ours, _):
        ours.send(Frame(Kind.REPLY, 0, 1, bytes(4 << 20)))
        assert not ours.can_be_lent()


def _write(channel: Channel, data: bytes) -> None:
    channel._socket.send(data)  # noqa: SLF001
