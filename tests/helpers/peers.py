"""An engine played by the test: a real process that does nothing, and the engine's end of its channel."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from engine_client.clients.link import EngineLink
from engine_client.ipc.arena import ArenaReader, create_memory
from engine_client.ipc.channel import Channel
from engine_client.ipc.handle import ChildHandle
from engine_client.ipc.status_page import StatusReader, StatusWriter
from engine_client.protocol.frames import Kind

__all__ = ["Peer", "played_engine"]


class Peer:
    """What the test holds of the engine that it plays."""

    def __init__(self, rank: int) -> None:
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.process.returncode = 0  # the handle waits for it
        ours, theirs = socket.socketpair()
        self.channel = Channel(theirs.detach(), name="client")
        page = create_memory("page")
        self.status = StatusWriter(os.dup(page))
        self.lifeline, held = os.pipe()
        self.faults = create_memory("faults")
        self.link = EngineLink(
            rank,
            ChildHandle(f"engine-core-{rank}", self.process.pid),
            Channel(ours.detach(), name=f"engine core {rank}"),
            ArenaReader(create_memory("arena")),
            StatusReader(page),
            lifeline=held,
            faults=os.dup(self.faults),
        )

    def be_ready(self) -> None:
        """Have the client believe that the handshake took place."""
        self.link.life.received(Kind.HELLO)
        self.link.life.sending(Kind.INIT)
        self.link.life.received(Kind.READY)

    def close(self) -> None:
        self.link.handle.kill()
        self.link.handle.join(10)
        self.link.handle.reap()
        self.link.handle.close()
        self.link.close()
        self.channel.close()
        self.status.close()
        os.close(self.lifeline)
        os.close(self.faults)


@contextmanager
def played_engine(rank: int = 0) -> Iterator[Peer]:
    """Yield an engine that the test plays; everything of it is gone afterwards."""
    peer = Peer(rank)
    try:
        yield peer
    finally:
        peer.close()
