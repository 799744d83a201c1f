"""Start engines: launch their processes and lead each through the handshake, within one deadline.

::

    launch ─▶ HELLO ─▶ INIT ─▶ STATUS* ─▶ READY        all ranks at once, in one selector
                │                    └─▶ FAILED ─┐
                └──────── exit, deadline ────────┴─▶ StartupError, HandshakeTimeout

Invariants: I3 (what a process sent before it ended is read before its end counts), I7 (the one wait is bounded by the
deadline), I11 (a link is registered with its owner as soon as it exists).

Threads: the thread that constructs the client, so that ``on_progress`` is called there and Ctrl-C works.
"""

from __future__ import annotations

import fcntl
import os
import selectors
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from engine_client.clients.endings import explain_exit, name_and_text
from engine_client.clients.front_ends import FrontEnds, pipe_pair
from engine_client.clients.link import STARTING, EngineLink
from engine_client.clients.relog import relog
from engine_client.config import ClientOptions
from engine_client.deadline import Deadline
from engine_client.errors import HandshakeTimeout, RemoteProtocolError, StartupError
from engine_client.ipc.arena import ArenaReader, ArenaWriter, create_memory
from engine_client.ipc.channel import Channel
from engine_client.ipc.engine_fds import EngineFds, GroupFds
from engine_client.ipc.exits import exit_name
from engine_client.ipc.launcher import launch
from engine_client.ipc.processes import memory_hint
from engine_client.ipc.status_page import StatusReader
from engine_client.messages import EngineCoreReadyResponse
from engine_client.progress import READY
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import (
    PROTOCOL_VERSION,
    Init,
    decode_dead,
    decode_ready,
    decode_status,
    decode_text,
    encode_init,
)

__all__ = ["Handshake", "launch_engine"]

_LOOK: Final = 0.05
"""Seconds between two looks whether a start is still wanted."""

_EXIT_TIMEOUT: Final = 1.0
"""Seconds that an engine which has closed its channel gets to end, so that its exit can be told."""

_FIRST_INHERITABLE: Final = 3
"""Descriptors 0 to 2 are the standard streams; a host that closed them must not have ours taken for them."""


class _Fds:
    """Descriptors without another owner; closed at the end of the block unless they were given away."""

    def __init__(self) -> None:
        self._fds: set[int] = set()

    def own(self, *fds: int) -> list[int]:
        """Own descriptors, at numbers clear of the standard streams; return those."""
        self._fds.update(fds)
        return [self._move(fd) if fd < _FIRST_INHERITABLE else fd for fd in fds]

    def _move(self, fd: int) -> int:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_INHERITABLE)
        self._fds.add(moved)
        self._fds.discard(fd)
        os.close(fd)
        return moved

    def give(self, fd: int) -> int:
        """Return a descriptor that has another owner from now on."""
        self._fds.discard(fd)
        return fd

    def __enter__(self) -> _Fds:
        return self

    def __exit__(self, *_: object) -> None:
        while self._fds:
            os.close(self._fds.pop())


def launch_engine(
    rank: int,
    options: ClientOptions,
    writer: ArenaWriter,
    group: GroupFds | None = None,
    front_ends: FrontEnds | None = None,
) -> EngineLink:
    """Start one engine process and return the link to it.

    Args:
        rank: data-parallel rank; also the reader's number in the request memory.
        options: of the client.
        writer: of the memory that requests go through.
        group: what ranks in lock-step share.
        front_ends: those in other processes.

    Raises:
        OSError: descriptors, memory or processes have run out; nothing is left behind.
        StartupError: the process could not be started.
    """
    front_ends = front_ends or FrontEnds(0)
    with _Fds() as fds, ExitStack() as undo:
        undo.callback(front_ends.launched)
        ours, theirs = fds.own(*pipe_pair())
        held, lifeline = fds.own(*os.pipe())
        page, faults, results = (
            fds.own(create_memory(f"engine-{name}-{rank}"))[0] for name in ("status", "faults", "results")
        )
        status = StatusReader(page)
        undo.callback(status.close)
        fds.give(page)
        reader = ArenaReader(results)
        undo.callback(reader.close)
        fds.give(results)
        name = f"engine core {rank}"
        channel = Channel(ours, name=name, writer=writer, reader=reader, threshold=options.arena_threshold, party=rank)
        channel.is_restricted = options.codec == "restricted"
        undo.callback(channel.close)
        fds.give(ours)
        handle = launch(
            options.start_method,
            name=f"engine-core-{rank}",
            fds=EngineFds(theirs, held, page, faults, writer.fd, results, group, front_ends.connect(rank)),
            parent_fds=(ours, lifeline, *front_ends.own_fds()),
        )
        undo.pop_all()
        front_ends.launched()
        return EngineLink(rank, handle, channel, reader, status, lifeline=fds.give(lifeline), faults=fds.give(faults))


