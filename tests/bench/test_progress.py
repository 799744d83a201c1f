"""How far the benchmark is: a line per workload, or a bar on a terminal."""

from __future__ import annotations

import io
import sys

from engine_client.bench.progress import Progress


def show(stream: io.StringIO, monkeypatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        for done, what in enumerate(("utility ours", "utility vllm", "death ours")):
            progress(what, done, 3)
    return stream.getvalue()


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_lines(monkeypatch):
    """Where stderr is no terminal, each workload is one line."""
    assert show(io.StringIO(), monkeypatch) == "  0/3  utility\n  2/3  death\n"


def test_bar(monkeypatch):
    """On a terminal there is a bar that names what runs, and it is removed at the end."""
    shown = show(Terminal(), monkeypatch)
    assert "utility vllm" in shown
    assert "2/3" in shown
    assert not shown.rpartition("\r")[2].strip()


def test_terminal_without_tqdm(monkeypatch):
    """Without tqdm a terminal gets the lines."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert show(Terminal(), monkeypatch) == "  0/3  utility\n  2/3  death\n"
