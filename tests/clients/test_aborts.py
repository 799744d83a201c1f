"""What is to be aborted is noted first, so that no interrupt forgets it."""

from __future__ import annotations

import pytest

from engine_client.clients.aborts import Aborts
from engine_client.clients.in_flight import InFlight
from engine_client.clients.outputs import OutputQueue
from engine_client.clients.streams import StreamTable
from helpers.interrupts import interrupt_everywhere


class Scene:
    """Requests of two ranks, one of them with a stream, and what was sent of aborts."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self.streams = StreamTable()
        self.sent: list[tuple[int, list[int]]] = []
        self.aborts = Aborts(self.in_flight, self.streams, lambda rank, keys: self.sent.append((rank, keys)))
        self.ranks = {self.in_flight.add(name, rank=rank): rank for name, rank in (("a", 0), ("b", 1), ("c", 1))}
        self.streams.add(3, OutputQueue(self.in_flight))


def test_each_rank_is_told_of_its_own() -> None:
    """Noted requests are forgotten with their streams, and each rank gets one message with its keys."""
    scene = Scene()
    assert not scene.aborts.noted
    scene.aborts.note(scene.ranks)
    assert scene.aborts.noted
    assert repr(scene.aborts) == "<Aborts 3 noted>"
    assert len(scene.in_flight) == 3
    scene.aborts.carry_out(can_send=True)
    assert sorted(scene.sent) == [(0, [1]), (1, [2, 3])]
    assert (len(scene.in_flight), len(scene.streams), len(scene.aborts.noted)) == (0, 0, 0)
    scene.aborts.carry_out(can_send=True)
    assert len(scene.sent) == 2


def test_what_cannot_be_sent_yet_stays_noted() -> None:
    """The ids are free at once; the engine hears of it when there is a way, and an error on the way loses nothing."""
    scene = Scene()
    scene.aborts.note({1: 0})
    scene.aborts.carry_out(can_send=False)
    assert scene.in_flight.keys_of(["a"]) == {}
    assert scene.sent == []
    assert scene.aborts.noted

    def fail(rank: int, keys: list[int]) -> None:
        raise OSError("no way")

    broken = Aborts(scene.in_flight, scene.streams, fail)
    broken.note({2: 1})
    with pytest.raises(OSError, match="no way"):
        broken.carry_out(can_send=True)
    assert broken
    scene.aborts.carry_out(can_send=True)
    assert scene.sent == [(0, [1])]


def test_wherever_an_interrupt_comes_nothing_is_forgotten() -> None:
    """Carried out again, every noted request has been sent at least once, and is not in flight."""
    scene = Scene()

    def prepare() -> None:
        nonlocal scene
        scene = Scene()
        scene.aborts.note(scene.ranks)

    def check(where: str) -> None:
        scene.aborts.carry_out(can_send=True)
        assert {key for _, keys in scene.sent for key in keys} == {1, 2, 3}, where
        assert (len(scene.in_flight), len(scene.streams), len(scene.aborts.noted)) == (0, 0, 0), where

    assert interrupt_everywhere(lambda: scene.aborts.carry_out(can_send=True), check, prepare) >= 10
