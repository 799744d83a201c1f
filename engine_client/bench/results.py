"""What was measured: the figures of every run, the medians and ratios that follow, and their form as JSON.

::

    {"format": 1, "date": "…", "command": "…", "machine": {…}, "ours": {…}, "peer": {"label": "…", …} or null,
     "workloads": {"utility": {"ours": [{"p50_us": 41.0, …}, …], "peer": […], "errors": ["…"]}}}

The runs of both sides alternate, so the n-th of one is compared with the n-th of the other.

Threads: plain data.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["NOISY", "Measured", "Results", "median", "points", "unsteadiness"]

FORMAT: Final = 1
NOISY: Final = 0.15
"""Above this (quartile range / median), a workload's runs differ too much to rely on one of them."""

Run = dict[str, Any]


def median(values: list[float]) -> float | None:
    """Return the median, or None of nothing."""
    return statistics.median(values) if values else None


def unsteadiness(values: list[float]) -> float | None:
    """Return the quartile range as a part of the median; None if there are fewer than three values."""
    if len(values) < 3:
        return None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else None


def points(figures: Mapping[str, Any], prefix: str) -> dict[float, Any]:
    """Return the points of a series, such as ``us/``, in their order: what follows the slash, and the value."""
    found = {float(name.removeprefix(prefix)): value for name, value in figures.items() if name.startswith(prefix)}
    return dict(sorted(found.items()))


@dataclass
class Measured:
    """The runs of one workload, in their order; ``errors`` says what went wrong instead."""

    ours: list[Run] = field(default_factory=list)
    peer: list[Run] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def values(self, side: str, figure: str) -> list[float]:
        """Return a figure of every run of ``"ours"`` or ``"peer"`` that has it."""
        runs: list[Run] = getattr(self, side)
        return [run[figure] for run in runs if run.get(figure) is not None]

    def median(self, side: str, figure: str) -> float | None:
        """Return the median of a figure, or None if no run has it."""
        return median(self.values(side, figure))

    def ratio(self, figure: str) -> float | None:
        """Return the median of ours divided by the peer's, pair by pair; None if there is no pair."""
        pairs = [(mine.get(figure), theirs.get(figure)) for mine, theirs in zip(self.ours, self.peer)]  # noqa: B905  # the peer may have fewer rounds
        return median([mine / theirs for mine, theirs in pairs if mine is not None and theirs])

    def names(self) -> list[str]:
        """Return the names of all figures, in the order in which they came."""
        return list(dict.fromkeys(name for run in (*self.ours, *self.peer) for name in run))

    def note(self, side: str) -> str:
        """Return what the last run of a side has to say beside numbers, or ``""``."""
        runs: list[Run] = getattr(self, side)
        return str(runs[-1].get("note", "")) if runs else ""


@dataclass
class Results:
    """Everything of one run of the benchmark.

    Args:
        date: UTC, ISO 8601.
        command: what reproduces it.
        machine: what it ran on.
        ours: versions of this side.
        peer: label and versions of the other; None: there was none.
    """

    date: str = ""
    command: str = ""
    machine: dict[str, str] = field(default_factory=dict)
    ours: dict[str, str] = field(default_factory=dict)
    peer: dict[str, str] | None = None
    workloads: dict[str, Measured] = field(default_factory=dict)

    def figures(self, workload: str, side: str = "ours") -> dict[str, float]:
        """Return the medians of a workload's numbers; nothing for one that did not run."""
        measured = self.workloads.get(workload)
        if measured is None:
            return {}
        found = {name: measured.median(side, name) for name in measured.names() if name != "note"}
        return {name: value for name, value in found.items() if value is not None}

    def save(self, path: str | Path) -> None:
        """Write JSON.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Results:
        """Read what ``save`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is something else.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            _check_format(fields.pop("format"))
            workloads = {name: Measured(**runs) for name, runs in fields.pop("workloads").items()}
            return cls(**fields, workloads=workloads)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no result of engine-client bench --json: {error}") from error


def _check_format(number: object) -> None:
    if number != FORMAT:
        raise ValueError(f"its format is {number!r:.20}, not {FORMAT}")
