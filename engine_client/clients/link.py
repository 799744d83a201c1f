"""What a client holds of one engine: its process, its channel, and the memory that outlives it.

Threads: set up by the thread that starts the engine; afterwards ``last_words`` and ``farewell`` belong to the reader.
"""

from __future__ import annotations

from typing import Final

from engine_client.clients.calls import Reply
from engine_client.clients.meter import TokenMeter
from engine_client.ipc.arena import ArenaReader
from engine_client.ipc.channel import Channel
from engine_client.ipc.descriptors import close_all
from engine_client.ipc.foreign import ForeignHandle
from engine_client.ipc.handle import ChildHandle
from engine_client.ipc.stacks import FaultMemory
from engine_client.ipc.status_page import StatusReader
from engine_client.protocol.lifecycle import Lifecycle, State

__all__ = ["STARTING", "EngineLink", "LinkGoneError"]

STARTING: Final = "starting the process"
"""The phase before an engine's first message."""


class EngineLink:
    """One engine as its client sees it; owns the descriptors in it, and ``close`` releases them.

    Args:
        rank: data-parallel rank.
        handle: its process.
        channel: to it.
        arena: what it sends through shared memory.
        status: its status page.
        lifeline: write end of the pipe whose closing ends it; -1 for an engine that somebody else has launched.
        faults: descriptor of the memory that fault reports go to; -1 as above.
        state: where it is in its life.
    """

    def __init__(  # noqa: PLR0913  # what a start makes, all at once
        self,
        rank: int,
        handle: ChildHandle | ForeignHandle,
        channel: Channel,
        arena: ArenaReader,
        status: StatusReader,
        *,
        lifeline: int = -1,
        faults: int = -1,
        state: State = State.LAUNCHED,
    ) -> None:
        self.rank = rank
        self.handle = handle
        self.pid = handle.pid
        self.channel = channel
        self.arena = arena
        self.status = status
        self.lifeline = lifeline
        self.faults = FaultMemory(faults)
        self._fds = [fd for fd in (lifeline,) if fd >= 0]  # until it is closed
        self.phase = STARTING
        self.life = Lifecycle(self.title, state)  # the starting thread's, then the reader's
        self.over = Reply()  # ends once its death has been dealt with
        # -- reader thread only, once it runs --
        self.meter = TokenMeter()
        self.last_words: tuple[BaseException, str] | None = None
        self.farewell: str | None = None

    def __repr__(self) -> str:
        return f"<EngineLink rank={self.rank} pid={self.pid} {self.life.state.name} {self.phase} {self.channel!r}>"

    @property
    def title(self) -> str:
        """Return how messages name this engine."""
        return f"engine core {self.rank} (pid {self.pid})"

    @property
    def is_foreign(self) -> bool:
        """Tell whether another process has launched this engine, which is then not this one's to end."""
        return isinstance(self.handle, ForeignHandle)

    def read_stacks(self) -> str:
        """Return what ``faulthandler`` wrote in the engine and nobody has taken; empty when nothing."""
        return self.faults.read()

    def log_lines(self) -> list[str]:
        """Return the last lines that the engine logged."""
        return self.status.log_lines()

    def close(self) -> None:
        """Release everything but the process; idempotent.  Views that the user still holds stay readable."""
        if self.is_foreign:
            self.channel.hang_up()  # its launcher may have a copy of this end
        self.channel.close()
        self.arena.close()
        self.status.close()
        self.faults.close()
        close_all(self._fds)
        if isinstance(self.handle, ForeignHandle):
            self.handle.close()

    def close_after_fork(self) -> None:
        """Close the copies that a forked child inherited, without touching a lock that another thread may have held."""
        close_all(self._fds)
        self.faults.close()
        self.channel.close_after_fork()
        self.arena.close_after_fork()
        self.status.close()
        if isinstance(self.handle, ForeignHandle):
            self.handle.close()


class LinkGoneError(Exception):
    """An engine takes nothing any more; what to tell the caller is known once its death was dealt with."""

    def __init__(self, link: EngineLink) -> None:
        super().__init__(link.title)
        self.link = link
