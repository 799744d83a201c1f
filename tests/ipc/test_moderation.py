"""Waits that nap where much arrives."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator

import pytest

from engine_client.ipc import moderation as module, polling
from engine_client.ipc.moderation import Moderated


class Clock:
    """A clock that goes on by so many seconds at each look; it notes who sleeps."""

    def __init__(self) -> None:
        self.pace = 0.0
        self.now = 100.0
        self.naps: list[float] = []

    def monotonic(self) -> float:
        self.now += self.pace
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return what the modules take for the time."""
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(polling, "time", made)
    return made


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    """Yield a selector with something to read."""
    read, write = os.pipe()
    os.write(write, b"x")
    with selectors.DefaultSelector() as made:
        made.register(read, selectors.EVENT_READ)
        yield made
    os.close(read)
    os.close(write)


def empty(selector: selectors.BaseSelector) -> None:
    """Take what there is to read."""
    (fd,) = selector.get_map()
    os.read(fd, 1)


def test_whoever_hardly_waits_naps(clock: Clock, selector: selectors.BaseSelector) -> None:
    """After eight such waits, before each further one, until one was longer."""
    waits = Moderated(selector)
    for _ in range(8):
        assert waits.select(None)
    assert clock.naps == []
    assert "8 short waits" in repr(waits)
    for _ in range(3):
        assert waits.select(None)
    assert clock.naps == [50e-6] * 3
    clock.pace = 1.0
    waits.select(None)
    assert len(clock.naps) == 4
    for _ in range(20):
        waits.select(None)
    assert len(clock.naps) == 4


def test_the_nap_is_longer_while_nobody_waits(clock: Clock, selector: selectors.BaseSelector) -> None:
    """What was read before is not taken yet: there is no hurry."""
    awaited = [True] * 8 + [False, True, False]
    waits = Moderated(selector, lambda: awaited.pop(0))
    for _ in range(11):
        waits.select(None)
    assert clock.naps == [500e-6, 50e-6, 500e-6]


def test_longer_waits_count_while_nobody_waits(clock: Clock, selector: selectors.BaseSelector) -> None:
    """An engine that answers each request of many by itself must not have the reader look after each."""
    clock.pace = 60e-6
    is_awaited = True
    waits = Moderated(selector, lambda: is_awaited)
    for _ in range(20):
        waits.select(None)
    assert clock.naps == []
    is_awaited = False
    for _ in range(9):
        waits.select(None)
    assert clock.naps == [500e-6]


def test_a_look_that_finds_nothing_is_no_short_wait(clock: Clock, selector: selectors.BaseSelector) -> None:
    """Whoever only looks, and finds nothing, is not in a hurry."""
    waits = Moderated(selector)
    empty(selector)
    for _ in range(20):
        assert waits.select(0) == []
    assert clock.naps == []


def test_it_polls_first_if_it_is_to(clock: Clock, selector: selectors.BaseSelector) -> None:
    """For as long as it is told, at most until the timeout; then, and only then, the thread sleeps."""
    waits = Moderated(selector)
    clock.pace = 0.001
    assert waits.select(None, spin=1.0)
    assert clock.now < 100.01
    empty(selector)
    began = clock.now
    assert waits.select(0.02, spin=0.01) == []
    assert clock.now >= began + 0.01
    assert waits.select(0.01, spin=5.0) == []
    assert clock.now < 100.2


def test_who_polls_does_not_nap(clock: Clock, selector: selectors.BaseSelector) -> None:
    """In a quick exchange each wait is ended by its beginning, at once, and then the answer is polled for."""
    waits = Moderated(selector)
    for _ in range(20):
        assert waits.select(None)
        assert waits.select(None, spin=0.01)
    assert clock.naps == []
