"""Which engine gets a request: the one it asks for, or the one that has least to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_client.clients import router as module
from engine_client.clients.in_flight import InFlight
from engine_client.clients.router import Router
from helpers.clients import make_request


class Engines:
    """Links of which only the counts matter, and a router over them."""

    def __init__(self, *counts: tuple[int, int], start: int = 0) -> None:
        self.counts = dict(enumerate(counts))
        self.links: dict[int, Any] = {
            rank: SimpleNamespace(rank=rank, status=SimpleNamespace(counts=lambda rank=rank: self.counts[rank]))
            for rank in self.counts
        }
        self.in_flight = InFlight()
        self.router = Router(self.links, self.in_flight, start)

    def choose(self, rank: int | None = None) -> int:
        link = self.router.choose(make_request("a", data_parallel_rank=rank))
        assert link is not None
        return link.rank


def test_the_least_loaded_engine_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pages, where nothing was sent a moment ago: 4 * waiting + running; ties go round."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    engines = Engines((0, 5), (1, 2), (1, 0))
    for _ in range(3):
        now[0] += 1
        assert engines.choose() == 2
    engines.counts.update({1: (0, 4), 2: (0, 4)})
    chosen = []
    for _ in range(6):
        now[0] += 1
        chosen.append(engines.choose())
    assert sorted(set(chosen)) == [1, 2]
    assert "ranks=[0, 1, 2]" in repr(engines.router)


def test_a_burst_spreads_by_what_was_sent() -> None:
    """400 requests at once, whose engines have not looked at any: no engine has two more than another."""
    engines = Engines(*[(0, 0)] * 4)
    for number in range(400):
        rank = engines.choose()
        engines.in_flight.add(f"r{number}", rank=rank)
        counts = [engines.in_flight.count(rank) for rank in engines.links]
        assert max(counts) - min(counts) <= 2
    assert counts == [100] * 4


def test_front_ends_begin_at_different_engines() -> None:
    """The first search of each begins where it is told."""
    assert [Engines((0, 0), (0, 0), (0, 0), start=start).choose() for start in range(4)] == [0, 1, 2, 0]


def test_a_request_goes_to_the_rank_that_it_asks_for() -> None:
    """However busy that is; a rank that there is not, or that is closed, is a ValueError that names the others."""
    engines = Engines((0, 0), (9, 9))
    assert engines.choose(1) == 1
    with pytest.raises(ValueError, match=r"data_parallel_rank 2 is not one of the ranks \[0, 1\]"):
        engines.choose(2)
    with pytest.raises(ValueError, match="data_parallel_rank -1"):
        engines.choose(-1)
    engines.router.closed.add(1)
    with pytest.raises(ValueError, match=r"ranks \[0\]"):
        engines.choose(1)
    assert "closed=[1]" in repr(engines.router)


def test_closed_engines_get_nothing() -> None:
    """One that is left gets all; where none is left, None says so; an engine that comes back takes part again."""
    engines = Engines((0, 0), (9, 9))
    engines.router.closed.add(0)
    assert [engines.choose() for _ in range(3)] == [1, 1, 1]
    assert [link.rank for link in engines.router.open_links()] == [1]
    engines.router.closed.add(1)
    assert engines.router.choose(make_request("a")) is None
    engines.router.closed.clear()
    engines.links[2] = SimpleNamespace(rank=2, status=SimpleNamespace(counts=lambda: (0, 0)))
    engines.counts[0] = (9, 9)
    assert engines.choose() == 2


def test_calls_go_to_all_open_engines_or_to_those_named() -> None:
    """Named ones come in the order of the names."""
    engines = Engines((0, 0), (0, 0), (0, 0))
    engines.router.closed.add(1)
    assert [link.rank for link in engines.router.links_of(None)] == [0, 2]
    assert [link.rank for link in engines.router.links_of([2, 0])] == [2, 0]
    assert engines.router.links_of([]) == []
    with pytest.raises(ValueError, match="1 is not one"):
        engines.router.links_of([0, 1])


def test_ends_that_nobody_looks_at_count_during_a_burst_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that sends now and then and takes its outputs later has its requests go where there is least to do."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    engines = Engines((0, 0), (0, 0))

    def send(number: int) -> int:
        rank = engines.choose()
        key = engines.in_flight.add(f"r{number}", rank=rank)
        if rank == 0:  # ends at once; the other one is slow
            engines.in_flight.arrived([key])
        else:
            engines.counts[1] = (0, engines.in_flight.count(1))
        return rank

    burst = [send(number) for number in range(20)]
    assert abs(burst.count(0) - burst.count(1)) <= 2
    later = []
    for number in range(20, 60):
        now[0] += 1.5
        later.append(send(number))
    assert later.count(1) <= 2
    steady = []
    for number in range(60, 160):
        now[0] += 0.15  # a burst without an end is none
        steady.append(send(number))
    assert steady.count(1) < steady.count(0) / 2
