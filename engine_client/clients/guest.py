"""A session with engines that another process has launched.

Invariants: I5, I11 (what an endpoint holds is the session's as soon as it is taken).

Threads: as ``MPClient``'s construction.
"""

from __future__ import annotations

import os

from engine_client.clients.endpoint import Endpoint, RankEnd
from engine_client.clients.link import EngineLink
from engine_client.clients.session import Session
from engine_client.clients.traffic import LinkGoneError
from engine_client.config import ClientOptions
from engine_client.ipc.arena import MAX_PARTIES, ArenaReader, ArenaWriter
from engine_client.ipc.channel import Channel
from engine_client.ipc.foreign import ForeignHandle
from engine_client.ipc.status_page import StatusReader
from engine_client.protocol.framing import Kind
from engine_client.protocol.lifecycle import State
from engine_client.protocol.wire import encode_text

__all__ = ["announce", "attach"]


def attach(session: Session, endpoint: Endpoint, options: ClientOptions) -> Endpoint:
    """Take an endpoint and fill a session with links to its engines; return what was taken, for its facts.

    Raises:
        ValueError: the endpoint was used before.
        OSError: memory has run out.
    """
    taken = endpoint.take()
    try:
        session.writer = ArenaWriter(taken.arena_out, limit=options.arena_limit, parties=MAX_PARTIES)
        taken.disown(taken.arena_out)
        for end in taken.ranks:
            session.links[end.rank] = _link(taken, end, session.writer, options)
    finally:
        taken.close()
    return taken


def announce(session: Session) -> None:
    """Tell the engines which process this is, so that they see its end whoever has a copy of its pipes."""
    for link in session.links.values():
        try:
            session.send(link, encode_text(Kind.ATTACH, str(os.getpid())))
        except LinkGoneError:
            continue  # it is dead already, as the reader will tell


def _link(taken: Endpoint, end: RankEnd, writer: ArenaWriter, options: ClientOptions) -> EngineLink:
    name = f"engine core {end.rank}"
    status = StatusReader(end.page)
    taken.disown(end.page)
    reader = ArenaReader(end.arena_in)
    taken.disown(end.arena_in)
    channel = Channel(
        end.channel, name=name, writer=writer, reader=reader, threshold=options.arena_threshold, party=end.rank
    )
    taken.disown(end.channel)
    return EngineLink(end.rank, ForeignHandle(name, end.pid), channel, reader, status, state=State.READY)
