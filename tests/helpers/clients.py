"""Clients of scripted engines, and requests for them."""

from __future__ import annotations

from typing import Any

from engine_client import ClientOptions, EngineConfig
from engine_client.clients.session import Session
from engine_client.ipc.channel import Channel
from engine_client.ipc.reader import ReaderThread
from engine_client.testing.clients import collect, make_request
from engine_client.testing.scripted import TARGET, Script
from helpers.colours import make_coloured

__all__ = ["channel_of", "collect", "make_request", "pid_of", "pids_of", "reader_of", "scripted_client", "session_of"]


def scripted_client(
    script: Script | None = None,
    *,
    colour: str = "sync",
    log_stats: bool = False,
    config: EngineConfig | None = None,
    **options: Any,
) -> Any:
    """Return a client of a scripted engine, or of two; ``options`` are ``ClientOptions``'."""
    config = config or EngineConfig()
    config.additional_config["script"] = script or Script()
    return make_coloured(colour, config, None, log_stats, ClientOptions(**{"engine_target": TARGET, **options}))


def pid_of(client: Any) -> int:
    """Return the engine's pid; of several, the last one's."""
    return pids_of(client)[-1]


def pids_of(client: Any) -> list[int]:
    """Return the pids of all engines, by rank."""
    return [link.pid for _, link in sorted(session_of(client).links.items())]


def channel_of(client: Any) -> Channel:
    """Return the channel to the engine."""
    (link,) = session_of(client).links.values()
    return link.channel


def session_of(client: Any) -> Session:
    """Return what is behind a client: its tables, its channels, its memory."""
    session: Session = client._session
    return session


def reader_of(client: Any) -> ReaderThread:
    """Return the thread that reads what the engine sends."""
    return session_of(client)._reader
