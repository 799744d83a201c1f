"""How an engine's life ended, as something that makes errors: one instance for every waiter.

Threads: immutable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from engine_client.clients.link import EngineLink
from engine_client.errors import ClosedError, EngineDeadError
from engine_client.ipc.exits import exit_name
from engine_client.ipc.processes import memory_hint
from engine_client.protocol.exception_fields import cut, text_of

__all__ = [
    "EXIT_TIMEOUT",
    "JOIN_TIMEOUT",
    "OVER_TIMEOUT",
    "Ending",
    "closed_ending",
    "death_of",
    "explain_exit",
    "name_and_text",
    "owner_of_fork",
]

EXIT_TIMEOUT: Final = 1.0
"""Seconds that an engine has to end after its last word or the end of its stream, before it is killed."""

JOIN_TIMEOUT: Final = 2.0
"""Seconds to wait for the reader and for a concurrent close."""

OVER_TIMEOUT: Final = EXIT_TIMEOUT + JOIN_TIMEOUT
"""Seconds in which the reader has said how an engine died that took nothing any more."""

_LONGEST_TEXT: Final = 65_536
"""Characters of an exception's text in a message; the exception itself has all of it."""


@dataclass(frozen=True)
class Ending:
    """Why nothing more will come.

    Args:
        message: what happened, to which engine, and what to do.
        closed: the user closed the client.
        in_order: the engine left in order, asked by somebody else (a supervisor's SIGTERM).
        cause: the exception behind it.
    """

    message: str
    closed: bool = False
    in_order: bool = False
    cause: BaseException | None = None
    rank: int | None = None
    pid: int | None = None
    exit_name: str | None = None
    remote_traceback: str = ""

    def error(self) -> EngineDeadError:
        """Return a new error for one waiter."""
        kind = ClosedError if self.closed else EngineDeadError
        error = kind(
            self.message,
            rank=self.rank,
            pid=self.pid,
            exit_name=self.exit_name,
            remote_traceback=self.remote_traceback,
        )
        error.__cause__ = self.cause
        return error


def closed_ending() -> Ending:
    """Return the ending of a client that its user closed."""
    return Ending("the engine client is closed", closed=True)


def death_of(link: EngineLink, exitcode: int | None, fault: BaseException | None = None) -> Ending:
    """Collect all that is known about a dead engine.

    Args:
        link: to the engine; its pipe is read to the end.
        exitcode: minus the signal number for a signal; None when unknown.
        fault: what was wrong with its stream, if that is why it is declared dead.
    """
    name = exit_name(exitcode)
    cause, phase = link.last_words or (fault, "")
    traceback = str(getattr(cause, "remote_traceback", "") or "")
    if link.farewell is not None and cause is None:
        message = f"{link.title} was shut down ({link.farewell}): start a new client to go on"
        return Ending(message, in_order=True, rank=link.rank, pid=link.pid, exit_name=name)
    parts = [_sentence(link, cause, name, phase)]
    stacks = link.read_stacks()
    if exitcode == -9 and cause is None:  # else it was us who killed what was left
        parts.append(memory_hint())
    if traceback:
        parts.append(f"Traceback in the engine:\n{traceback.rstrip()}")
    elif stacks:
        parts.append(f"Python stacks of the engine:\n{stacks.rstrip()}")
    lines = link.log_lines()
    if lines:
        parts.append("Last lines that the engine logged:\n" + "\n".join(lines))
    return Ending(
        "\n".join(parts),
        cause=cause,
        rank=link.rank,
        pid=link.pid,
        exit_name=name,
        remote_traceback=traceback or stacks,
    )


def _sentence(link: EngineLink, cause: BaseException | None, name: str, phase: str) -> str:
    if link.is_foreign and link.last_words is None and link.handle.is_alive():
        fault = name_and_text(cause) if cause else name
        return (
            f"{link.title} serves this front-end no longer, though it runs ({fault}): one that reads nothing is cut "
            "off once ClientOptions.backlog_limit bytes wait for it and others are served"
        )
    if link.is_foreign and cause is None:
        return f"{link.title} died; the process that has launched it knows how"
    return f"{link.title} died: {_reason(cause, name, phase)}"


def _reason(cause: BaseException | None, name: str, phase: str) -> str:
    if cause is None:
        return explain_exit(name)
    return f"{name_and_text(cause)}{f' while {phase}' if phase else ''} ({name})"


def explain_exit(name: str) -> str:
    """Return how a process ended, and if that is not known, why it is not."""
    return f"{name} (this process ignores SIGCHLD, or something in it reaps every child)" if name == "unknown" else name


def name_and_text(error: BaseException) -> str:
    """Return an exception in one line of a message; what is very long loses its middle."""
    text = text_of(error)
    return f"{type(error).__name__}: {cut(text, _LONGEST_TEXT)}" if text else type(error).__name__


def owner_of_fork(owner_pid: int) -> str:
    """Return the sentence for a client that is used in a forked copy of its process."""
    return (
        f"this client belongs to process {owner_pid} and cannot be used in process {os.getpid()}, which only inherited "
        "it by fork: make a client of its own there"
    )
