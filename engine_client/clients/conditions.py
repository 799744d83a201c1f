"""In which state each engine of a client is, from its status page and from what the session knows.

No engine is asked and nobody is waited for, so this can be had of a client that is dead, closed or busy elsewhere.

Threads: any.
"""

from __future__ import annotations

import time
from dataclasses import replace

from engine_client.clients.card import CardRow
from engine_client.clients.link import EngineLink
from engine_client.clients.session import Session
from engine_client.ipc.processes import vitals
from engine_client.ipc.status_page import EngineStatus
from engine_client.protocol.lifecycle import State

__all__ = ["card_rows", "conditions"]


def conditions(session: Session) -> list[tuple[EngineStatus, str]]:
    """Return the status of each engine, and a sentence about it where there is one."""
    found = []
    for rank, link in sorted(session.links.items()):
        page = link.status.snapshot()
        condition, detail = _condition(session, link, page)
        tokens, rate = link.meter.total, link.meter.rate()
        found.append((replace(page, rank=rank, condition=condition, tokens=tokens, tokens_per_s=rate), detail))
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
    if limit is not None and page.busy_since and time.monotonic() - page.busy_since > limit:
        return "stalled", page.describe()
    return "sleeping" if page.is_sleeping else "paused" if page.is_paused else "ready", ""


def card_rows(session: Session) -> list[CardRow]:
    """Return what a card says of each engine, whatever state the session is in."""
    return [_card_row(session, status, detail) for status, detail in conditions(session)]


def _card_row(session: Session, status: EngineStatus, detail: str) -> CardRow:
    ending, past = session.ending, session.past.get(status.rank)
    link = session.links.get(status.rank)
    pid = 0 if link is None else link.pid  # 0: it has left meanwhile
    if status.condition == "dead":
        is_closed = ending is not None and ending.closed
        state, error = ("closed", "") if is_closed else ("dead", detail)
        return CardRow(status.rank, state, pid, error=error or ("" if past is None else past.message))
    memory, uptime = vitals(pid)
    return CardRow(
        status.rank,
        status.condition,
        pid,
        memory,
        uptime,
        status.waiting,
        status.running,
        status.tokens_per_s,
        "" if past is None else past.message,
    )
