"""What the machine takes for a message, in each of the three ways."""

from __future__ import annotations

import threading

import pytest

from engine_client.bench import floor
from engine_client.bench.ours import Ours


def test_floor():
    """Each way yields a time."""
    figures = floor.floor(Ours(), times=10)
    assert set(figures) == {"p50_us", "thread_us", "spin_us"}
    assert min(figures.values()) > 0


@pytest.mark.parametrize("way", range(3))
def test_it_ends_when_it_is_interrupted(way, monkeypatch):
    """Neither the other process nor a thread is left, in whichever way it comes."""
    left = iter(range(way, -1, -1))

    def interrupted(times, there, wait):
        if not next(left):
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(floor, "_median", interrupted)
    with pytest.raises(KeyboardInterrupt):
        floor.floor(Ours(), 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "FloorReader"]
