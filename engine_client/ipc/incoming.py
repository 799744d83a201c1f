"""Frames that have come through a channel: from the places of their buffers to the buffers.

Threads: as the channel that receives them.
"""

from __future__ import annotations

from contextlib import suppress

from engine_client.errors import RemoteProtocolError
from engine_client.ipc.arena import ArenaReader
from engine_client.protocol.frames import Frame, RawFrame, Segment

__all__ = ["resolve"]


def resolve(raw: RawFrame, arena: ArenaReader | None, name: str) -> Frame:
    """Turn offsets into views; all leases of a frame are taken, or none is kept.

    Args:
        raw: the frame.
        arena: where its segments lie; None if there is no shared memory.
        name: of the channel, for messages.

    Returns:
        The frame; with ``error``, and without buffers, if a segment cannot be mapped.
    """
    inline = iter(raw.inline)
    buffers: list[memoryview] = []
    try:
        for segment in raw.segments:
            # No comprehension, because what was leased before a failure must be known; and no variable either, which
            # would keep the last one for as long as somebody keeps the error.
            buffers.append(next(inline) if segment.offset < 0 else _lease(segment, arena, name))  # noqa: PERF401 (see above)
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


def _lease(segment: Segment, arena: ArenaReader | None, name: str) -> memoryview:
    if arena is None:
        raise RemoteProtocolError(f"{name}: a buffer in shared memory, but there is none")
    return arena.lease(segment)
