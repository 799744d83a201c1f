"""Which pictures the results make: titles, axes and lines as plain numbers, for ``plot`` to draw.

Threads: pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from engine_client.bench.results import Results, points
from engine_client.bench.workloads import WORKLOADS

__all__ = ["Chart", "Line", "charts"]


@dataclass(frozen=True)
class Line:
    """One line: its name, whether it is the ``"ours"`` or the ``"peer"`` kind, which variant of it, and its points."""

    label: str
    side: str
    variant: int
    points: dict[float, float]


@dataclass(frozen=True)
class Chart:
    """One picture.

    Args:
        ticks: where the horizontal axis is labelled, and how; none: chosen by the drawing.
        percentiles: the horizontal axis is stretched towards 100.
    """

    title: str
    x: str
    y: str
    lines: list[Line] = field(default_factory=list)
    ticks: dict[float, str] = field(default_factory=dict)
    percentiles: bool = False


_LATENCIES: Final = ("utility", "first_token", "async_first_token")
_BATCHES: Final = (1, 64, 256, 1024)
_MIB: Final = (1, 8, 64)


def charts(results: Results) -> list[Chart]:
    """Return the pictures for which there is anything to draw."""
    found = [
        _latency(results),
        _throughput(results),
        _bandwidth(results),
        _growth(results, "batch", Chart("CPU time per token", "requests at once", "µs of CPU per token")),
        _growth(results, "payload", Chart("Latency by size of the payload", "size, bytes", "µs, median"), unit=1024),
        _growth(results, "allocated", Chart("Request built in shared memory", "size, MiB", "µs, median")),
        _growth(results, "ranks", Chart("Engines on one reader", "engines", "tokens per second"), only="tokens_per_s/"),
        _growth(results, "scheduler", Chart("Cost of the scheduler", "requests", "µs per scheduled token")),
    ]
    return [chart for chart in found if chart.lines]


def _sides(results: Results) -> list[tuple[str, str]]:
    label = results.peer["label"] if results.peer is not None else ""
    return [("ours", "engine_client"), *([("peer", label)] if label else [])]


def _latency(results: Results) -> Chart:
    lines = []
    for side, who in _sides(results):
        for variant, name in enumerate(_LATENCIES):
            figures = results.figures(name, side)
            found = {
                float(key[1:-3]): value for key, value in figures.items() if key.startswith("p") and key.endswith("_us")
            }
            if found:
                lines.append(Line(f"{who}: {name}", side, variant, found))
    ticks = {float(p): f"{p:g}" for p in (1, 50, 75, 90, 99, 99.9)}
    return Chart("Latency by percentile", "percentile", "µs (lower is better)", lines, ticks, percentiles=True)


def _throughput(results: Results) -> Chart:
    lines = []
    for side, who in _sides(results):
        found = _by(results, side, "tokens_per_s", {float(batch): f"stream_{batch}" for batch in _BATCHES})
        if found:
            lines.append(Line(who, side, 0, found))
    ticks = {float(batch): str(batch) for batch in _BATCHES}
    return Chart("Tokens per second by batch", "requests at once", "tokens per second (higher is better)", lines, ticks)


def _bandwidth(results: Results) -> Chart:
    lines = []
    for side, who in _sides(results):
        for variant, (way, text) in enumerate((("in", "to the engine"), ("both", "to it and back"))):
            found = _by(results, side, "gib_per_s", {float(mib): f"tensor_{way}_{mib}" for mib in _MIB})
            if found:
                lines.append(Line(f"{who}: {text}", side, variant, found))
    ticks = {float(mib): str(mib) for mib in _MIB}
    return Chart("Bandwidth by size of the tensor", "size, MiB", "GiB per second (higher is better)", lines, ticks)


def _by(results: Results, side: str, figure: str, workloads: dict[float, str]) -> dict[float, float]:
    found = {x: results.figures(name, side).get(figure) for x, name in workloads.items()}
    return {x: value for x, value in found.items() if value is not None}


def _growth(results: Results, workload: str, empty: Chart, *, only: str = "", unit: int = 1) -> Chart:
    lines = []
    for side, who in _sides(results):
        figures = results.figures(workload, side)
        for variant, figure in enumerate(WORKLOADS[workload].figures):
            found = {at * unit: value for at, value in points(figures, figure.name).items() if at > 0}
            if found and only in ("", figure.name) and (side, figure.name) != ("peer", "copy_us/"):
                text = _NAMES.get(figure.name, "")
                lines.append(Line(f"{who}{text and ': '}{text}", side, variant, found))
    return replace(empty, lines=lines)


_NAMES: Final = {
    "copy_us/": "plain copy, one process",
    "client_us_per_token/": "client process",
    "engine_us_per_token/": "engine process",
    "us_per_token/": "by running requests",
    "waiting_us/": "64 running, by waiting ones",
}
