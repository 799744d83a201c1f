"""Tracebacks across the process border: as frames, through tblib, and as text.

The frames let a debugger and ``traceback.print_exception`` go on where the sender stopped; the text is there when the
frames are not, and for logs.  It reads as Python prints it, and is put together here because the standard formatter
follows chains without a limit and runs code of the exception's class on the way.

Threads: pure functions.  Pure: performs no I/O, but that ``traceback`` looks up source lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NamedTuple

from engine_client.protocol.exception_fields import attempt, cut, field, place_of, text_of, title_of

__all__ = ["Link", "empty_frames", "rebuild_trace", "trace_of", "trace_texts"]

_MOST_FRAMES: Final = 100
"""Most frames that travel; the outer and the inner half of these are kept."""
_MOST_MEMBERS: Final = 15
"""Most members of a group in the text of the group."""
_LONGEST_TEXT: Final = 64 * 1024
_CAUSE: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"


class Link(NamedTuple):
    """An exception, and the indices of those that it is linked to in a list in which they come before it."""

    error: BaseException
    cause: int | None
    context: int | None
    members: tuple[int | None, ...] | None


# -- frames ------------------------------------------------------------------------------------------------------------


def trace_of(traceback: TracebackType) -> dict[str, Any]:
    """Return the traceback as nested dicts, without its middle if it is long."""
    from tblib import Traceback  # noqa: PLC0415  # needed for failures only

    frames = [Traceback(traceback)]
    while frames[-1].tb_next is not None:
        frames.append(frames[-1].tb_next)
    for frame in frames:  # what a module calls itself may be any object
        frame.tb_frame.f_globals = {name: str(value) for name, value in frame.tb_frame.f_globals.items()}
    if len(frames) > _MOST_FRAMES:
        frames[_MOST_FRAMES // 2 - 1].tb_next = frames[-(_MOST_FRAMES // 2)]
    trace: dict[str, Any] = frames[0].to_dict()
    return trace


def rebuild_trace(trace: dict[str, Any]) -> TracebackType | None:
    """Return what ``trace_of`` described, as a traceback of this process."""
    from tblib import Traceback  # noqa: PLC0415  # needed for failures only

    traceback: TracebackType | None = Traceback.from_dict(trace).as_traceback()
    return traceback


def empty_frames(error: BaseException) -> None:
    """Have an exception, with its chain, let go of the variables of the frames that it has left behind."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        trace = link.__traceback__
        while trace is not None:
            with suppress(RuntimeError):  # still running: not left behind
                trace.tb_frame.clear()
            trace = trace.tb_next
        waiting += [link.__cause__, link.__context__]


# -- text --------------------------------------------------------------------------------------------------------------


def trace_texts(links: Sequence[Link]) -> list[str]:
    """Return the traceback of each exception as text; that of the last one with its whole chain."""
    texts: list[str] = []
    for link in links:
        lines = _lines_of(link.error)
        if link.members:
            lines += [
                _member_text(number, member, links, texts) for number, member in enumerate(link.members[:_MOST_MEMBERS])
            ]
        texts.append(cut("".join(lines), _LONGEST_TEXT))
    texts[-1] = _chain_text(len(links) - 1, links, texts)
    return texts


def _lines_of(error: BaseException) -> list[str]:
    from traceback import format_tb  # noqa: PLC0415  # needed for failures only

    lines: list[str] = []
    trace = field(error, "__traceback__")
    if trace is not None:
        lines = ["Traceback (most recent call last):\n", *attempt(format_tb, trace, otherwise=[])]
    title = title_of(*place_of(type(error)))
    text = cut(text_of(error), _LONGEST_TEXT // 2)
    lines.append(f"{title}: {text}\n" if text else f"{title}\n")
    notes = field(error, "__dict__").get("__notes__")
    if isinstance(notes, list):
        lines += [f"{attempt(str, note, otherwise='')}\n" for note in notes]
    return lines


def _chain_text(index: int, links: Sequence[Link], texts: Sequence[str]) -> str:
    parts = [texts[index]]
    while True:
        link = links[index]
        if link.cause is not None:
            parts.append(_CAUSE)
            index = link.cause
        elif link.context is not None and not field(link.error, "__suppress_context__"):
            parts.append(_CONTEXT)
            index = link.context
        else:
            return cut("".join(reversed(parts)), _LONGEST_TEXT)
        parts.append(texts[index])


def _member_text(number: int, member: int | None, links: Sequence[Link], texts: Sequence[str]) -> str:
    text = "(cut)\n" if member is None else _chain_text(member, links, texts)
    return "".join([f"  +---- member {number}\n", *[f"  | {line}" for line in text.splitlines(keepends=True)]])
