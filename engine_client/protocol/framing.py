"""Frames: how one message lies in the byte stream between a client and an engine.

Data flow::

    | prefix 24 | table 24 * n | header | inline segment | inline segment ...
    | magic kind flags n ref header_length | length offset stamp | ...

A *header* is the pickled message.  A *segment* is one of its large buffers: inline (its bytes follow the header), or
in the arena (only its place travels).  ``pack_prefix`` writes the first two parts; the channel writes the others
behind them without a copy.  ``FrameReader`` takes the stream apart, whatever the cuts in which it arrives; large parts
are read straight into the memory in which they stay.

Invariants: a length is checked before it is believed, and memory grows with the bytes that have come, never with what
a length promises.  After a violation the reader is broken for good (I4, I12).

Threads: a reader belongs to whoever reads its channel, one thread at a time (I1).  Pure: performs no I/O.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Final

from engine_client.errors import LocalProtocolError, RemoteProtocolError
from engine_client.protocol.frames import INLINE, MAX_SEGMENTS, Flag, Frame, Kind, RawFrame, Segment, new_tuple

__all__ = ["MAX_FRAME", "READ_SIZE", "FrameReader", "pack_prefix", "take_small"]

_PREFIX: Final = struct.Struct("<4sBBHQQ")
_ENTRY: Final = struct.Struct("<QqQ")
_PREFIX_SIZE: Final = _PREFIX.size
_MAGIC: Final = b"ECF1"

MAX_FRAME: Final = 64 << 30
"""Default limit for the bytes of one frame, far above what a machine holds."""

READ_SIZE: Final = 64 * 1024
"""Bytes asked for in one read while no large part is under way."""
_LARGE: Final = 16 * 1024
"""A part of this size and more gets memory of its own as soon as its length is known."""
_GROWTH: Final = 16 << 20
"""Most bytes that are allocated ahead of the bytes that have come."""
_NOTHING: Final = memoryview(b"")

_FIRST_KIND: Final = int(min(Kind))
_LAST_KIND: Final = int(max(Kind))
_UNKNOWN_FLAGS: Final = 0xFF & ~sum(Flag)


def pack_prefix(kind: int, flags: int, ref: int, header_length: int, segments: Sequence[Segment] = ()) -> bytes:
    """Return what goes in front of the header: the prefix and the segment table.

    Raises:
        LocalProtocolError: there are too many segments, or a number does not fit its field.
    """
    try:
        prefix = _PREFIX.pack(_MAGIC, kind, flags, len(segments), ref, header_length)
        if not segments:
            return prefix
        return b"".join([prefix, *[_ENTRY.pack(*segment) for segment in segments]])
    except struct.error as error:
        raise LocalProtocolError(
            f"a frame of kind {kind} with ref {ref}, {header_length} header bytes and {len(segments)} segments "
            f"(at most {MAX_SEGMENTS}) cannot be written: {error}"
        ) from None


class _Stage(enum.IntEnum):
    """Which part of a frame comes next."""

    TABLE = 0
    HEADER = 1
    INLINE = 2


class _Partial:
    """A frame of which the prefix has come: what it has, and which parts it still lacks."""

    def __init__(self, kind: int, flags: int, count: int, ref: int, header_length: int, limit: int) -> None:
        self.kind = kind
        self.flags = flags
        self.ref = ref
        self.header_length = header_length
        self.limit = limit
        self.table_length = count * _ENTRY.size
        self.stage = _Stage.TABLE if count else _Stage.HEADER
        self.segments: list[Segment] = []
        self.missing: list[int] = []  # lengths of the inline segments to come, last one first
        self.header: bytes | memoryview = b""
        self.inline: list[memoryview] = []
        self.body: bytearray | None = None  # a large part that is read into directly; the scratch is empty meanwhile
        self.filled = 0  # bytes of the body that have come
        self.wanted = 0  # bytes that the body will have; it grows towards that

    def next_length(self) -> int | None:
        """Return the length of the part that comes next; None when the frame is complete."""
        if self.stage is _Stage.TABLE:
            return self.table_length
        if self.stage is _Stage.HEADER:
            return self.header_length
        return self.missing[-1] if self.missing else None

    def begin_body(self, have: memoryview, length: int) -> None:
        """Give the next part memory of its own; ``have`` is what has come of its ``length`` bytes."""
        self.body = bytearray(min(length, _GROWTH))
        self.body[: len(have)] = have
        self.filled = len(have)
        self.wanted = length

    def fill(self, body: bytearray, count: int) -> bool:
        """Count bytes that were read into the body; tell whether it is complete, and taken."""
        self.filled += count
        if self.filled < len(body):
            return False
        if self.filled < self.wanted:
            body.extend(bytes(min(self.wanted - len(body), _GROWTH)))
            return False
        self.body = None
        self.take(body)
        return True

    def take(self, part: bytearray) -> None:
        """Accept the next part, whose bytes nobody else changes any more."""
        if self.stage is _Stage.TABLE:
            self._take_table(part)
            self.stage = _Stage.HEADER
        elif self.stage is _Stage.HEADER:
            self.header = bytes(part) if len(part) < _LARGE else memoryview(part)
            self.stage = _Stage.INLINE
        else:
            self.missing.pop()
            self.inline.append(memoryview(part))

    def _take_table(self, table: bytearray) -> None:
        self.segments = segments = [Segment(*entry) for entry in _ENTRY.iter_unpack(table)]
        total = len(table) + self.header_length
        for number, (length, offset, stamp) in enumerate(segments):
            if length > self.limit or offset < INLINE or (offset == INLINE and stamp):
                raise RemoteProtocolError(
                    f"segment {number} of a frame cannot be: {length} bytes at offset {offset}, stamp {stamp}"
                )
            if offset == INLINE:
                total += length
                self.missing.append(length)
        if total > self.limit:
            raise RemoteProtocolError(f"a frame of {total} bytes is over the limit of {self.limit}")
        self.missing.reverse()

    def finish(self) -> Frame | RawFrame:
        if not self.segments:
            return Frame(self.kind, self.flags, self.ref, self.header)
        return RawFrame(self.kind, self.flags, self.ref, self.header, self.segments, self.inline)


class FrameReader:
    """Takes a byte stream apart into frames.

    Use: put bytes into ``buffer()``, say how many with ``advance(n)``, which returns the frames that are now complete;
    say ``end()`` when the stream has ended.

    After a violation every call raises ``RemoteProtocolError``, a new one each time.  Frames that were complete before
    the violation, in the same read, are still returned; ``broken`` tells at once that nothing will follow them.

    Args:
        max_frame: most bytes that a frame may have.
    """

    __slots__ = (
        "_begin",
        "_end",
        "_filled",
        "_max_frame",
        "_part",
        "_partial",
        "_scratch",
        "_view",
        "_wanted",
        "broken",
    )

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.broken: str | None = None  # what the peer did, once it broke the protocol
        self._max_frame = max_frame
        self._scratch = memoryview(bytearray(READ_SIZE))
        self._begin = 0  # scratch[begin:end] has come and is not yet understood
        self._end = 0
        self._partial: _Partial | None = None
        self._view = _NOTHING  # what buffer() gave out, until advance()

    def __repr__(self) -> str:
        state = "broken" if self.broken else "in frame" if self.in_frame else "between frames"
        return f"<FrameReader {state}>"

    @property
    def in_frame(self) -> bool:
        """Tell whether a frame has begun and is not complete."""
        return self._partial is not None or self._end > self._begin

    def buffer(self) -> memoryview:
        """Return where to put the next bytes; it is never empty, and valid until ``advance``."""
        if self.broken:
            raise RemoteProtocolError(self.broken)
        partial = self._partial
        if partial is None or partial.body is None:
            self._view = self._scratch[self._end :] if self._end else self._scratch
        else:
            self._view = memoryview(partial.body)[partial.filled :]
        return self._view

    def advance(self, count: int) -> list[Frame | RawFrame]:
        """Take note of ``count`` bytes put into ``buffer()``; return the frames that they complete.

        Those without segments need no more resolving.

        Raises:
            RemoteProtocolError: the bytes break the protocol, or there is no memory for a frame of that size.
            LocalProtocolError: ``count`` is more than the buffer has room for.
        """
        if self.broken:
            raise RemoteProtocolError(self.broken)
        if not 0 <= count <= len(self._view):
            raise LocalProtocolError(f"{count} bytes cannot have been put into a buffer of {len(self._view)}")
        if self._view is not self._scratch and self._view is not _NOTHING:
            self._view.release()  # nothing that is handed on, or grows, stays tied to this reader
        self._view = _NOTHING
        frames: list[Frame | RawFrame] = []
        try:
            partial = self._partial
            if partial is None or partial.body is None:
                self._end += count
                self._parse(frames)
            elif partial.fill(partial.body, count):
                self._parse(frames)
        except (RemoteProtocolError, MemoryError) as error:
            reason = self._break(str(error) or "there is no memory for a frame of this size")
            if not frames:
                raise RemoteProtocolError(reason) from None
        return frames

    def feed(self, data: bytes) -> list[Frame | RawFrame]:
        """Take bytes that were read elsewhere; return the frames that they complete.

        Raises:
            RemoteProtocolError: as ``advance``.
        """
        frames: list[Frame | RawFrame] = []
        rest = memoryview(data)
        while rest and not self.broken:
            room = self.buffer()
            count = min(len(room), len(rest))
            room[:count], rest = rest[:count], rest[count:]
            try:
                frames += self.advance(count)
            except RemoteProtocolError:
                if not frames:
                    raise
        return frames

    def end(self) -> None:
        """Take note that the stream has ended.

        Raises:
            RemoteProtocolError: it ended inside a frame.
        """
        if self.broken:
            raise RemoteProtocolError(self.broken)
        if self.in_frame:
            raise RemoteProtocolError(self._break("the stream ended inside a frame"))

    def _break(self, reason: str) -> str:
        self.broken = reason
        self._partial = None
        self._begin = self._end = 0
        return reason

    def _parse(self, frames: list[Frame | RawFrame]) -> None:
        """Understand what is in the scratch, up to a part that is not complete; leave room behind it."""
        while True:
            partial = self._partial
            if partial is None:
                if not self._read_prefixes(frames):
                    break
                continue
            length = partial.next_length()
            if length is None:
                frames.append(partial.finish())
                self._partial = None
            elif self._end - self._begin >= length:
                partial.take(bytearray(self._scratch[self._begin : self._begin + length]))
                self._begin += length
            elif length >= _LARGE:
                partial.begin_body(self._scratch[self._begin : self._end], length)
                self._begin = self._end = 0
                return
            else:
                break
        self._compact()

    def _read_prefixes(self, frames: list[Frame | RawFrame]) -> bool:
        """Take whole small frames, which is what comes usually; begin the first other one and return True."""
        self._begin = begin = take_small(self._scratch, self._begin, self._end, frames.append, self._max_frame)
        if self._end - begin < _PREFIX_SIZE:
            return False
        magic, kind, flags, count, ref, header_length = _PREFIX.unpack_from(self._scratch, begin)
        if magic != _MAGIC or not _FIRST_KIND <= kind <= _LAST_KIND or flags & _UNKNOWN_FLAGS:
            raise RemoteProtocolError(_what_is_wrong(magic, kind, flags))
        if (length := header_length + count * _ENTRY.size) > self._max_frame:
            raise RemoteProtocolError(f"a frame of {length} bytes is over the limit of {self._max_frame}")
        if not count and header_length < _LARGE:
            return False  # the rest of it is on its way
        self._begin = begin + _PREFIX_SIZE
        self._partial = _Partial(kind, flags, count, ref, header_length, self._max_frame)
        return True

    def _compact(self) -> None:
        """Move what is left to the front when the rest of a small part might not fit behind it."""
        begin, end = self._begin, self._end
        if begin == end:
            self._begin = self._end = 0
        elif begin + _PREFIX_SIZE + _LARGE > READ_SIZE:
            self._scratch[: end - begin] = bytes(self._scratch[begin:end])
            self._begin, self._end = 0, end - begin


def take_small(
    data: bytes | memoryview,
    begin: int,
    end: int,
    add: Callable[[Frame], object],
    max_frame: int = MAX_FRAME,
    add_placed: Callable[[RawFrame], object] | None = None,
) -> int:
    """Take whole small frames off ``data[begin:end]``, and ``add`` each: they need no more resolving.

    Those whose segments are all in the arena are taken, too, if ``add_placed`` tells what to do with them.

    Returns:
        Where the first other one begins: one that is not whole, has other segments, is large, or is none at all.
    """
    while end - begin >= _PREFIX_SIZE:
        magic, kind, flags, count, ref, length = _PREFIX.unpack_from(data, begin)
        header = begin + _PREFIX_SIZE + count * _ENTRY.size
        if length >= _LARGE or header + length > end or length > max_frame:
            break
        if magic != _MAGIC or not _FIRST_KIND <= kind <= _LAST_KIND or flags & _UNKNOWN_FLAGS:
            break
        if count:
            table = data[begin + _PREFIX_SIZE : header]
            if add_placed is None or (segments := _segments_of(table, max_frame - length)) is None:
                break
            add_placed(RawFrame(kind, flags, ref, bytes(data[header : header + length]), segments, []))
        else:
            add(new_tuple(Frame, (kind, flags, ref, bytes(data[header : header + length]), (), None)))
        begin = header + length
    return begin


def _segments_of(table: bytes | memoryview, limit: int) -> list[Segment] | None:
    """Return the segments of a table; None unless all are in the arena, and as they should be."""
    segments = [new_tuple(Segment, entry) for entry in _ENTRY.iter_unpack(table)]
    lengths, offsets, _ = zip(*segments, strict=True)
    return segments if max(*lengths, len(table)) <= limit and min(offsets) >= 0 else None


def _what_is_wrong(magic: bytes, kind: int, flags: int) -> str:
    if magic != _MAGIC:
        return f"a frame begins with {magic!r}, which is not this protocol's mark {_MAGIC!r}"
    return f"a frame is of kind {kind} with flags {flags:#x}, which this protocol lacks"
