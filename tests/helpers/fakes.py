"""Engine targets that misbehave while an engine starts, and several engines started as one client would."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine_client import ClientOptions, EngineConfig
from engine_client.clients.session import Session
from engine_client.clients.start import Handshake, launch_engine
from engine_client.deadline import Deadline
from engine_client.interfaces import EngineContext
from engine_client.ipc.arena import ArenaWriter, create_memory
from engine_client.ipc.channel import Channel
from engine_client.protocol.codec import dumps
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import Init, encode_ready
from engine_client.testing.scripted import TARGET, Script, ScriptedCore

__all__ = ["several_engines"]


def build_stubborn(vllm_config: Any, executor_class: Any, log_stats: bool, context: EngineContext) -> ScriptedCore:
    """Build a scripted engine that ignores SIGTERM."""
    del executor_class
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    core = ScriptedCore(vllm_config, log_stats, context)
    # The engine process sets its own handler when it is ready; this one comes after it.
    core.utilities()
    return core


def build_impostor(vllm_config: Any, executor_class: Any, log_stats: bool, context: EngineContext) -> ScriptedCore:
    """Say READY with the token of another client."""
    del executor_class
    core = ScriptedCore(vllm_config, log_stats, context)
    _channel().send(encode_ready("of another client", core.ready_response()))
    time.sleep(60)
    return core


def build_babbler(vllm_config: Any, executor_class: Any, log_stats: bool, context: EngineContext) -> ScriptedCore:
    """Send what is no message, or not one for now; ``additional_config["babble"]`` says which."""
    del executor_class, log_stats, context
    what = vllm_config.additional_config["babble"]
    channel = _channel()
    if what == "garbage":
        os.write(channel.fileno(), b"this is not a frame at all, but long enough to be one")
    elif what == "outputs":
        channel.send(Frame(Kind.OUTPUTS, 0, 0, b""))
    elif what == "undecodable":
        channel.send(Frame(Kind.READY, 0, 0, b"\x80\x05nonsense"))
    elif what == "version":
        payload = dumps((99, os.getpid()))
        channel.send(Frame(Kind.HELLO, 0, 0, payload.header, payload.buffers))
    elif what == "half":
        os.write(channel.fileno(), b"ECF1")
        os._exit(0)
    elif what == "silence":
        channel.close()
    time.sleep(60)
    raise AssertionError


def _channel() -> Channel:
    (channel,) = [found for found in gc.get_objects() if isinstance(found, Channel)]
    return channel


@contextmanager
def several_engines(
    scripts: list[Script], timeout: float = 30.0, **options: Any
) -> Iterator[tuple[Session, Handshake]]:
    """Launch scripted engines as a client of several ranks does; yield its session and the handshake to run."""
    choice = ClientOptions(engine_target=TARGET, ready_timeout=timeout, **options)
    session = Session(choice)
    try:
        fd = create_memory("engine-requests")
        session.writer = ArenaWriter(fd, limit=choice.arena_limit, parties=len(scripts))
        for rank in range(len(scripts)):
            session.adopt(launch_engine(rank, choice, session.writer))

        def make_init(rank: int) -> Init:
            config = EngineConfig(additional_config={"script": scripts[rank]})
            payload = dumps((config, None, False))
            return Init("token", rank, TARGET, sys.path, sys.argv, {}, choice.for_engine(), payload)

        yield session, Handshake(list(session.links.values()), make_init, "token", choice, Deadline(timeout))
    finally:
        session.abandon()
