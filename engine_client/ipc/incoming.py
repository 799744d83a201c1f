"""Frames that have come through a channel: from the places of their buffers to the buffers.

Threads: as the channel that receives them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple, Union

from engine_client.errors import RemoteProtocolError
from engine_client.ipc.arena import ArenaReader
from engine_client.protocol.frames import Frame, RawFrame

__all__ = ["Item", "Placed", "fill", "resolve"]


class Placed(NamedTuple):
    """A frame whose buffers all lie in an arena, and those that were leased so far."""

    raw: RawFrame
    leased: list[memoryview]


Item = Union[bytes, Frame, Placed]
"""What the borrower of a channel has read: bytes, and what was found in them."""


def resolve(found: RawFrame | Placed, arena: ArenaReader | None, name: str) -> Frame:
    """Turn offsets into views; all leases of a frame are taken, or none is kept.

    Args:
        found: the frame; with what ``fill`` has leased of it, if it has.
        arena: where its segments lie; None if there is no shared memory.
        name: of the channel, for messages.

    Returns:
        The frame; with ``error``, and without buffers, if a segment cannot be mapped.
    """
    raw, buffers = found if isinstance(found, Placed) else Placed(found, [])
    try:
        fill(buffers, raw, arena, name)
    except (RemoteProtocolError, OSError, MemoryError) as error:
        if arena is not None:
            for segment in raw.segments[len(buffers) :]:
                arena.discard(segment)
        buffers.clear()
        with suppress(OSError):  # of the import, which needs a descriptor: it is another end than the stream's
            from engine_client.protocol.tracebacks import empty_frames  # noqa: PLC0415  # needed for failures only

            empty_frames(error)  # a mapping in it would last as long as somebody keeps the error
        return Frame(raw.kind, raw.flags, raw.ref, raw.header, (), error)
    return Frame(raw.kind, raw.flags, raw.ref, raw.header, buffers)


def fill(buffers: list[memoryview], raw: RawFrame, arena: ArenaReader | None, name: str) -> None:
    """Append the buffers of a frame to those that are there already.

    What ends it leaves what was leased in the list, which keeps the error, and no variable does.  Where all buffers lie
    in the arena it can then go on, or in another thread meanwhile: each is leased once.

    Raises:
        RemoteProtocolError, OSError, MemoryError: as ``ArenaReader.lease``.
    """
    inline = iter(raw.inline)
    for index, segment in enumerate(raw.segments):
        if segment.offset < 0:
            buffers.append(next(inline))
        elif arena is None:
            raise RemoteProtocolError(f"{name}: a buffer in shared memory, but there is none")
        else:
            arena.lease_into(buffers, index, segment)
