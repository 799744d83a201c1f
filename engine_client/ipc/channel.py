"""One duplex pipe to the other side: whole frames in, whole frames out, never blocking.

::

    send(frame) ─▶ big buffers ─▶ ArenaWriter ─▶ offsets ┐
                   the rest ───────────────────────────┬─┴▶ sendmsg ─▶ backlog (what did not fit) ─▶ flush()
    receive() ◀── FrameReader ◀── recv · readv         ArenaReader ◀── offsets

The descriptor is one end of ``multiprocessing.Pipe(duplex=True)`` (a socket pair), non-blocking, and used with system
calls only: ``Connection.send`` would raise in mid-frame.

Invariants: I1 (bytes reach the pipe only here, under the lock), I4 (broken and closed are sticky), I9 (what does not
fit at once is copied, so that the caller's memory is free when ``send`` returns), I12 (a fault in mid-frame breaks the
channel for good).

Threads: ``send`` and ``flush`` from any thread; ``receive`` from one thread at a time.  The lock is held for
non-blocking system calls only; it is re-entrant, because a signal handler or a finalizer may send on a thread that is
inside ``send``: then the inner frame only joins the backlog, and the outer call writes it.  Signals: an exception
raised by a signal handler between two bytecodes never loses the count of bytes written, because the count is derived
from a list that ``list.extend`` fills in one C call.
"""

from __future__ import annotations

import _socket  # the half of socket that is needed here; the other one takes 10 ms to load
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from engine_client.errors import RemoteProtocolError
from engine_client.interfaces import Buffer
from engine_client.ipc.arena import ArenaReader, ArenaWriter
from engine_client.ipc.incoming import resolve
from engine_client.ipc.outgoing import Backlog, Outgoing
from engine_client.protocol.frames import RESTRICTED, Frame, Kind, RawFrame, Segment
from engine_client.protocol.framing import READ_SIZE, FrameReader, pack_prefix, take_small

__all__ = ["Channel"]

_JOIN_BELOW: Final = 16 * 1024
"""A header this small is joined with the prefix: one copy is cheaper than one more entry in the system call."""

_NO_SIGNAL: Final = (getattr(_socket, "MSG_NOSIGNAL", 0),)
"""Of a system call: a peer that is gone is an error, and no SIGPIPE, which a host may have set to end its process."""

_MOST_VECTORS: Final = 1024
"""``IOV_MAX`` on Linux and macOS."""

_IN_MEMORY: Final = frozenset({Kind.ADD, Kind.UTILITY, Kind.OUTPUTS, Kind.REPLY})
"""The kinds of frames that carry what users send.  What starts, steers and ends an engine stays in the pipe: it must
arrive where memory cannot be mapped, or is not yet."""

_MOST_READS: Final = 64
"""Reads in one ``receive``, so that one busy peer does not keep its reader from the others."""


