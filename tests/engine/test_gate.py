"""The front-ends of one engine as a set."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from engine_client.engine import gate as gate_module
from engine_client.engine.front_end import FrontEnd
from engine_client.engine.gate import Gate
from engine_client.ipc import polling
from engine_client.ipc.channel import Channel
from engine_client.protocol.frames import Kind
from engine_client.protocol.wire import encode_text
from helpers.timing import eventually

LIMIT = 1 << 20


@contextmanager
def gated(
    count: int = 2, *, is_guest: bool = True, spin_us: float | None = 0.0
) -> Iterator[tuple[Gate, list[FrontEnd], list[Channel]]]:
    """Yield a gate, its front-ends, and their ends of the channels."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [Channel(left.detach(), name="engine") for left, _ in pairs]
        ours = [
            FrontEnd(index, Channel(right.detach(), name="client"), is_guest=is_guest)
            for index, (_, right) in enumerate(pairs)
        ]
        selector = stack.enter_context(selectors.DefaultSelector())
        for front_end in ours:
            stack.callback(lambda f: f.gone or f.leave(), front_end)
        for channel in theirs:
            stack.callback(channel.close)
        yield Gate(ours, selector, LIMIT, spin_us), ours, theirs


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        for module in (gate_module, gate_module.FrontEnd.__module__):
            monkeypatch.setattr(f"{getattr(module, '__name__', module)}.time.monotonic", lambda: self.now)


def fill(front_end: FrontEnd, size: int = 2 * LIMIT) -> None:
    """Have more wait for a front-end than it may."""
    front_end.send_result(1, b"x" * size)


def test_those_with_news_are_the_ones_to_read() -> None:
    """Something has come, or the end; not what was read, and not who was dropped."""
    with gated(3) as (gate, (first, second, third), theirs):
        assert gate.with_news() == []
        theirs[1].send(encode_text(Kind.ATTACH, "1"))
        theirs[2].close()
        assert gate.with_news() == [second, third]
        second.receive()
        third.receive()
        gate.drop(third)
        assert gate.with_news() == []
        theirs[0].send(encode_text(Kind.ATTACH, "1"))
        assert gate.with_news() == [first]


def test_one_that_does_not_take_anything_is_lost_after_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given a second from the moment that something waits, however long the step was in which that came."""
    with gated() as (gate, (stalled, _), _):
        clock = Clock(monkeypatch)
        stalled.flush()
        clock.now += 60  # one long step
        fill(stalled)
        stalled.flush()
        assert gate.is_blocked()
        assert not gate.is_lost(stalled)
        clock.now += 0.9
        stalled.flush()
        assert not gate.is_lost(stalled)
        clock.now += 0.2
        stalled.flush()
        assert gate.is_lost(stalled)
        gate.drop(stalled)
        assert not gate.is_blocked()
        assert "client 0 has taken nothing for a second" in caplog.text


def test_one_that_reads_is_not_lost_however_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is that it takes something, also of what is sent between two looks."""
    with gated() as (gate, (slow, _), (reader, _)):
        clock = Clock(monkeypatch)
        for _ in range(10):
            fill(slow, 4 * LIMIT)
            slow.flush()
            clock.now += 0.9
            reader.receive()
            slow.send_failure(1, ValueError())  # writes what fits: nothing is left to do for flush
            slow.flush()
            assert not gate.is_lost(slow)


