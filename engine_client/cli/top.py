"""``engine-client top``: the engines of this user on this machine, as they are now, without asking them.

::

    running_engines ─▶ Rates ─▶ table, again and again on a terminal, else once

What is shown is what ``client.engine_status()`` and ``client.metrics()`` tell inside of the client's own process.

Threads: the main thread.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine_client import RunningEngine

__all__ = ["DESCRIPTION", "HELP", "Rates", "add_arguments", "run", "table"]

HELP: Final = "show the engines that run, live"
DESCRIPTION: Final = (
    "Show the engines of this user on this machine, and what they do, until Ctrl-C. It needs Linux with /proc: "
    "engines are found by the status pages that they and their clients have open, which are read and never written; "
    "nothing is asked of the engines. Where stdout is no terminal the table is printed once."
)
_HEADER: Final = (
    *("RANK", "PID", "CLIENT", "STATE", "WAITING", "RUNNING", "TOKENS/S", "PROMPT/S", "STEPS/S", "KV%"),
    *("MEMORY", "UP"),
)
_LEAST_FIRST: Final = ("STEPS/S", "PROMPT/S", "CLIENT", "KV%", "RANK")
"""What a narrow terminal does without, in this order, once the headings are short."""
_SHORT: Final = {"WAITING": "WAIT", "RUNNING": "RUN", "TOKENS/S": "TOK/S"}
_HOME: Final = "\x1b[H"
_END_OF_LINE: Final = "\x1b[K"
_REST: Final = "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("pid", nargs="?", type=int, help="only the engines of this process, a client or an engine")
    add("-i", "--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default: %(default)s)")
    add("-n", "--count", type=int, metavar="N", help="look N times, then leave")


def run(arguments: argparse.Namespace) -> int:
    """Show the table until Ctrl-C, or as often as asked; return 1 if there was no engine the last time."""
    from engine_client import running_engines  # noqa: PLC0415  # not for --help

    if not 0 < arguments.interval < float("inf"):
        raise ValueError(f"--interval must be more than 0 seconds, not {arguments.interval}")
    is_live = sys.stdout.isatty()
    left = arguments.count if arguments.count is not None else 1 if not is_live else -1
    rates, number = Rates(), 0
    try:
        while left:
            engines = running_engines(arguments.pid)
            number = len(engines)
            width = shutil.get_terminal_size().columns - 1 if is_live else None
            _show(table(engines, rates, width), is_live=is_live)
            left -= 1
            if left:
                time.sleep(arguments.interval)
    except KeyboardInterrupt:
        pass  # the way to leave
    return 0 if number else 1


def _show(lines: list[str], *, is_live: bool) -> None:
    if is_live:
        columns, height = shutil.get_terminal_size()
        shown = "".join(f"{line[: columns - 1]}{_END_OF_LINE}\n" for line in lines[: height - 1])
        sys.stdout.write(f"{_HOME}{shown}{_REST}")
    else:
        sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


class Rates:
    """Remembers what engines had done at the last look."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, tuple[int, ...]]] = {}

    def of(self, engine: RunningEngine) -> tuple[float, ...] | None:
        """Return tokens made, prompt tokens taken and steps per second since the last look; None at the first."""
        counted = engine.counted
        now = engine.uptime, (counted.generation_tokens, counted.prompt_tokens, engine.status.steps)
        uptime, before = self._before.get(engine.pid, now)
        self._before[engine.pid] = now
        seconds = engine.uptime - uptime
        if seconds <= 0:  # the first look, or another process of this number
            return None
        return tuple((new - old) / seconds for new, old in zip(now[1], before, strict=True))


def table(engines: list[RunningEngine], rates: Rates, width: int | None = None) -> list[str]:
    """Return the lines of the table.

    Args:
        engines: one for each line.
        rates: where those of the last look are.
        width: the most characters for a line, for which headings are shortened, and then the least important columns
            left out; None: any number.
    """
    if not engines:
        return ["no engine of this user is running here (or none that may be looked at)"]
    lines = [_HEADER, *(_cells(engine, rates.of(engine)) for engine in engines)]
    columns = list(zip(*lines, strict=True))
    if width is not None and len(_joined(columns)[0]) > width:
        columns = [(_SHORT.get(column[0], column[0]), *column[1:]) for column in columns]
        for name in _LEAST_FIRST:
            if len(_joined(columns)[0]) > width:
                columns = [column for column in columns if column[0] != name]
    return _joined(columns)


def _joined(columns: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _cells(engine: RunningEngine, rates: tuple[float, ...] | None) -> tuple[str, ...]:
    minutes, seconds = divmod(int(engine.uptime), 60)
    status = engine.status
    return (
        str(status.rank),
        str(engine.pid),
        str(engine.client or "-"),
        status.condition,
        str(status.waiting),
        str(status.running),
        *(["-"] * 3 if rates is None else [f"{rate:,.0f}" for rate in rates]),
        f"{100 * engine.counted.kv_usage:.1f}",
        f"{engine.memory / 2**20:,.0f} MiB",
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}",
    )
