"""When an engine is looked at that may be busy for too long, and what it says of it."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client import EngineStalledError
from engine_client.clients.stalls import StallWatch, judge, record_stacks
from engine_client.ipc.processes import is_stopped
from engine_client.ipc.status_page import EngineStatus
from engine_client.protocol.frames import Kind
from helpers.peers import played_engine
from helpers.timing import DEADLOCK, eventually


def busy(seconds: float | None) -> Any:
    """Return a link to an engine that has been busy with one thing for so long."""
    since = 0.0 if seconds is None else time.monotonic() - seconds
    return SimpleNamespace(
        title="engine core 0", status=SimpleNamespace(snapshot=lambda: EngineStatus(busy_since=since))
    )


def test_when_to_look_again() -> None:
    """At the moment at which what it does now takes too long; for an idle engine, once in that time."""
    for seconds, expected in [(None, 10.0), (0.0, 10.0), (4.0, 6.0), (9.999, 0.02), (-1e9, 10.0), (float("nan"), 10.0)]:
        again, error = judge(busy(seconds), 10.0, 0.0)
        assert error is None
        assert again.remaining() == pytest.approx(expected, abs=0.5 if expected > 1 else 0.02)


def test_too_long() -> None:
    """The error names the engine, the limit and what it is doing."""
    _, error = judge(busy(11.0), 10.0, 0.0)
    assert isinstance(error, EngineStalledError)
    assert "engine core 0 made no progress for longer than 10 s (ClientOptions.stall_limit): it has" in str(error)
    assert "in one call for 11." in str(error)


def test_who_has_stood_still_itself_looks_again() -> None:
    """A process that was frozen may have been frozen together with its engines."""
    again, error = judge(busy(100.0), 10.0, 90.0)
    assert error is None
    assert again.remaining() == pytest.approx(10.0, abs=0.5)


def test_engines_are_watched_and_ended() -> None:
    """Only with a limit, and until they leave; each is declared dead once."""
    told: list[Any] = []

    def watching(limit: float | None) -> StallWatch:
        return StallWatch(
            limit, lambda rank, at: told.append((rank, round(at.timeout or 0))), lambda *death: told.append(death)
        )

    with played_engine(3) as peer:
        peer.be_ready()
        for limit in (None, float("inf"), 10.0):
            watching(limit).watch(peer.link)
        assert told == [(3, 10)]
        watch = watching(10.0)
        watch.look(peer.link, 0.0)
        assert told == [(3, 10)] * 2
        peer.status.busy()
        watching(1e-9).look(peer.link, 0.0)
        rank, error = told.pop()
        assert (rank, type(error)) == (3, EngineStalledError)
        peer.link.over.set_result(None)
        watch.end(peer.link, error)
        peer.link.life.received(Kind.GOODBYE)
        watching(1e-9).look(peer.link, 0.0)
        assert told == [(3, 10)] * 2
        assert "limit=10" in repr(watch)


def test_an_engine_that_cannot_be_asked_is_not_waited_for() -> None:
    """One that does not catch the signal, one that is stopped, one about which somebody else is asking."""
    with played_engine() as peer:
        record_stacks(peer.link)  # a process that would die of the question
        assert peer.link.handle.is_alive()
        assert not is_stopped(peer.link.pid)
        os.kill(peer.link.pid, signal.SIGSTOP)
        eventually(lambda: is_stopped(peer.link.pid), DEADLOCK)
        began = time.monotonic()
        record_stacks(peer.link)
        assert time.monotonic() - began < 0.4
        assert peer.link.read_stacks() == ""
