"""The table: figures, ratios, what it ran on, and what to distrust."""

from __future__ import annotations

from engine_client.bench.results import Measured, Results
from engine_client.bench.table import render, warnings

MACHINE = {"processor": "P", "cpus": "2", "load": "0.10"}


def results(peer: dict[str, str] | None = None, **workloads: Measured) -> Results:
    return Results("2026-01-02T03:04:05Z", "", MACHINE, {"engine_client": "1", "tensors": "numpy"}, peer, workloads)


def test_with_a_peer():
    """A line for each figure has both sides and the ratio; machine, date and versions stand above."""
    measured = Measured([{"p50_us": 12.34, "p99_us": 1234.5}], [{"p50_us": 24.68}])
    shown = render(results({"label": "vllm", "vllm": "0.25.1"}, utility=measured)).splitlines()
    assert shown[0] == "P · 2 CPUs"
    assert shown[1] == "2026-01-02T03:04:05Z · load before: 0.10"
    assert shown[2:4] == ["ours: engine_client 1, tensors numpy", "vllm: vllm 0.25.1"]
    assert shown[6:] == [
        "| workload | figure  |  ours | vllm | ours ÷ vllm |",
        "|----------|---------|------:|-----:|------------:|",
        "| utility  | p50, µs |  12.3 | 24.7 |        0.50 |",
        "| utility  | p99, µs | 1,234 |    - |           - |",
    ]


def test_alone():
    """Without a peer there are no columns for it; a series has a line for each point."""
    shown = render(results(allocated=Measured([{"us/1": 150.0, "us/64": 200.0}]))).splitlines()
    assert shown[-4:] == [
        "| workload  | figure       | ours |",
        "|-----------|--------------|-----:|",
        "| allocated | µs at 1 MiB  |  150 |",
        "| allocated | µs at 64 MiB |  200 |",
    ]


def test_which_process_is_named():
    """Figures of the same unit are told apart."""
    shown = render(results(start_stop=Measured([{"start_ms": 1.0, "stop_ms": 2.0}])))
    assert "start, ms" in shown
    assert "stop, ms" in shown


def test_unsteady_runs_are_named():
    """Where the quartile range is above 15 % of the median, there is a warning for that side alone."""
    steady, unsteady = ([{"ms": value} for value in values] for values in ([10.0] * 5, [8.0, 9.0, 10.0, 11.0, 12.0]))
    measured = Measured(steady, unsteady)
    assert warnings(results({"label": "vllm"}, death=measured)) == [
        "warning: death ms of vllm is unsteady: quartile range 20% of the median"
    ]
    assert "warning: death" in render(results({"label": "vllm"}, death=measured))
    assert warnings(results(death=Measured(steady, []), unknown=Measured(unsteady))) == []


def test_failures_and_remarks():
    """What cannot be told by numbers follows: remarks of a side, failures once each."""
    runs = Measured([{}, {}], [{"ms": None, "note": "had not returned"}], ["ours: it broke", "ours: it broke"])
    shown = render(results({"label": "zmq"}, death=runs)).splitlines()
    assert shown[-2:] == ["note: death, zmq: had not returned", "failed: death: ours: it broke"]


def test_unknown_workloads_are_left_out():
    """A workload of another version's file is not shown."""
    assert "strange" not in render(results(strange=Measured([{"x": 1.0}]), death=Measured([{"ms": 1.0}])))