class Channel:
    """One end of a duplex pipe; owns its descriptor and closes it.

    Args:
        fd: the descriptor, at least 3; made non-blocking here.
        name: for messages, such as ``"engine 0"``.
        writer, reader: shared memory of the two directions; None sends everything through the pipe.
        threshold: buffers of this many bytes and more go through shared memory.
        party: which reader of the writer's memory the other side is.
    """

    def __init__(
        self,
        fd: int,
        *,
        name: str,
        writer: ArenaWriter | None = None,
        reader: ArenaReader | None = None,
        threshold: int = 64 * 1024,
        party: int = 0,
    ) -> None:
        self._socket = _socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self.name = name
        self.ended = False  # the other side will send no more
        self.hung_up = False  # ... because it closed its end, or has died
        self.fault: BaseException | None = None  # why the stream cannot be read on
        self.received = 0  # bytes read so far
        self.in_memory = 0  # buffers that went through shared memory
        self.in_pipe = 0  # buffers that were big enough for it and went through the pipe
        self.is_restricted = False  # what comes is marked for the decoder that trusts nobody
        self.is_watched = False  # whoever flushes has seen that something waits, and will as soon as there is room
        self._fd = fd
        self._party = party
        self.connect_memory(writer=writer, reader=reader, threshold=threshold)
        self._revoked: deque[list[Segment]] = deque()  # of frames whose sending an interrupt has ended
        # -- reading thread only --
        self._reader = FrameReader()
        self.ahead: list[bytes | Frame] = []  # what a borrower has read, and not taken; see ``Loan``
        # -- guarded by _lock --
        self._lock = threading.RLock()
        self._flushing = False
        self._backlog = Backlog()
        self.waiting = self._backlog.frames  # what ``flush`` has to write; for others to look at only
        self._broken: BaseException | None = None

    def __repr__(self) -> str:
        state = "closed" if self._fd < 0 else "broken" if self._broken else "ended" if self.ended else "open"
        return f"<Channel {self.name} {state} backlog={self.backlog}>"

    def connect_memory(self, *, writer: ArenaWriter | None, reader: ArenaReader | None, threshold: int) -> None:
        """Use this shared memory from now on; called before any other thread knows the channel."""
        self._writer = writer
        self._arena_reader = reader
        self._threshold = threshold

    def fileno(self) -> int:
        """Return the descriptor, or -1 when closed."""
        return self._fd

    @property
    def backlog(self) -> int:
        """Return how many bytes wait to be written."""
        return self._backlog.nbytes if self.waiting else 0  # an interrupt may have left it counting what never came

    def send(self, frame: Frame) -> bool:
        """Send a frame: write what fits now and keep the rest for ``flush``.

        The frame's buffers may be changed as soon as this returns.

        Returns:
            Whether all is done: it is written, or waits for somebody who watches already (``is_watched``).  If not,
            somebody must ``flush`` when the descriptor is writable.

        Raises:
            BrokenPipeError: the other side is gone, or the channel is closed; nothing will be sent any more.
            MemoryError: there is none for the part that does not fit; nothing was sent.
        """
        if self._revoked:
            self._cancel_revoked()
        kind, flags, ref, header, buffers, _ = frame
        if not buffers:
            return self._queue(Outgoing(_joined(pack_prefix(kind, flags, ref, len(header)), header)))
        outgoing = Outgoing()
        try:
            return self._send(outgoing, frame)
        except BaseException:
            # As in _send: on Python 3.10 a second interrupt may come before the first line of what handles the first.
            if not outgoing.is_queued:
                self._revoked.append(outgoing.segments)
                self._cancel_revoked()
            raise

    def _send(self, outgoing: Outgoing, frame: Frame) -> bool:
        """Place the buffers, queue the frame, and write what fits."""
        try:
            segments = outgoing.segments
            inline = self._place(frame, segments)
            prefix = pack_prefix(frame.kind, frame.flags, frame.ref, len(frame.header), segments)
            return self._queue(outgoing.fill(_joined(prefix, frame.header) + inline))
        except BaseException:
            if not outgoing.is_queued:
                self._revoked.append(outgoing.segments)  # in one C call: a second interrupt does not come before it
                self._cancel_revoked()
            raise

    def _queue(self, outgoing: Outgoing) -> bool:
        """Queue a frame, and write what fits; return what ``send`` does."""
        with self._lock:
            if self._broken is not None or self._fd < 0:
                self._check_locked()
            is_flushed = self.is_watched and bool(self.waiting)
            self._backlog.append(outgoing)  # from here on the frame goes out whole, whatever interrupts this thread
            if is_flushed:
                self._backlog.own(outgoing)
                return True
            return self._flush_locked(outgoing)

    def _place(self, frame: Frame, segments: list[Segment]) -> list[Buffer]:
        """Copy big buffers into shared memory; fill ``segments``, return those that stay in the pipe."""
        inline: list[Buffer] = []
        writer = self._writer if frame.kind in _IN_MEMORY else None
        for view in frame.buffers:
            if view.nbytes >= self._threshold and writer is not None:
                if writer.segment_of(view, self._party, segments) or writer.put(view, self._party, segments):
                    self.in_memory += 1
                    continue
                self.in_pipe += 1
            if view.nbytes:
                inline.append(view)
            segments.append(Segment(view.nbytes))
        return inline

    def _cancel_revoked(self) -> None:
        """Take back what was placed in memory for frames that were never queued."""
        while self._revoked:
            segments = self._revoked[0]
            for segment in segments:
                if segment.offset >= 0 and self._writer is not None:
                    self._writer.cancel(segment)
            with suppress(ValueError):  # another thread has done the same
                self._revoked.remove(segments)

    def flush(self) -> bool:
        """Write what waits and fits; return whether nothing is left.

        Raises:
            BrokenPipeError: the other side is gone, or the channel is closed.
        """
        with self._lock:
            self._check_locked()
            return self._flush_locked()

    def _check_locked(self) -> None:
        """Raise if nothing can be sent.  Requires ``_lock``."""
        if self._broken is not None:
            raise BrokenPipeError(f"{self.name}: {self._broken}") from self._broken
        if self._fd < 0:
            raise BrokenPipeError(f"{self.name}: the channel is closed")

    def _flush_locked(self, new: Outgoing | None = None) -> bool:
        """Write until the pipe is full or nothing is left; copy what then is left of ``new``.  Requires ``_lock``."""
        if self._flushing:  # re-entered on this thread: the outer call goes on with the backlog
            if new is not None:
                self._backlog.own(new)
            return False
        self._flushing = True
        try:
            return self._drain_locked()
        finally:
            try:
                if new is not None and self.waiting:
                    self._backlog.own(new)
            finally:
                self._flushing = False

    def _drain_locked(self) -> bool:
        """Write until the pipe is full or nothing is left; return which.  Requires ``_lock``.

        A function of its own: what a signal handler raises where a loop begins anew passes the ``finally`` around that
        loop by, in Python 3.12 and 3.13.
        """
        frames = self.waiting
        while frames:
            if len(frames) > 1:
                with suppress(MemoryError):  # then one by one
                    self._backlog.merge()
            outgoing = frames[0]
            parts = outgoing.remaining() if outgoing.written else outgoing.parts
            if not parts:  # an interrupt came when all was written
                self._backlog.wrote(0)
                continue
            try:
                # One C call makes the system call and keeps its count: a signal cannot come between the two.
                if len(parts) == 1:
                    outgoing.written.extend(map(self._socket.send, parts, _NO_SIGNAL))
                else:
                    outgoing.written.extend(map(self._socket.sendmsg, (parts[:_MOST_VECTORS],), ((),), _NO_SIGNAL))
            except BlockingIOError:
                return False
            except OSError as error:
                self._broken = error.with_traceback(None)  # whose frames would keep the caller as long as this lives
                self._backlog.clear()
                raise BrokenPipeError(f"{self.name}: {error}") from error
            self._backlog.wrote(outgoing.written[-1])
        return True

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived, without waiting.

        What a signal handler raises in here may lose what was read: it is for threads in which none does.

        Sets ``ended`` at the end of the stream, and ``fault`` when the other side broke the rules or ended inside a
        frame; a channel with a fault is broken.
        """
        frames = self._take_ahead() if self.ahead else []
        for _ in range(0 if self.ended else _MOST_READS):
            try:
                count, size = (self._read_on if self._reader.in_frame else self._read_anew)(frames)
                if not count:
                    self.hung_up = True
                    self._reader.end()
                    self.ended = True
                if self.ended or count < size:
                    break
            except BlockingIOError:
                break
            except OSError:  # ECONNRESET: the peer closed with bytes of ours unread; what it had sent came first
                self.ended = self.hung_up = True
                break
            except (RemoteProtocolError, MemoryError) as error:
                self._break(error)
                break
        if self.is_restricted and frames:
            return [frame._replace(flags=frame.flags | RESTRICTED) for frame in frames]
        return frames

    def _read_anew(self, frames: list[Frame]) -> tuple[int, int]:
        """Read from the beginning of a frame; return how many bytes came, and how many could have."""
        try:
            data = self._socket.recv(READ_SIZE)
        except MemoryError:
            return self._read_on(frames)  # into memory that is there already
        memory, name, add, size = self._arena_reader, self.name, frames.append, len(data)
        self.received += size
        end = take_small(data, 0, size, add, add_placed=lambda raw: add(resolve(raw, memory, name)))
        if end < size:
            frames += self._accept(self._reader.feed(data[end:]))
        return size, READ_SIZE

    def _read_on(self, frames: list[Frame]) -> tuple[int, int]:
        """Read on in a frame, straight into the memory in which a large part of it stays."""
        room = self._reader.buffer()
        size = len(room)  # the view is released when the reader advances
        count = os.readv(self._fd, [room])
        self.received += count
        frames += self._accept(self._reader.advance(count)) if count else []
        return count, size

    def _accept(self, arrived: list[Frame | RawFrame]) -> list[Frame]:
        """Return what came, with its buffers."""
        if self._reader.broken:  # behind frames that were whole, in the same read: nothing more may ever come
            self._break(RemoteProtocolError(self._reader.broken))
        return [f if isinstance(f, Frame) else resolve(f, self._arena_reader, self.name) for f in arrived]

    def _take_ahead(self) -> list[Frame]:
        """Return what a borrower of this channel has read and left."""
        ahead, self.ahead = self.ahead, []
        frames: list[Frame] = []
        try:
            for item in ahead:
                self.received += 0 if isinstance(item, Frame) else len(item)
                frames += [item] if isinstance(item, Frame) else self._accept(self._reader.feed(item))
        except RemoteProtocolError as error:
            self._break(error)
        return frames

    def can_be_lent(self) -> bool:
        """Tell whether somebody else may read what comes next: it begins with a frame, and nothing waits to be sent."""
        return not (self.ended or self._reader.in_frame or self.waiting or self.is_watched or self._fd < 0)

    def recv(self) -> Callable[[int], bytes]:
        """Return what reads bytes: C code that does not wait."""
        return self._socket.recv

    def _break(self, fault: BaseException) -> None:
        self.ended = True
        # As in _drain_locked; and where memory has run out, the system's error has no text.
        fault = fault.with_traceback(None) if str(fault) else RemoteProtocolError("there is no memory for what it sent")
        self.fault = fault
        with self._lock:
            self._broken = self._broken or fault

    def hang_up(self) -> None:
        """Have the other side see the end of the stream now, whoever has copies of this descriptor; idempotent."""
        with self._lock, suppress(OSError):  # it is closed, or the other side is
            self._socket.shutdown(_socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor; idempotent.  Views of received buffers stay readable."""
        with self._lock:
            self._backlog.clear()
            self._fd = -1
            self._socket.close()

    def close_after_fork(self) -> None:
        """Close a forked child's copy of the descriptor, without the lock, which another thread may have held."""
        self._fd = -1
        self._socket.close()


def _joined(prefix: bytes, header: Buffer) -> list[Buffer]:
    """Return a frame's first parts: one, if joining them is cheap."""
    return [prefix + header] if len(header) < _JOIN_BELOW else [prefix, header]
