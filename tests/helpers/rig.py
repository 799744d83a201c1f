"""A busy loop over real channels, with a scripted engine in a thread of this process."""

from __future__ import annotations

import os
import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine_client import EngineConfig, FinishReason
from engine_client.engine.busy_loop import BusyLoop
from engine_client.engine.front_end import FrontEnd
from engine_client.interfaces import EngineContext
from engine_client.ipc.arena import create_memory
from engine_client.ipc.channel import Channel
from engine_client.ipc.status_page import StatusReader, StatusWriter
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import decode_reply, encode_add, encode_utility
from engine_client.testing.scripted import Script, ScriptedCore
from helpers.clients import make_request
from helpers.timing import DEADLOCK, eventually
from helpers.transport import columns_of

__all__ = ["Rig", "rig"]


class Rig:
    """A loop in a thread, and the client's ends of its channels."""

    def __init__(self, script: Script, count: int, options: dict[str, Any]) -> None:
        config = EngineConfig(additional_config={"script": script})
        self.engine = ScriptedCore(config, False, EngineContext())
        page = create_memory("test")
        self.status = StatusReader(os.dup(page))
        self.writer = StatusWriter(page)
        pairs = [socket.socketpair() for _ in range(count)]
        self.clients = [Channel(left.detach(), name="engine") for left, _ in pairs]
        front_ends = [FrontEnd(i, Channel(right.detach(), name="client")) for i, (_, right) in enumerate(pairs)]
        self.front_ends = front_ends
        self.loop = BusyLoop(self.engine, front_ends, self.writer, **options)
        self.frames: list[Frame] = []
        self.error: BaseException | None = None
        self.reason: str | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.reason = self.loop.run()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def add(self, key: int, name: str, max_tokens: int, client: int = 0, **fields: Any) -> None:
        request = make_request(name, max_tokens, **fields)
        self.clients[client].send(encode_add(key, request, array("I", request.prompt_token_ids or ())))

    def receive(self, kind: Kind, client: int = 0) -> Frame:
        """Return the next frame of a kind; keep the others."""
        while True:
            for frame in self.frames:
                if frame.kind == kind:
                    self.frames.remove(frame)
                    return frame
            eventually(lambda: self._poll(client), DEADLOCK)

    def _poll(self, client: int) -> bool:
        got = self.clients[client].receive()
        self.frames += got
        return bool(got)

    def call(self, method: str, *args: Any, client: int = 0) -> Any:
        self.clients[client].send(encode_utility(1, method, args))
        failed, value = decode_reply(self.receive(Kind.REPLY, client))
        if failed:
            raise value
        return value

    def finishes(self, count: int, client: int = 0) -> dict[int, Any]:
        """Return finish and stop reason by key of the next ``count`` requests that end."""
        found: dict[int, Any] = {}
        while len(found) < count:
            columns, _ = columns_of(self.receive(Kind.OUTPUTS, client))
            for row, reason, stop in columns.finishes:
                found[columns.keys[row]] = FinishReason(reason), stop
        return found

    def close(self) -> None:
        self.loop.request_shutdown("the test is over")
        self.thread.join(DEADLOCK)
        assert not self.thread.is_alive()
        for channel in [*self.clients, *(f.channel for f in self.front_ends)]:
            channel.close()
        self.engine.shutdown()
        self.status.close()
        self.writer.close()


@contextmanager
def rig(script: Script | None = None, count: int = 1, **options: Any) -> Iterator[Rig]:
    made = Rig(script or Script(), count, options)
    try:
        yield made
    finally:
        made.close()
