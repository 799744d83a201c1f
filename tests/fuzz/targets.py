"""What is fuzzed: bytes go in, and nothing but what is allowed comes out.

Each target takes arbitrary bytes and raises only if the library does what it must not.  Both fuzzers use them:
hypothesis in ``test_targets.py``, atheris in ``atheris_main.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from engine_client.errors import RemoteProtocolError
from engine_client.protocol import wire
from engine_client.protocol.batch import decode_columns, with_values
from engine_client.protocol.frames import RESTRICTED, Frame, Kind, RawFrame
from engine_client.protocol.framing import FrameReader
from engine_client.protocol.lifecycle import Action, Lifecycle, State

__all__ = ["LIMIT", "TARGETS", "codec", "framing", "handshake"]

LIMIT = 1 << 20
"""Bytes that a frame may have here."""

DECODERS: dict[int, Callable[[Frame], Any]] = {
    Kind.HELLO: wire.decode_text,
    Kind.STATUS: wire.decode_status,
    Kind.LOG: wire.decode_log,
    Kind.READY: wire.decode_ready,
    Kind.FAILED: wire.decode_dead,
    Kind.OUTPUTS: lambda frame: with_values(decode_columns(frame)),
    Kind.REPLY: wire.decode_reply,
    Kind.DEAD: wire.decode_dead,
    Kind.GOODBYE: wire.decode_text,
    Kind.INIT: wire.decode_init,
    Kind.ADD: wire.decode_add,
    Kind.ABORT: wire.decode_abort,
    Kind.UTILITY: wire.decode_utility,
    Kind.SHUTDOWN: wire.decode_text,
    Kind.ATTACH: wire.decode_text,
}


def framing(data: bytes) -> list[Frame | RawFrame]:
    """Take a stream apart, in pieces whose size is the first byte's; return the frames."""
    reader = FrameReader(LIMIT)
    piece = 1 + (data[0] if data else 0) * 16
    rest, frames = memoryview(data)[1:], []
    try:
        while rest:
            room = reader.buffer()
            assert len(room) > 0
            count = min(piece, len(room), len(rest))
            room[:count] = rest[:count]
            frames += reader.advance(count)
            rest = rest[count:]
        reader.end()
    except RemoteProtocolError:
        assert reader.broken
        for again in (reader.buffer, reader.end):
            with suppress(RemoteProtocolError):
                again()
                raise AssertionError("a reader that is broken goes on") from None
    total = sum(len(frame.header) for frame in frames)
    total += sum(len(view) for frame in frames if isinstance(frame, RawFrame) for view in frame.inline)
    assert total <= len(data)
    return frames


def codec(data: bytes) -> None:
    """Decode a payload, of the kind that the first byte says, as of an engine that is not trusted."""
    kinds = sorted(DECODERS)
    kind = kinds[(data[0] if data else 0) % len(kinds)]
    _decode(Frame(kind, RESTRICTED | (data[1] & 7 if len(data) > 1 else 0), 1, data[2:]))


def _decode(frame: Frame) -> None:
    try:
        DECODERS[frame.kind](frame)
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001  # of a message that is not as it should be: who decodes one takes any as its fault
        return


def handshake(data: bytes) -> None:
    """Lead an engine through its life by what comes from it; after a violation nothing more is taken."""
    life = Lifecycle("an engine", State.LAUNCHED)
    for frame in framing(data):
        if isinstance(frame, RawFrame):
            frame = Frame(frame.kind, frame.flags, frame.ref, frame.header, frame.inline)  # noqa: PLW2901  # resolved
        try:
            action = life.received(frame.kind)
        except RemoteProtocolError:
            with suppress(RemoteProtocolError):
                life.received(Kind.HELLO)
            return
        if action is Action.CONFIGURE:  # a HELLO of one that is ending is ignored
            life.sending(Kind.INIT)
        if frame.kind in DECODERS:
            _decode(frame._replace(flags=frame.flags | RESTRICTED))


TARGETS: dict[str, Callable[[bytes], Any]] = {"framing": framing, "codec": codec, "handshake": handshake}