class Handshake:
    """Leads links that were just launched to READY.

    Args:
        links: to the engines.
        make_init: the INIT of a rank.
        token: what READY must repeat.
        options: of the client; ``on_progress`` is called here.
        deadline: of the whole start.
        check: called now and then; what it raises ends the start.
    """

    def __init__(
        self,
        links: list[EngineLink],
        make_init: Callable[[int], Init],
        token: str,
        options: ClientOptions,
        deadline: Deadline,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._check = check
        self._waiting = {link.rank: link for link in links}
        self._count = len(links)
        self._reports: dict[str, dict[int, tuple[int, int]]] = {}  # done and total by phase and rank
        self._make_init = make_init
        self._token = token
        self._options = options
        self._deadline = deadline
        self._mute: dict[int, Deadline] = {}  # ranks that can say nothing more: until when they have to end
        self._failures: dict[int, tuple[EngineLink, str, BaseException | None]] = {}
        self._responses: dict[int, EngineCoreReadyResponse] = {}

    def run(self) -> dict[int, EngineCoreReadyResponse]:
        """Wait until every rank is READY; return what each reported.

        Raises:
            StartupError: an engine failed; names the ranks that did, how, and the cause.
            HandshakeTimeout: the deadline came first.
        """
        with selectors.DefaultSelector() as selector:
            for link in self._waiting.values():
                selector.register(link.channel.fileno(), selectors.EVENT_READ, (link, "channel"))
                selector.register(link.handle.sentinel, selectors.EVENT_READ, (link, "sentinel"))
            while self._waiting:
                self._flush(selector)
                if self._check is not None:
                    self._check()
                # A host that was stopped while it waited is told of nothing, if the time was over when it woke up.
                events = selector.select(self._patience()) or selector.select(0)
                for key, _ in sorted(events, key=lambda event: event[0].data[1]):  # channels before sentinels
                    self._serve(selector, *key.data)
                self._fail_mute()
                if self._failures:
                    raise self._startup_error()
                if self._waiting and self._deadline.expired():
                    raise self._timeout_error()
        return self._responses

    def _patience(self) -> float | None:
        """Return for how many seconds nothing need happen."""
        mute = [deadline for rank, deadline in self._mute.items() if rank in self._waiting]
        nearest = min((*mute, self._deadline), key=lambda deadline: deadline.at)
        return nearest.remaining() if self._check is None else nearest.capped(_LOOK)

    def _fail_mute(self) -> None:
        """Give up engines that have closed their channel and did not end."""
        for rank, deadline in self._mute.items():
            if rank in self._waiting and deadline.expired():
                link = self._waiting[rank]
                self._fail(link, f"closed its channel while {link.phase}, before it was ready, and did not end", None)

    def _flush(self, selector: selectors.BaseSelector) -> None:
        for link in self._waiting.values():
            if not link.channel.ended:
                write = selectors.EVENT_WRITE if not self._try_flush(link) else 0
                selector.modify(link.channel.fileno(), selectors.EVENT_READ | write, (link, "channel"))

    def _try_flush(self, link: EngineLink) -> bool:
        try:
            return link.channel.flush()
        except BrokenPipeError:
            return True  # its sentinel tells what happened

    def _serve(self, selector: selectors.BaseSelector, link: EngineLink, what: str) -> None:
        rank = link.rank
        if rank not in self._waiting:
            return
        if not link.channel.ended:
            self._read(selector, link, to_the_end=what == "sentinel")
        if rank not in self._waiting:
            selector.unregister(link.handle.sentinel)
        elif link.channel.fault is not None:
            self._fail(link, f"sent something unintelligible: {link.channel.fault}", link.channel.fault)
        elif what == "sentinel":
            self._fail(link, self._exit_text(link), None)

    def _read(self, selector: selectors.BaseSelector, link: EngineLink, *, to_the_end: bool) -> None:
        """Take what has arrived; of a process that has ended, all that it has left."""
        before = -1
        while not link.channel.ended and (before < 0 or (to_the_end and link.channel.received > before)):
            before = link.channel.received
            for frame in link.channel.receive():
                self._take(link, frame)
        if link.channel.ended:
            selector.unregister(link.channel.fileno())
            self._mute[link.rank] = Deadline(_EXIT_TIMEOUT)

    def _take(self, link: EngineLink, frame: Frame) -> None:
        """Move one engine along; a message that does not fit ends its start."""
        if link.rank not in self._waiting:
            return
        try:
            self._advance(link, frame)
        except Exception as error:  # noqa: BLE001  # decoding runs the engine's code; only this start fails
            self._fail(link, f"sent a message that cannot be used: {name_and_text(error)}", error)

    def _advance(self, link: EngineLink, frame: Frame) -> None:
        kind = frame.kind
        link.life.received(kind)
        if kind == Kind.HELLO:
            version, _ = decode_text(frame)
            if version != PROTOCOL_VERSION:
                version = version if type(version) is int else "?"  # nothing else is made a text: it may have no end
                raise RemoteProtocolError(f"it speaks protocol version {version}, this client {PROTOCOL_VERSION}")
            link.phase = "importing and building the engine"
            init = encode_init(self._make_init(link.rank))
            link.life.sending(init.kind)
            link.channel.send(init)
            self._report(link, 0, 0)
        elif kind == Kind.STATUS:
            link.phase, done, total = decode_status(frame)
            self._report(link, done, total)
        elif kind == Kind.LOG:
            relog(link, frame)
        elif kind == Kind.READY:
            token, response = decode_ready(frame)
            if token != self._token:
                raise RemoteProtocolError("it belongs to another client")
            link.phase = READY
            self._responses[link.rank] = response
            del self._waiting[link.rank]
            self._report(link, 1, 1)
        elif kind == Kind.FAILED:
            error, link.phase = decode_dead(frame)
            text = f"failed while {link.phase}: {name_and_text(error)}"
            self._fail(link, text, error)
        else:  # GOODBYE: the table allows nothing else here
            self._fail(link, f"was shut down while {link.phase}, before it was ready ({decode_text(frame)})", None)

    def _report(self, link: EngineLink, done: int, total: int) -> None:
        """Tell the user of progress; an exception of the callback ends the start, with that as the cause."""
        if self._options.on_progress is not None:
            reports = self._reports.setdefault(link.phase, {})
            reports[link.rank] = done, total
            done = sum(done for done, _ in reports.values())
            total = self._count if link.phase == READY else sum(total for _, total in reports.values())
            try:
                self._options.on_progress(link.phase, done, total)
            except Exception as error:  # noqa: BLE001  # the user's code: its error is the start's
                text = f"was given up while {link.phase}: on_progress raised {name_and_text(error)}"
                self._fail(link, text, error)

    def _fail(self, link: EngineLink, text: str, error: BaseException | None) -> None:
        self._failures.setdefault(link.rank, (link, text, error))
        self._waiting.pop(link.rank, None)

    def _exit_text(self, link: EngineLink) -> str:
        code = link.handle.exitcode
        parts = [f"ended with {explain_exit(exit_name(code))} while {link.phase}, before it was ready"]
        if code == -9:
            parts.append(memory_hint())
        if self._options.start_method in ("spawn", "forkserver") and link.phase == STARTING:
            parts.append(
                f"the start method {self._options.start_method!r} imports the main script again in the engine: guard "
                'what it does with `if __name__ == "__main__":`, or use the default start method'
            )
        stacks = link.read_stacks()
        if stacks:
            parts.append(f"Python stacks of the engine:\n{stacks.rstrip()}")
        lines = link.log_lines()
        if lines:
            parts.append("Last lines that the engine logged:\n" + "\n".join(lines))
        return "\n".join(parts)

    def _startup_error(self) -> StartupError:
        lines = []
        cause = None
        for _, (link, text, error) in sorted(self._failures.items()):
            remote = str(getattr(error, "remote_traceback", "") or "").rstrip()
            lines.append(f"{link.title} {text}" + (f"\n{remote}" if remote else ""))
            cause = cause or error
        startup_error = StartupError("Engine core initialization failed: " + "\n".join(lines))
        startup_error.__cause__ = cause
        return startup_error

    def _timeout_error(self) -> HandshakeTimeout:
        limit = self._deadline.timeout
        stuck = ", ".join(f"{link.title} while {link.phase}" for _, link in sorted(self._waiting.items()))
        return HandshakeTimeout(
            f"Timed out waiting for engine core processes to start: waited {limit:g} s (the limit for the whole "
            f"start), stuck: {stuck}. This is often caused by slow weight loading for large models. To raise the "
            "limit, set VLLM_ENGINE_READY_TIMEOUT_S=<seconds> or ClientOptions(ready_timeout=<seconds>)."
        )
