"""The results as text: a table for terminals and Markdown alike, with what it ran on and what to distrust.

Threads: pure functions.
"""

from __future__ import annotations

from engine_client.bench.machine import one_line
from engine_client.bench.results import NOISY, Measured, Results, unsteadiness
from engine_client.bench.workloads import WORKLOADS, figures_of

__all__ = ["render", "warnings"]

Row = tuple[str, ...]


def render(results: Results) -> str:
    """Return the table, under a line for machine, versions and date."""
    label = results.peer["label"] if results.peer is not None else ""
    header: Row = ("workload", "figure", "ours", *((label, "ours ÷ " + label) if label else ()))
    rows = [row for name, measured in results.workloads.items() for row in _rows(name, measured, bool(label))]
    lines = [*_caption(results), "", *_layout([header, *rows])]
    notes = [*warnings(results), *_notes(results)]
    return "\n".join([*lines, "", *notes] if notes else lines)


def warnings(results: Results) -> list[str]:
    """Return a line for each workload, or point of a series, whose runs differ too much."""
    found = []
    for name, measured in results.workloads.items():
        for key in _main_figures(name, measured):
            for side in ("ours", "peer"):
                noise = unsteadiness(measured.values(side, key))
                if noise is not None and noise > NOISY:
                    who = _who(results, side)
                    found.append(
                        f"warning: {name} {key} of {who} is unsteady: quartile range {noise:.0%} of the median"
                    )
    return found


def _main_figures(name: str, measured: Measured) -> list[str]:
    """Return the names of a workload's first figure: one, or the points of a series."""
    workload = WORKLOADS.get(name)
    if workload is None:  # from another version's JSON
        return []
    return [key for figure, key in figures_of(workload, measured.names()) if figure is workload.figures[0]]


def _who(results: Results, side: str) -> str:
    return "ours" if side == "ours" else (results.peer or {}).get("label", "peer")


def _caption(results: Results) -> list[str]:
    ours = ", ".join(f"{name} {version}" for name, version in results.ours.items())
    lines = [one_line(results.machine), f"{results.date} · load before: {results.machine.get('load', '?')}"]
    lines.append(f"ours: {ours}")
    if results.peer is not None:
        versions = ", ".join(f"{name} {value}" for name, value in results.peer.items() if name != "label")
        lines.append(f"{results.peer['label']}: {versions}")
    rounds = max((len(measured.ours) for measured in results.workloads.values()), default=0)
    return [*lines, f"medians of up to {rounds} runs each; ratios are medians of ratios of neighbouring runs"]


def _rows(name: str, measured: Measured, with_peer: bool) -> list[Row]:
    workload = WORKLOADS.get(name)
    if workload is None:  # from another version's JSON
        return []
    rows = []
    for figure, key in figures_of(workload, measured.names()):
        ours, theirs = measured.median("ours", key), measured.median("peer", key)
        ratio = measured.ratio(key)
        peer = (_number(theirs), "-" if ratio is None else f"{ratio:.2f}") if with_peer else ()
        rows.append((name, figure.title(key), _number(ours), *peer))
    return rows or [(name, "failed", *("-",) * (3 if with_peer else 1))]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _layout(rows: list[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Row) -> str:
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i < 2 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return [line(rows[0]), rule, *map(line, rows[1:])]


def _notes(results: Results) -> list[str]:
    """Return what cannot be told by numbers: what failed, and what a side remarked."""
    found = []
    for name, measured in results.workloads.items():
        notes = {_who(results, side): measured.note(side) for side in ("ours", "peer")}
        found += [f"note: {name}, {who}: {note}" for who, note in notes.items() if note]
        found += [f"failed: {name}: {error}" for error in dict.fromkeys(measured.errors)]
    return found