def test_what_waits_in_shared_memory_counts_where_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that keeps much of what it has read is none of the engine's business; nor does it hold up others."""
    with gated() as (gate, (front_end, _), _):
        clock = Clock(monkeypatch)
        front_end.held = lambda: 100 * LIMIT
        front_end.flush()
        clock.now += 60
        front_end.flush()
        assert not gate.is_lost(front_end)
        fill(front_end, LIMIT // 2)
        front_end.flush()
        assert not gate.is_blocked()
        assert not gate.is_lost(front_end)
        clock.now += 1.1
        front_end.flush()
        assert gate.is_lost(front_end)


def test_the_last_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it holds up nobody, a front-end may take its time."""
    with gated(1) as (gate, (only,), _):
        clock = Clock(monkeypatch)
        fill(only)
        only.flush()
        clock.now += 60
        assert gate.is_blocked()
        assert not gate.is_lost(only)


def test_a_process_that_ends_is_seen_whoever_holds_its_pipe(caplog: pytest.LogCaptureFixture) -> None:
    """The selector wakes up for the end of the process that was named, and the front-end counts as lost."""
    with gated() as (gate, (front_end, _), _), subprocess.Popen(["sleep", "600"]) as process:
        gate.attach(front_end, encode_text(Kind.ATTACH, str(process.pid)))
        gate.attach(front_end, encode_text(Kind.ATTACH, str(process.pid)))
        gate.wait([0.0])
        assert not gate.is_lost(front_end)
        process.kill()
        gate.wait([30.0])
        assert gate.is_lost(front_end)
        assert gate.drop(front_end) == ([], None)
        assert "cut off" not in caplog.text
        assert repr(gate) == "<Gate connected=1 of 2>"


def test_a_process_that_has_ended_before_it_was_named_is_lost() -> None:
    """The pipe would not tell, where the launcher has a copy of its end."""
    process = subprocess.Popen(["true"])
    process.wait()
    with gated() as (gate, (front_end, _), _):
        gate.attach(front_end, encode_text(Kind.ATTACH, str(process.pid)))
        assert gate.is_lost(front_end)


@pytest.mark.parametrize("error", [AttributeError("pidfd_open"), OSError(24, "Too many open files")])
def test_without_a_pidfd_the_pipe_tells(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """On an old system, or without a descriptor, the end of the stream is what counts."""

    def refuse(pid: int) -> Any:
        raise error

    with gated() as (gate, (front_end, _), (client, _)):
        monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
        gate.attach(front_end, encode_text(Kind.ATTACH, str(os.getpid())))
        assert not gate.is_lost(front_end)
        client.close()
        front_end.receive()
        assert gate.is_lost(front_end)


def test_an_attach_that_is_none_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """What a front-end says of itself cannot end the loop."""
    with gated() as (gate, (front_end, _), _):
        gate.attach(front_end, encode_text(Kind.ATTACH, "nobody"))
        assert not gate.is_lost(front_end)
        assert "cannot be understood" in caplog.text


def test_guests_do_not_keep_an_engine() -> None:
    """Where the launcher is gone nobody is left, however many guests there are."""
    with gated() as (gate, _, _):
        assert gate.has_nobody()
    with gated(is_guest=False) as (gate, _, _):
        assert not gate.has_nobody()


def test_a_full_gate_wakes_up_to_look_again() -> None:
    """While somebody takes nothing, the wait is bounded; what can be written ends it."""
    with gated() as (gate, (front_end, _), (client, _)):
        fill(front_end)
        gate.wait([0.01])
        before = front_end.channel.backlog
        client.receive()
        eventually(lambda: not gate.wait([1.0]) or front_end.is_drained() or front_end.channel.backlog < before)


def test_an_idle_engine_polls_where_its_last_waits_were_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three of them, once, and no more after a long one; while it has work it never does."""
    with gated(1, spin_us=None) as (gate, (front_end,), (peer,)):
        selector = gate._selector  # noqa: SLF001
        timeouts: list[float | None] = []
        select = selector.select
        monkeypatch.setattr(selector, "select", lambda timeout=None: (timeouts.append(timeout), select(timeout))[1])

        def waits(*, is_idle: bool, short: float) -> list[float | None]:
            monkeypatch.setattr(polling, "_SHORT", short)
            peer.send(encode_text(Kind.ATTACH, "1"))
            timeouts.clear()
            assert gate.wait([30.0], is_idle=is_idle)
            front_end.receive()
            return list(timeouts)

        assert [waits(is_idle=True, short=20.0) for _ in range(3)] == [[30.0]] * 3
        assert waits(is_idle=False, short=0.0) == [30.0]
        assert waits(is_idle=True, short=0.0) == [0]  # as it was told by the waits before
        assert waits(is_idle=True, short=20.0) == [30.0]


def test_a_wait_that_is_polled_for_is_no_longer_than_its_limit() -> None:
    """What was polled counts."""
    with gated(1, spin_us=200_000) as (gate, _, _):
        began = time.monotonic()
        assert gate.wait([0.3], is_idle=True) == []
        assert 0.3 <= time.monotonic() - began < 0.49
