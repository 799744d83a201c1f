"""Engines that end or stop at an exact byte of what they send or read, and garbage on the pipe; run inside engines."""

from __future__ import annotations

import gc
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine_client import SyncMPClient
from engine_client.clients.link import EngineLink
from engine_client.engine.front_end import FrontEnd
from engine_client.ipc.channel import Channel
from engine_client.protocol.frames import Kind, Segment
from engine_client.protocol.framing import FrameReader, pack_prefix

__all__ = [
    "GARBAGE",
    "EndingSocket",
    "count_backlog",
    "end_reading_at",
    "end_sending_at",
    "grow_until_told",
    "hold_channel",
    "hold_reader",
    "link_of",
    "note_peak_when_left",
    "promise",
    "send_garbage",
    "virtual_peak",
    "write_raw",
]

GARBAGE = {
    "header of 2**62": pack_prefix(Kind.REPLY, 0, 1, 2**62),
    "header of 2**64 - 1": pack_prefix(Kind.ADD, 0, 1, 2**64 - 1),
    "segment of 2**62": pack_prefix(Kind.REPLY, 0, 1, 10, [Segment(2**62)]) + bytes(10),
    "segment at 2**62": pack_prefix(Kind.REPLY, 0, 1, 10, [Segment(2**62, 2**62, 1)]) + bytes(10),
    "two segments of 2**35": pack_prefix(Kind.REPLY, 0, 1, 10, [Segment(2**35), Segment(2**35)]) + bytes(10),
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "unknown kind": struct.pack("<4sBBHQQ", b"ECF1", 99, 0, 0, 1, 0),
}
"""What no peer of ours ever sends."""


def channel_here() -> Channel:
    """Return, in an engine, its channel to the client."""
    [front_end] = [value for value in gc.get_objects() if type(value) is FrontEnd]
    return front_end.channel


class EndingSocket:
    """A socket that, after an exact number of bytes more, calls something, once; -1 is before the last byte."""

    def __init__(self, real: Any, left: int, act: Callable[[], object]) -> None:
        self.real = real
        self.left = left
        self.act: Callable[[], object] | None = act

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def send(self, data: Any, *rest: Any) -> int:
        return self.sendmsg([data], (), *rest)

    def sendmsg(self, parts: list[Any], *rest: Any) -> int:
        if self.left < 0:
            self.left += sum(memoryview(part).nbytes for part in parts)
        if self.act is not None and not self.left:
            act, self.act = self.act, None
            act()  # SIGSTOP comes back here
        if self.act is None:
            return int(self.real.sendmsg(parts, *rest))
        cut: list[memoryview] = []
        room = self.left
        for part in parts:
            cut.append(memoryview(part).cast("B")[:room])
            room -= len(cut[-1])
        sent = int(self.real.sendmsg([part for part in cut if part], *rest))
        self.left -= sent
        return sent


class _EndingReader(FrameReader):
    """A reader that, after an exact number of bytes more, sends this process a signal."""

    left = 0
    number = 0

    @property
    def in_frame(self) -> bool:
        return bool(self.number) or super().in_frame  # so that the channel reads through this

    def buffer(self) -> memoryview:
        view = super().buffer()
        if self.number:
            self._view = view[: self.left]
        return self._view

    def advance(self, count: int) -> list[Any]:
        frames = super().advance(count)
        self.left -= count
        if self.number and not self.left:
            number, self.number = self.number, 0
            os.kill(os.getpid(), number)
        return frames


def end_sending_at(core: object, position: int, number: int = signal.SIGKILL) -> None:
    """Signal this engine when it has sent this many bytes after the reply to this call."""
    del core
    channel = channel_here()
    real_send = channel.send

    def send(frame: Any) -> bool:  # the reply to this call still goes as usual
        channel.send = real_send  # type: ignore[method-assign]
        done = real_send(frame)
        end = partial(os.kill, os.getpid(), number)
        channel._socket = EndingSocket(channel._socket, position, end)  # type: ignore[assignment]
        return done

    channel.send = send  # type: ignore[method-assign]


def end_reading_at(core: object, position: int, number: int = signal.SIGKILL) -> None:
    """Signal this engine when it has read this many bytes after the frame of this call."""
    del core
    channel = channel_here()
    assert not channel._reader.in_frame
    reader = _EndingReader()
    reader.left, reader.number = position, number
    channel._reader = reader


def hold_channel(core: object, new_session: bool = False) -> int:
    """Start a child that holds a copy of this engine's end of the pipe for ten minutes; return its pid."""
    del core
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, channel_here().fileno(), 90)],
        setsid=new_session,
    )


def link_of(client: SyncMPClient) -> EngineLink:
    """Return the client's link to its engine."""
    (link,) = client._session.links.values()
    return link


def hold_reader(client: SyncMPClient, go: threading.Event) -> None:
    """Keep the client from reading until ``go`` is set."""
    client._session._reader.call(go.wait)


def write_raw(channel: Channel, data: bytes) -> None:
    """Put bytes into the pipe past all rules; little enough to fit."""
    assert channel._socket.send(data) == len(data)


def send_garbage(core: object, name: str) -> None:
    """Have this engine send what is no frame, before the reply to this call."""
    del core
    write_raw(channel_here(), GARBAGE[name])


def promise(core: object, length: int) -> None:
    """Have this engine begin, after the reply to this call, a frame of which no more will come than the beginning."""
    del core
    channel = channel_here()
    real_send = channel.send

    def send(frame: Any) -> bool:
        channel.send = real_send  # type: ignore[method-assign]
        done = real_send(frame)
        write_raw(channel, pack_prefix(Kind.REPLY, 0, 1, 10, [Segment(length)]) + bytes(10))
        channel.send = lambda frame: True  # type: ignore[method-assign]  # nothing of ours may follow
        return done

    channel.send = send  # type: ignore[method-assign]


def virtual_peak() -> int:
    """Return the most bytes of address space that this process has ever had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPeak:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmPeak")


def note_peak_when_left(core: object, path: str) -> None:
    """Write down, when this engine lets go of its client, by how much its address space has grown until then."""
    del core
    [front_end] = [value for value in gc.get_objects() if type(value) is FrontEnd]
    real, before = front_end.leave, virtual_peak()

    def leave() -> list[str]:
        Path(path).write_text(str(virtual_peak() - before))
        return real()

    front_end.leave = leave  # type: ignore[method-assign]


def count_backlog(core: Any) -> int:
    """Return the most bytes that have waited for the client since the first call of this."""
    channel = channel_here()
    if not hasattr(core, "most_waiting"):
        core.most_waiting = 0
        real = channel.send

        def send(frame: Any) -> bool:
            done = real(frame)
            core.most_waiting = max(core.most_waiting, channel.backlog)
            return done

        channel.send = send  # type: ignore[method-assign]
    return int(core.most_waiting)


def grow_until_told(core: Any, size: int) -> None:
    """Have every output of this engine carry its number, in so many bytes."""
    real = core.advance
    counter = iter(range(1 << 40))

    def advance(running: Any) -> Any:
        index, output = real(running)
        output.pooling_output = next(counter).to_bytes(8, "little") * (size // 8)
        return index, output

    core.advance = advance
