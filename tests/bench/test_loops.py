"""The workloads themselves, with few repetitions, on this library's own clients: they do the work and yield figures.

How quick anything was is not looked at.
"""

from __future__ import annotations

import pytest

from engine_client.bench import loops
from engine_client.bench.ours import Ours

OURS = Ours()
RATE = {"tokens_per_s", "client_us_per_token", "engine_us_per_token"}


def positive(figures):
    return all(value > 0 for value in figures.values())


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("utility", {"times": 3}),
        ("first_token", {"times": 3, "options": {"spin_us": 10}}),
        ("async_first_token", {"times": 3}),
    ],
)
def test_latency(kind, parameters):
    """Latencies are percentiles that rise, in both colours, with options of the client."""
    figures = loops.KINDS[kind](OURS, **parameters)
    assert [f"p{p:g}_us" for p in loops.PERCENTILES] == list(figures)
    assert list(figures.values()) == sorted(figures.values())
    assert positive(figures)


@pytest.mark.parametrize("kind", ["stream", "async_stream"])
def test_streams(kind):
    """A stream yields tokens per second, and the CPU time of both processes for each token."""
    figures = loops.KINDS[kind](OURS, batch=3, tokens=4, repeats=2)
    assert set(figures) == RATE
    assert positive(figures)


def test_batches():
    """Growing batches yield the same figures at each size."""
    figures = loops.batch(OURS, batches=[1, 4], total=16, most=80)
    assert set(figures) == {f"{name}/{size}" for name in RATE for size in (1, 4)}


def test_lost_tokens_are_noticed():
    """A side that answers with too few tokens is wrong, not quick."""
    client = OURS.make_client()
    try:
        requests = [OURS.make_request("a", 3)]
        with pytest.raises(AssertionError, match="tokens were lost"):
            loops.consume(client, requests, 4)
    finally:
        client.shutdown()


def test_ingest():
    """Many short requests yield requests per second."""
    assert positive(loops.ingest(OURS, count=5, repeats=1))


@pytest.mark.parametrize("back", [False, True])
def test_tensor(back):
    """A tensor's way is timed, there or there and back, and set beside a plain copy."""
    figures = loops.tensor(OURS, nbytes=1 << 17, back=back, times=2)
    assert positive(figures)
    assert figures["gib_per_s"] == pytest.approx((2 if back else 1) * 2**17 / 2**30 / figures["ms"] * 1e3)
    assert ("of_memcpy" in figures) is not back


def test_payloads():
    """Payloads of growing size yield a time for each, and that of a plain copy."""
    figures = loops.payload(OURS, sizes=[1024, 65536], budget=1)
    assert list(figures) == ["us/1", "copy_us/1", "us/64", "copy_us/64"]


def test_warm_up_does_not_count():
    """``timed`` returns as many times as were asked for, whatever ran before."""
    calls = []
    assert len(loops.timed(lambda: calls.append(1), 4, warmup=2)) == 4
    assert len(calls) == 6


def test_quantiles():
    """Percentiles are those of the sorted durations, in microseconds."""
    figures = loops.quantiles([i / 1e6 for i in range(100, 0, -1)])
    assert figures["p50_us"] == pytest.approx(51)
    assert figures["p99.9_us"] == pytest.approx(100)


def test_ids_are_never_used_twice():
    """Request ids differ, also from one workload to the next."""
    assert len({*loops.names(3), *loops.names(3)}) == 6
