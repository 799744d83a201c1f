"""Which pictures results make, as plain numbers."""

from __future__ import annotations

from engine_client.bench.charts import charts
from engine_client.bench.results import Measured, Results
from engine_client.bench.workloads import WORKLOADS


def full_results() -> Results:
    """Return results in which every picture has something."""
    latency = {f"p{p}_us": 10.0 * p for p in (1, 50, 99)} | {"p99.9_us": 2000.0}
    rate = {"tokens_per_s": 1e6}
    runs: dict[str, dict[str, float]] = dict.fromkeys(("utility", "first_token", "async_first_token"), latency)
    runs |= {name: rate for name in WORKLOADS if name.startswith("stream_")}
    runs |= {name: {"gib_per_s": 2.0} for name in WORKLOADS if name.startswith("tensor_")}
    both = {name: Measured([run], [run]) for name, run in runs.items()}
    grown = {
        "batch": {"client_us_per_token/1": 9.0, "engine_us_per_token/1": 8.0, "client_us_per_token/64": 0.1},
        "payload": {f"{name}/{1 << i}": 100.0 + i for name in ("us", "copy_us") for i in range(19)},
        "allocated": {"us/1": 100.0, "us/64": 101.0},
        "ranks": {"tokens_per_s/1": 1e6, "tokens_per_s/16": 9e5, "client_us_per_token/1": 1.0},
        "scheduler": {"us_per_token/1": 5.0, "us_per_token/1024": 1.0, "waiting_us/0": 2.0, "waiting_us/100": 2.0},
    }
    alone = {name: Measured([run]) for name, run in grown.items()}
    machine = {"processor": "P", "cpus": "2"}
    return Results(
        "2026-01-02T03:04:05Z", "engine-client bench", machine, {"engine_client": "1"}, {"label": "vllm"}, both | alone
    )


def test_pictures():
    """Latency, rate and bandwidth show both sides, with units; what grows has pictures of its own."""
    found = {chart.title: chart for chart in charts(full_results())}
    assert len(found) == 8
    latency = found["Latency by percentile"]
    assert [line.label for line in latency.lines][::3] == ["engine_client: utility", "vllm: utility"]
    assert latency.lines[0].points == {1: 10, 50: 500, 99: 990, 99.9: 2000}
    assert (latency.y, latency.percentiles) == ("µs (lower is better)", True)
    rate = found["Tokens per second by batch"]
    assert [(line.label, line.side) for line in rate.lines] == [("engine_client", "ours"), ("vllm", "peer")]
    assert list(rate.lines[0].points) == [1, 64, 256, 1024]
    bandwidth = found["Bandwidth by size of the tensor"]
    assert len(bandwidth.lines) == 4
    assert all(chart.x and chart.y for chart in found.values())


def test_points_that_do_not_fit():
    """A logarithmic axis has no place for 0, and ranks are shown by rate alone."""
    found = {chart.title: chart for chart in charts(full_results())}
    assert [list(line.points) for line in found["Cost of the scheduler"].lines] == [[1, 1024], [100]]
    assert len(found["Engines on one reader"].lines) == 1


def test_copies_are_told_apart():
    """A plain copy is a line of its own, drawn once, and payloads stand at their size in bytes."""
    results = full_results()
    results.workloads["payload"].peer = results.workloads["payload"].ours
    (chart,) = [chart for chart in charts(results) if "payload" in chart.title]
    labels = [line.label for line in chart.lines]
    assert labels == ["engine_client", "engine_client: plain copy, one process", "vllm"]
    assert list(chart.lines[0].points)[::18] == [1024, 1 << 28]


def test_what_was_not_measured_is_not_drawn():
    """Results without anything to draw make no picture."""
    assert charts(Results(workloads={"death": Measured([{"ms": 1.0}])})) == []
