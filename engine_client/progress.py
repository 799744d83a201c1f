"""A bar that shows how far something is: on a terminal, or under the cell of a notebook; nothing anywhere else.

::

    options = ClientOptions(on_progress=ProgressBar())
    client = EngineCoreClient.make_client(True, False, config, MyExecutor, False, options=options)

The bar is tqdm's (``pip install engine_client[progress]``), with a lock of its own and without tqdm's watching thread:
what else the program does with tqdm is not touched.

Threads: one at a time; the one that starts the client.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final, TextIO

__all__ = ["READY", "ProgressBar", "in_notebook"]

READY: Final = "ready"
"""The last phase of a start: how many engines are ready, of how many."""

_INTERVAL: Final = 0.1
"""Seconds between two looks of a bar."""
_WITH_NOTE: Final = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"


class ProgressBar:
    """Shows a phase after the other; give it to ``ClientOptions.on_progress``, or call it for work of your own.

    A context manager, whose end removes the bar; so does the end of a start.  Where there is no terminal and no
    notebook it shows nothing, so it can always be there.

    Args:
        file: what the bar is written to, if that is a terminal; None: ``sys.stderr`` as it is now.
        optional: show nothing where tqdm is not installed, instead of raising.

    Raises:
        ImportError: tqdm is not installed; says what to install.
    """

    def __init__(self, file: TextIO | None = None, *, optional: bool = False) -> None:
        self._file = sys.stderr if file is None else file
        self._bar: Any = None
        self._phase = ""
        self._shown_at = 0.0
        self._is_cleared = False
        self._is_notebook = in_notebook()
        is_seen = self._is_notebook or (self._file is not None and self._file.isatty())
        self._make: Any = _load_bar(notebook=self._is_notebook) if is_seen else None
        if self._make is None and not optional and not _is_installed():
            raise ImportError("a progress bar needs tqdm: pip install engine_client[progress]")

    def __repr__(self) -> str:
        return f"<ProgressBar {'hidden' if self._make is None else self._phase or 'idle'}>"

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def is_visible(self) -> bool:
        """Tell whether there is anybody to see it."""
        return self._make is not None

    def __call__(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Show how far a phase is; a new phase replaces the one before.

        Args:
            phase: what is being done.
            done: how much of it is done.
            total: how much there is; 0 if that is not known.
            note: shown behind the bar, in place of tqdm's own estimate.
        """
        if self._make is None:
            return
        if phase == READY and done == total:
            self.end()
            return
        if phase != self._phase:
            self.end()
            self._phase = phase
            self._bar = self._make(desc=phase, total=total or None, **self._options(note))
        bar = self._bar
        if total and bar.total != total:
            self._set_total(done, total)
        if note:
            bar.set_postfix_str(note, refresh=False)
        bar.update(done - bar.n)
        if (note or self._is_cleared) and time.monotonic() - self._shown_at >= _INTERVAL:
            self._shown_at = time.monotonic()
            self._is_cleared = False
            bar.refresh()

    def _set_total(self, done: int, total: int) -> None:
        """Have the bar go on with another total."""
        bar = self._bar
        if hasattr(bar, "container"):  # a widget, which learns it in no other way, and begins anew then
            began = bar.start_t
            bar.reset(total)
            bar.start_t, bar.n = began, done
            bar.refresh()
        bar.total = total

    def _options(self, note: str) -> dict[str, Any]:
        options: dict[str, Any] = {"leave": False}
        if note:
            options["bar_format"] = _WITH_NOTE
        if not self._is_notebook:
            # Said explicitly, since tqdm shows nothing on a terminal that does not know its size.
            columns, lines = shutil.get_terminal_size()
            options.update(file=self._file, ncols=columns, nrows=lines)
        return options

    def clear(self) -> None:
        """Make room on the terminal for other text; the next call shows the bar again."""
        if self._bar is not None and not self._is_notebook:
            self._bar.clear()
            self._is_cleared = True

    def end(self) -> None:
        """Remove the bar; the next call makes a new one."""
        self._phase = ""
        if self._bar is not None:
            self._bar.total = None  # a widget would stay, in red, if it is not full
            self._bar.close()
            self._bar = None


def in_notebook() -> bool:
    """Tell whether this is the kernel of a notebook, without loading IPython for it."""
    ipython = sys.modules.get("IPython")
    shell = None
    with suppress(AttributeError):  # half imported, or something else of that name
        shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _is_installed() -> bool:
    with suppress(ImportError, ValueError):  # what stands in for it has no spec
        return find_spec("tqdm") is not None
    return "tqdm" in sys.modules


def _load_bar(*, notebook: bool) -> Any:
    """Return tqdm's bar for this place, or None if it is not installed."""
    from threading import RLock  # noqa: PLC0415  # as the next
    from warnings import catch_warnings, simplefilter  # noqa: PLC0415  # as the next

    try:
        if notebook:
            with catch_warnings():
                simplefilter("ignore")  # without ipywidgets it is a bar of characters, which is what is wanted then
                from tqdm.auto import tqdm  # noqa: PLC0415  # optional, and only a notebook needs it
        else:
            from tqdm import tqdm  # noqa: PLC0415  # optional, and only a terminal needs it
    except ImportError:
        return None

    # A class of its own: no thread that watches over so short a bar, nor a semaphore for processes that do not know it.
    return type("Bar", (tqdm,), {"monitor_interval": 0, "_lock": RLock()})
