"""The picture: drawn without a display, labelled, in both formats."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path

import pytest

from bench.test_charts import full_results
from engine_client.bench import plot
from engine_client.bench.results import Results

# matplotlib's own imports are deprecated by one of its dependencies now and then.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("open_fonts")]


def test_svg_says_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An SVG has titles, units, both sides, the machine, versions and the date, as text; no display is needed."""
    monkeypatch.delenv("DISPLAY", raising=False)
    path = tmp_path / "bench.svg"
    plot.draw(full_results(), str(path))
    text = path.read_text(encoding="utf-8")
    for part in ("Latency by percentile", "µs", "GiB per second", "vllm: utility", "P · 2 CPUs", "2026-01-02"):
        assert part in text, part


def test_png(tmp_path: Path):
    """A PNG is one."""
    path = tmp_path / "bench.png"
    plot.draw(full_results(), str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_four_charts_are_a_square(tmp_path: Path):
    """A last row that is not full stays empty, and four charts have none."""
    results = full_results()
    grown = ("batch", "payload", "ranks", "scheduler")
    results.workloads = {name: runs for name, runs in results.workloads.items() if name in grown}
    plot.draw(results, str(tmp_path / "four.svg"))
    assert "Engines on one reader" in (tmp_path / "four.svg").read_text(encoding="utf-8")


def test_nothing_to_draw(tmp_path: Path):
    """Results without a picture are an error, not an empty file."""
    with pytest.raises(ValueError, match="can be drawn"):
        plot.draw(Results(), str(tmp_path / "empty.svg"))
    assert not (tmp_path / "empty.svg").exists()


def test_checked_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch):
    """A name that is no picture's, or matplotlib's absence, is told at once."""
    plot.check("bench.svg")
    with pytest.raises(ValueError, match=r"--plot draws FILE\.svg or FILE\.png, not bench\.gif"):
        plot.check("bench.gif")
    load = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "matplotlib":
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RuntimeError, match=r"pip install 'engine_client\[plot\]'"):
        plot.check("bench.png")
