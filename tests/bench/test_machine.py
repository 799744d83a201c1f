"""What a benchmark ran on is told in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from engine_client.bench.machine import describe, one_line


def test_this_machine():
    """Processor, CPUs, system and Python are named."""
    found = describe()
    assert {"processor", "cpus", "system", "python"} <= set(found)
    assert platform.python_version() in one_line(found)
    assert f"{found['cpus']} CPU" in one_line(found)


def test_what_is_not_told_is_left_out(monkeypatch):
    """A system that keeps its secrets has fewer lines."""

    def refuse(*args: object, **kwargs: object):
        raise OSError("no")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(os, "getloadavg", refuse)
    found = describe()
    assert "memory" not in found
    assert "load" not in found
    assert found["processor"]


def test_caption():
    """A caption is one line."""
    assert one_line({"processor": "P", "cpus": "1", "python": "CPython 3"}) == "P · 1 CPU · CPython 3"
    assert one_line({}) == "? CPUs"
