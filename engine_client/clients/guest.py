"""A session with engines that another process has launched.

Invariants: I5, I11 (what an endpoint holds is the session's as soon as it is taken).

Threads: as ``MPClient``'s construction.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from engine_client.clients.endpoint import Endpoint, RankEnd
from engine_client.clients.link import EngineLink, LinkGoneError
from engine_client.clients.session import Session
from engine_client.config import ClientOptions
from engine_client.ipc.arena import MAX_PARTIES, ArenaReader, ArenaWriter
from engine_client.ipc.channel import Channel
from engine_client.ipc.foreign import ForeignHandle
from engine_client.ipc.group import Group
from engine_client.ipc.status_page import StatusReader
from engine_client.ipc.user_main import describe_main
from engine_client.protocol.frames import Kind
from engine_client.protocol.lifecycle import State
from engine_client.protocol.wire import encode_text

__all__ = ["announce", "attach", "check_endpoint", "refuse_restart"]


def check_endpoint(addresses: Any) -> Endpoint:
    """Return a client's addresses, which must be an endpoint.

    Raises:
        TypeError: they are something else.
    """
    if not isinstance(addresses, Endpoint):
        raise TypeError(
            f"client_addresses must be an endpoint of launch_core_engines, not {type(addresses).__name__}: "
            "addresses of sockets mean nothing here"
        )
    return addresses


def refuse_restart(options: ClientOptions) -> None:
    """Raise ``ValueError`` for options that front-ends of engines of others, and their launcher, cannot have."""
    if options.on_engine_death == "restart":
        raise ValueError(
            'on_engine_death="restart" is not for engines with several front-ends, which could not reach the new '
            'process: use "continue" or "shutdown"'
        )


def attach(session: Session, endpoint: Endpoint, ranks: Iterable[int] | None = None) -> Sequence[RankEnd]:
    """Take an endpoint and fill a session with links to its engines; return the ends that are used.

    To be called where no interrupt comes: descriptors have two owners for a moment.

    Args:
        session: new; it owns from here on what it gets.
        endpoint: of this front-end.
        ranks: those to use; None: all.

    Raises:
        ValueError: the endpoint was used before, has no such rank, or the options are not for guests.
        OSError: memory has run out.
    """
    refuse_restart(session.options)
    ends = endpoint.ranks if ranks is None else [end for end in endpoint.ranks if end.rank in set(ranks)]
    if not ends:
        known = [end.rank for end in endpoint.ranks]
        raise ValueError(f"the endpoint has the ranks {known}, and the configuration asks for {list(ranks or ())}")
    options = session.options
    endpoint.take()
    session.is_guest = True
    session.main_importable = bool(endpoint.main) and endpoint.main == describe_main()
    try:
        session.writer = ArenaWriter(endpoint.arena_out, limit=options.arena_limit, parties=MAX_PARTIES)
        endpoint.disown(endpoint.arena_out)
        if endpoint.group is not None:
            session.lock_step = Group.of_others(endpoint.group)
            endpoint.disown(endpoint.group)
        for end in endpoint.ranks:
            link = _link(endpoint, end, session.writer, options)
            if end in ends:
                session.links[end.rank] = link
            else:
                link.close()  # which tells the engine that nobody will come
    finally:
        endpoint.close()
    return ends


def announce(session: Session) -> None:
    """Tell the engines which process this is, so that they see its end whoever has a copy of its pipes."""
    for link in session.links.values():
        try:
            session.send(link, encode_text(Kind.ATTACH, str(os.getpid())))
        except LinkGoneError:
            continue  # it is dead already, as the reader will tell


def _link(endpoint: Endpoint, end: RankEnd, writer: ArenaWriter, options: ClientOptions) -> EngineLink:
    name = f"engine core {end.rank}"
    status = StatusReader(end.page)
    endpoint.disown(end.page)
    reader = ArenaReader(end.arena_in)
    endpoint.disown(end.arena_in)
    channel = Channel(
        end.channel, name=name, writer=writer, reader=reader, threshold=options.arena_threshold, party=end.rank
    )
    endpoint.disown(end.channel)
    channel.is_restricted = options.codec == "restricted"
    return EngineLink(end.rank, ForeignHandle(name, end.pid), channel, reader, status, state=State.READY)
