"""What the benchmark ran on, in words.

Threads: any.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

__all__ = ["describe", "one_line"]


def describe() -> dict[str, str]:
    """Return names and values: processor, CPUs, memory, system, Python."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "processor": _match(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.processor() or platform.machine(),
        "cpus": str(cpus),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "load": _load(),
    }
    return {name: value for name, value in found.items() if value}


def one_line(machine: dict[str, str]) -> str:
    """Return what a caption needs."""
    cpus = machine.get("cpus", "?")
    parts = [machine.get("processor", ""), f"{cpus} CPU{'' if cpus == '1' else 's'}", machine.get("system", "")]
    return " · ".join(part for part in (*parts, machine.get("python", "")) if part)


def _match(pattern: str, path: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return " ".join(found[1].split()) if found else ""


def _memory() -> str:
    kib = _match(r"MemTotal:\s*(\d+) kB", "/proc/meminfo")
    return f"{int(kib) / (1 << 20):.0f} GiB" if kib else ""


def _load() -> str:
    """Return how many processes wanted to run in the last minute, before the benchmark began."""
    try:
        return f"{os.getloadavg()[0]:.2f}"
    except OSError:
        return ""
