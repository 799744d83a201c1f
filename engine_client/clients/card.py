"""The card that a notebook shows for a client: a table with a row for each engine.

Threads: stateless.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["CardRow", "render_card"]

_COLUMNS: Final = ("rank", "state", "pid", "memory", "uptime", "waiting", "running", "tokens/s", "last error")
_LONGEST_ERROR: Final = 2_000
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_UNKNOWN: Final = "?"


@dataclass(frozen=True)
class CardRow:
    """What a card says of one engine.

    Args:
        rank: its number.
        state: ``ready``, ``dead`` and so on, as in ``EngineStatus.condition``; ``closed`` when the client is.
        pid: its process.
        memory: bytes that the process has in memory; None when it is gone.
        uptime: seconds since it was started; None as above.
        waiting: requests that wait.
        running: requests that run.
        tokens_per_s: how many tokens it generates in a second, lately.
        error: how it died, or what went wrong last; empty when nothing did.
    """

    rank: int
    state: str
    pid: int
    memory: int | None = None
    uptime: float | None = None
    waiting: int = 0
    running: int = 0
    tokens_per_s: float = 0.0
    error: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the row as texts, in the order of the columns."""
        return (
            str(self.rank),
            self.state,
            str(self.pid),
            _bytes(self.memory),
            _duration(self.uptime),
            str(self.waiting),
            str(self.running),
            f"{self.tokens_per_s:,.1f}",
            self.error[:_LONGEST_ERROR],
        )


def render_card(title: str, rows: list[CardRow]) -> str:
    """Return a card as HTML; every value in it is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in _COLUMNS)
    body = "".join(f"<tr>{''.join(map(_cell, row.cells()))}</tr>" for row in rows)
    return (
        f'<div class="engine-client"><strong>{escape(title)}</strong>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    return f'<td style="text-align:left;white-space:pre-wrap">{escape(text)}</td>'


def _bytes(number: int | None) -> str:
    """Return a number of bytes in the unit that suits it."""
    if number is None:
        return _UNKNOWN
    size, unit = float(number), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{number} B"


def _duration(seconds: float | None) -> str:
    """Return a time as somebody would say it."""
    if seconds is None:
        return _UNKNOWN
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
