"""Utility calls as clients send them, sessions of several engines that a test plays, and asyncio clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from engine_client import ClientOptions, EngineConfig, EngineCoreClient
from engine_client.clients.caller import Caller
from engine_client.clients.fan_out import FanOut
from engine_client.clients.session import Session
from engine_client.deadline import Deadline
from engine_client.protocol.frames import Frame, Kind
from engine_client.testing.scripted import TARGET, Script
from helpers.peers import Peer, played_engine
from helpers.timing import DEADLOCK, eventually

__all__ = ["async_client", "call", "give_bytes", "make_array", "make_bytes", "played_session", "received"]


def async_client(
    ranks: int = 1, script: Script | None = None, *, config: EngineConfig | None = None, **options: Any
) -> Any:
    """Return the asyncio client of so many scripted engines; ``options`` are ``ClientOptions``'."""
    config = config or EngineConfig()
    config.parallel_config.data_parallel_size = ranks
    config.additional_config["script"] = script or Script()
    made = ClientOptions(**{"engine_target": TARGET, **options})
    return EngineCoreClient.make_client(True, True, config, None, False, options=made)  # type: ignore[arg-type]  # a scripted engine has no executor


def call(session: Session, method: str, *args: Any, timeout: float | None = None) -> FanOut:
    """Send a utility call without waiting for the reply; one that fails is given up."""
    caller = Caller(session)
    fan_out = caller.begin(method)
    try:
        caller.send(fan_out, method, args, Deadline(timeout))
    except BaseException:
        fan_out.discard()
        raise
    return fan_out


def make_bytes(core: object, count: int) -> bytes:
    """Return, from an engine, that many bytes."""
    del core
    return b"\x07" * count


def make_array(core: object, count: int) -> Any:
    """Return, from an engine, an array of that many bytes."""
    del core
    import numpy as np

    return np.full(count, 7, np.uint8)


@contextmanager
def played_session(ranks: int = 1, **options: Any) -> Iterator[tuple[Session, list[Peer]]]:
    """Yield a session whose engines are played by the test."""
    with ExitStack() as stack:
        peers = [stack.enter_context(played_engine(rank)) for rank in range(ranks)]
        session = Session(ClientOptions(**options))
        for peer in peers:
            peer.be_ready()
            session.adopt(peer.link)
        session.serve()
        try:
            yield session, peers
        finally:
            session.close(0.0)


def received(peer: Peer, kind: Kind, count: int = 1) -> list[Frame]:
    """Read, as a played engine, until so many frames of a kind have come."""
    found: list[Frame] = []

    def look() -> bool:
        found.extend(frame for frame in peer.channel.receive() if frame.kind == kind)
        return len(found) >= count

    eventually(look, DEADLOCK)
    return found


def give_bytes(core: Any, count: int) -> None:
    """Have an engine add that many bytes to each output."""
    real = core.advance

    def advance(running: Any) -> Any:
        index, output = real(running)
        output.pooling_output = make_bytes(core, count)
        return index, output

    core.advance = advance
