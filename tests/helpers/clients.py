"""Clients of scripted engines, and requests for them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from engine_client import ClientOptions, EngineConfig, EngineCoreRequest, SamplingParams
from engine_client.clients.session import Session
from engine_client.ipc.channel import Channel
from engine_client.ipc.reader import ReaderThread
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


def make_request(
    request_id: str, max_tokens: int = 3, prompt: Iterable[int] | None = (1, 2, 3), **fields: Any
) -> EngineCoreRequest:
    """Return a request for ``max_tokens`` tokens."""
    values: dict[str, Any] = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    values["sampling_params"] = SamplingParams(max_tokens=max_tokens)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=None if prompt is None else list(prompt),
        arrival_time=time.time(),
        **(values | fields),
    )


def collect(client: Any, count: int, timeout: float = 20.0) -> dict[str, list[Any]]:
    """Read until ``count`` requests have ended; return each request's outputs in order."""
    found: dict[str, list[Any]] = {}
    ended = 0
    while ended < count:
        for output in client.get_output(timeout=timeout).outputs:
            found.setdefault(output.request_id, []).append(output)
            ended += output.finished
    return found


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
