"""What an interactive session keeps of clients: IPython's caches of results, and the last traceback.

Who runs the cell ``client = …`` again expects the old engine to end.  But a client that was displayed is also in
``Out`` and ``_``, and after an error or an interrupt the frames of the last traceback hold the client whose call it
was.  So a new client, once it runs, takes older ones out of there: those that have a name of their own in the session,
which is what keeps them alive then, until it is given to the new one.

Nothing is done outside of IPython, and nothing is registered with it.

Threads: any; the caches are changed by single operations on dicts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, Final

__all__ = ["release_older"]

_CLIENTS: Final = "engine_client.clients."


def release_older(kind: type, new: object) -> None:
    """Have the session let go of clients that it merely remembers.

    Args:
        kind: what counts as a client.
        new: the one that has just been made, which stays wherever it is.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None:
        return
    with suppress(Exception):  # another IPython than those known: what it remembers stays until the end of the session
        named = [v for k, v in list(shell.user_ns.items()) if not k.startswith("_") and isinstance(v, kind)]
        for client in named:
            if client is not new:
                _forget_result(shell, client)
    for frame in _frames(getattr(sys, "last_value", None)):
        if frame.f_locals is not shell.user_ns and _is_of_older(frame, new):
            with suppress(RuntimeError):  # it runs: the error was caught somewhere below us
                frame.clear()
            frame.f_locals  # noqa: B018  # a copy of the locals, until Python 3.12: made anew, it has none


def _forget_result(shell: Any, client: object) -> None:
    """Take a client out of ``Out``, ``_``, ``__``, ``___`` and ``_1``, and so on, as ``%xdel`` does."""
    for cache in (shell.user_ns, shell.user_ns_hidden, shell.user_ns.get("_oh", {})):
        for name, value in list(cache.items()):
            if value is client and (not isinstance(name, str) or name.startswith("_")):
                cache.pop(name, None)
    for name in ("_", "__", "___"):
        if getattr(shell.displayhook, name, None) is client:
            setattr(shell.displayhook, name, None)
    last: Any = getattr(shell, "last_execution_result", None)
    if last is not None and last.result is client:
        last.result = None


def _is_of_older(frame: FrameType, new: object) -> bool:
    """Tell whether a frame holds a client, or what holds one: a stream, a caller."""
    values = list(frame.f_locals.values())
    return not any(value is new for value in values) and any(
        type(value).__module__.startswith(_CLIENTS) for value in values
    )


def _frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yield the frames of an exception's traceback, and of those behind it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback = error.__traceback__
        while traceback is not None:
            yield traceback.tb_frame
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__
