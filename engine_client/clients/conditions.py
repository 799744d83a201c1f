"""In which state each engine of a client is, from its status page and from what the session knows.

Threads: any.
"""

from __future__ import annotations

import time
from dataclasses import replace

from engine_client.clients.link import EngineLink
from engine_client.clients.session import Session
from engine_client.ipc.status_page import EngineStatus
from engine_client.protocol.lifecycle import State

__all__ = ["conditions"]


def conditions(session: Session) -> list[tuple[EngineStatus, str]]:
    """Return the status of each engine, and a sentence about it where there is one."""
    found = []
    for rank, link in sorted(session.links.items()):
        page = link.status.snapshot()
        condition, detail = _condition(session, link, page)
        found.append((replace(page, rank=rank, condition=condition), detail))
    return found


def _condition(session: Session, link: EngineLink, page: EngineStatus) -> tuple[str, str]:
    if session.ending is not None:
        return "dead", session.ending.message
    ending = session.deaths.get(link.rank)
    if ending is not None and (link.over.done() or link.life.state > State.READY):  # else it is being started again
        return "dead", ending.message
    if link.rank in session.departing:
        return "leaving", ""
    if link.life.state < State.READY or link.rank in session.router.closed:
        return "starting", link.phase
    limit = session.options.stall_timeout
    if limit is not None and page.is_in_step and time.monotonic() - page.step_began_at > limit:
        return "stalled", page.describe()
    return "sleeping" if page.is_sleeping else "paused" if page.is_paused else "ready", ""
