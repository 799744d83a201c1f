"""How far the benchmark is, on stderr: a bar if tqdm is installed and stderr is a terminal, else a line per workload.

Threads: the main thread.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Progress"]


class Progress:
    """Shows what runs; a context manager, whose end removes the bar."""

    def __init__(self) -> None:
        self._make = _load_tqdm() if sys.stderr.isatty() else None
        self._bar: Any = None
        self._last = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that ``what`` runs, as one of ``total`` steps of which ``done`` are done."""
        if self._make is None:
            workload = what.partition(" ")[0]
            if workload != self._last:
                self._last = workload
                print(f"{done:3}/{total}  {workload}", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = self._make(total=total, file=sys.stderr, leave=False, unit="run")
        self._bar.total = total
        self._bar.set_description(what, refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()


def _load_tqdm() -> Any:
    """Return tqdm's bar, or None if it is not installed."""
    from threading import RLock  # noqa: PLC0415  # as the next

    try:
        from tqdm import tqdm  # noqa: PLC0415  # optional, and only a terminal needs it
    except ImportError:
        return None
    tqdm.monitor_interval = 0  # no thread that watches, which would be measured too
    tqdm.set_lock(RLock())
    return tqdm
