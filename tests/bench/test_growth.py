"""The workloads that only this library has, with few repetitions."""

from __future__ import annotations

from engine_client.bench import growth
from engine_client.bench.ours import Ours

OURS = Ours()


def test_allocated():
    """Requests built in shared memory yield a time at each size."""
    figures = growth.allocated(OURS, mib=[1, 2], times=2)
    assert list(figures) == ["us/1", "us/2"]
    assert min(figures.values()) > 0


def test_ranks():
    """Several engines yield rate and the client's CPU time for each number of them."""
    figures = growth.ranks(OURS, ranks=[1, 2], batch=2, tokens=3, repeats=1)
    assert list(figures) == ["tokens_per_s/1", "client_us_per_token/1", "tokens_per_s/2", "client_us_per_token/2"]
    assert min(figures.values()) > 0


def test_memory():
    """The growth of both processes is told in MB, for as many messages as were asked for."""
    figures = growth.memory(OURS, messages=2000)
    assert set(figures) == {"client_mb", "engine_mb", "messages"}
    assert figures["messages"] == 2000


def test_memory_counts_what_stays(monkeypatch):
    """Memory that a process keeps is in the figure."""
    kept = []
    exchange = growth.exchange

    def leaking(side, client, messages):
        kept.append(bytearray(b"\1") * 30_000_000)
        exchange(side, client, messages)

    monkeypatch.setattr(growth, "exchange", leaking)
    assert growth.memory(OURS, messages=200)["client_mb"] > 20


def test_scheduler():
    """The scheduler's cost per token is told by running and by waiting requests, without the executor's."""
    figures = growth.scheduler(OURS, running=[1, 4], waiting=[0, 3], total=80)
    assert list(figures) == ["us_per_token/1", "us_per_token/4", "waiting_us/0", "waiting_us/3"]
    assert min(figures.values()) > 0
