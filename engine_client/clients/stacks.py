"""The Python stacks of engines, at any time.

Invariants: I7 (the wait ends by its deadline, and by the end of the engine or the client).

Threads: any.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Final

from engine_client.clients.link import EngineLink
from engine_client.clients.session import Session
from engine_client.deadline import Deadline
from engine_client.errors import EngineStalledError
from engine_client.ipc.handle import ChildHandle
from engine_client.ipc.processes import is_stopped

__all__ = ["dump_stacks"]

_POLL: Final = 0.002
"""Seconds between looks whether the answers are there."""


def dump_stacks(session: Session, timeout: float | None) -> dict[int, str]:
    """Return the stacks of all threads of each engine of a session, by rank.

    Raises:
        EngineDeadError: an engine is dead, or the client is closed.
        EngineStalledError: an engine wrote nothing in time.
        RuntimeError: an engine cannot be asked.
    """
    deadline = Deadline(timeout)
    session.ensure_alive()
    links = [link for _, link in sorted(session.links.items()) if not link.over.done()]
    if not links:
        raise session.last_death().error()
    with ExitStack() as turns:
        for link in links:  # in the order of ranks, so that two who ask do not wait for each other
            if not link.faults.turn.acquire(timeout=deadline.capped(threading.TIMEOUT_MAX)):
                raise EngineStalledError(f"the stacks of {link.title} are being asked for by somebody else")
            turns.callback(link.faults.turn.release)
        for link in links:
            _ask(link)
        return _answers(session, links, deadline)


def _answers(session: Session, links: list[EngineLink], deadline: Deadline) -> dict[int, str]:
    """Wait for the stacks of engines that were asked."""
    found: dict[int, str] = {}
    while True:
        for link in links:
            if link.rank not in found and (text := link.faults.answer(link.pid)) is not None:
                link.faults.taken()
                found[link.rank] = text
        late = [link for link in links if link.rank not in found]
        if not late:
            return found
        session.ensure_alive()
        for link in late:
            if not link.handle.is_alive():
                session.wait_over(link)
                raise session.verdict_on([link], _late_error([link], deadline, found))
        if deadline.expired():
            raise _late_error(late, deadline, found)
        time.sleep(deadline.capped(_POLL))


def _ask(link: EngineLink) -> None:
    if not isinstance(link.handle, ChildHandle):
        raise RuntimeError(f"{link.title} was launched by another process: its client there can ask for the stacks")  # noqa: TRY004  # it is no wrong argument
    link.faults.ask(link.pid, link.handle.send_signal)


def _late_error(late: list[EngineLink], deadline: Deadline, found: dict[int, str]) -> EngineStalledError:
    """Return the error of engines that wrote nothing; what the others wrote is in it."""
    titles = ", ".join(f"{link.title}{' is stopped' if is_stopped(link.pid) else ''}" for link in late)
    text = f"no stacks within {deadline.timeout or 0:g} s: {titles}"
    return EngineStalledError("\n".join([text, *(f"rank {rank}:\n{stacks}" for rank, stacks in sorted(found.items()))]))
