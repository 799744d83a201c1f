"""In which state each engine of a client is, from its status page and from what the session knows.

Threads: any.
"""

from __future__ import annotations

import time
from dataclasses import replace

from engine_client.clients.session import Session
from engine_client.ipc.status_page import EngineStatus
from engine_client.protocol.lifecycle import State

__all__ = ["conditions"]


def conditions(session: Session) -> list[tuple[EngineStatus, str]]:
    """Return the status of each engine, and a sentence about it where there is one."""
    found = []
    for rank, link in sorted(session.links.items()):
        page = link.status.snapshot()
        condition, detail = _condition(session, rank, page)
        found.append((replace(page, rank=rank, condition=condition), detail))
    return found


def _condition(session: Session, rank: int, page: EngineStatus) -> tuple[str, str]:
    link = session.links[rank]
    if session.ending is None and link.life.state < State.READY:
        return "starting", link.phase
    ending = session.ending or session.deaths.get(rank)
    if ending is not None:
        return "dead", ending.message
    if rank in session.leaving or rank in session.router.closed:
        return "leaving", ""
    limit = session.options.stall_timeout
    if limit is not None and page.is_in_step and time.monotonic() - page.step_began_at > limit:
        return "stalled", page.describe()
    return "sleeping" if page.is_sleeping else "paused" if page.is_paused else "ready", ""
