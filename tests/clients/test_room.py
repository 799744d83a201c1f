"""Who waits for room goes on when there is some, at the end, or at the deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client.clients.calls import Reply
from engine_client.clients.room import Room
from engine_client.deadline import Deadline
from helpers.interrupts import interrupt_everywhere
from helpers.timing import DEADLOCK, eventually, took_at_most


def link_with(backlog: int) -> Any:
    """Return what a room looks at of a link."""
    return SimpleNamespace(title="engine core 3", channel=SimpleNamespace(backlog=backlog), over=Reply())


def waiting(room: Room, link: Any) -> threading.Thread:
    """Return a thread that waits for room."""
    thread = threading.Thread(target=room.wait, args=(link, Deadline(DEADLOCK)))
    thread.start()
    eventually(lambda: len(room) > 0 or not thread.is_alive(), DEADLOCK)
    return thread


def test_nobody_waits_below_the_mark() -> None:
    """Up to the high-water mark a sender goes on at once; above it, it waits to its deadline, and says for whom."""
    room = Room(100, lambda: False)
    with took_at_most(1.0):
        room.wait(link_with(100), Deadline(None))
    assert not room.is_free(link_with(101))
    with pytest.raises(TimeoutError, match=r"engine core 3 reads nothing: no room within 0\.01 s"):
        room.wait(link_with(101), Deadline(0.01))
    assert len(room) == 0
    assert repr(room) == "<Room 0 waiting>"


def make_room(room: Room, link: Any, state: dict[str, bool]) -> None:
    link.channel.backlog = 0


def end_the_link(room: Room, link: Any, state: dict[str, bool]) -> None:
    link.over.set_result(None)


def end_all(room: Room, link: Any, state: dict[str, bool]) -> None:
    state["ended"] = True


@pytest.mark.parametrize("news", [make_room, end_the_link, end_all])
def test_those_who_wait_look_when_they_are_woken(news: Callable[..., None]) -> None:
    """Room, the end of the engine, and the end of the client each end the wait of everybody."""
    state = {"ended": False}
    room, link = Room(100, lambda: state["ended"]), link_with(101)
    threads = [waiting(room, link) for _ in range(5)]
    room.wake()
    assert all(thread.is_alive() for thread in threads)
    news(room, link, state)
    room.wake()
    for thread in threads:
        thread.join(DEADLOCK)
        assert not thread.is_alive()
    assert len(room) == 0


def test_whoever_waits_otherwise_is_called() -> None:
    """A waiter that joined is called at each news until it leaves."""
    room = Room(100, lambda: False)
    calls: list[None] = []

    def waiter() -> None:
        calls.append(None)

    room.join(waiter)
    room.wake()
    room.wake()
    room.leave(waiter)
    room.leave(waiter)
    room.wake()
    assert len(calls) == 2


def test_an_interrupted_wait_leaves_nobody_behind() -> None:
    """Wherever an interrupt comes, no waiter stays."""
    room, link = Room(100, lambda: False), link_with(101)

    def wait() -> None:
        with pytest.raises(TimeoutError):
            room.wait(link, Deadline(0.001))

    def check(where: str) -> None:
        assert len(room) == 0, where

    assert interrupt_everywhere(wait, check) >= 5
