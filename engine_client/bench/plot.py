"""Draws the charts of a run as one picture, with matplotlib, without a display.

Threads: the main thread.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from engine_client.bench.charts import Chart, charts
from engine_client.bench.machine import one_line
from engine_client.bench.results import Results

__all__ = ["check", "draw"]

_COLOURS: Final = {"ours": ("#0b6e99", "#3fa7d6", "#8fd0ee"), "peer": ("#b3541e", "#e08e45", "#f2c594")}
_MARKERS: Final = ("o", "s", "^")
_GREY: Final = "#555555"
_STYLE: Final = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "engine_client",
}


def check(path: str) -> None:
    """Make sure, before anything is measured, that a picture could be drawn there.

    Raises:
        ValueError: the name does not end as a picture's.
        RuntimeError: matplotlib is not installed.
    """
    if Path(path).suffix not in (".svg", ".png"):
        raise ValueError(f"--plot draws FILE.svg or FILE.png, not {path}")
    try:
        import matplotlib  # noqa: F401, PLC0415  # optional, and for this alone
    except ImportError:
        raise RuntimeError("--plot needs matplotlib: pip install 'engine_client[plot]'") from None


def draw(results: Results, path: str) -> None:
    """Draw all charts into one file.

    Raises:
        OSError: it cannot be written.
        ValueError: there is nothing to draw.
    """
    import matplotlib  # noqa: PLC0415  # optional, and for this alone
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # as above; needs no display
    from matplotlib.figure import Figure  # noqa: PLC0415  # as above

    found = charts(results)
    if not found:
        raise ValueError("none of the workloads that ran can be drawn: run the streams, the tensors or --growth")
    columns = 2 if len(found) == 4 else min(3, len(found))
    rows = math.ceil(len(found) / columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6 * columns, 3.5 * rows + 0.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for chart, axis in zip(found, axes):  # noqa: B905  # the last row may not be full
            _draw(chart, axis)
        for axis in axes[len(found) :]:
            axis.set_axis_off()
        figure.supxlabel(_caption(results), fontsize=7, color=_GREY)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.endswith(".svg") else None)


def _draw(chart: Chart, axis: Any) -> None:
    for line in chart.lines:
        colours = _COLOURS[line.side]
        places = [_place(x) for x in line.points] if chart.percentiles else list(line.points)
        style = {"color": colours[line.variant % len(colours)], "marker": _MARKERS[line.variant % len(_MARKERS)]}
        axis.plot(places, list(line.points.values()), label=line.label, linewidth=1.6, markersize=4, **style)
    axis.set_title(chart.title)
    axis.set_xlabel(chart.x)
    axis.set_ylabel(chart.y)
    if not chart.percentiles:
        axis.set_xscale("log", base=2)
    _scale(chart, axis)
    ticks = chart.ticks or _spaced(sorted({x for line in chart.lines for x in line.points}))
    axis.set_xticks([_place(x) if chart.percentiles else x for x in ticks], list(ticks.values()))
    axis.minorticks_off()
    axis.legend(loc="upper left")


def _scale(chart: Chart, axis: Any) -> None:
    """Let the vertical axis begin at 0, or be logarithmic where values differ by more than a factor of 20."""
    from matplotlib.ticker import FuncFormatter, LogLocator  # noqa: PLC0415  # as in draw

    values = [value for line in chart.lines for value in line.points.values()]
    if min(values) > 0 and max(values) > 20 * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axis.set_ylim(0, 1.5 * max(values) or None)  # with room for the legend
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}"))


def _place(percentile: float) -> float:
    """Return where a percentile stands: equal steps for 90, 99, 99.9."""
    return -math.log10(1 - percentile / 100)


def _spaced(places: list[float]) -> dict[float, str]:
    """Return labels for some of these places, so far from each other on a logarithmic axis that they fit."""
    gap = math.log(places[-1] / places[0]) / 7
    found = [places[0]]
    for place in places[1:]:
        if math.log(place / found[-1]) >= gap:
            found.append(place)
    return {place: _short(place) for place in found}


def _short(number: float) -> str:
    for size, letter in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if number >= size and number % size == 0:
            return f"{number / size:g} {letter}"
    return f"{number:,g}"


def _caption(results: Results) -> str:
    versions = {**(results.peer or {}), **results.ours}
    told = ", ".join(f"{name} {value}" for name, value in versions.items() if name not in ("label", "tensors"))
    return f"{one_line(results.machine)}\n{told} · {results.date[:10]} · {results.command}"
