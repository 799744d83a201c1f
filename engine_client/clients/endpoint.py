"""What a front-end process needs to use engines that another process has launched.

::

    launcher: make_endpoint ─▶ Endpoint ──(multiprocessing arguments, or pass_fds)──▶ front-end: take ─▶ EngineLink …

It consists of open descriptors and a description of them, so it travels only while the front-end's process is being
started.  An endpoint is for one front-end, once.

Invariants: I5 (a descriptor is the endpoint's until it is taken), I11.

Threads: used by one thread at a time.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine_client.ipc.descriptors import above_stdio, close_all
from engine_client.messages import EngineCoreReadyResponse

__all__ = ["Endpoint", "RankEnd"]

_mine: weakref.WeakSet[Endpoint] = weakref.WeakSet()
"""The endpoints whose descriptors are open in this process: those it made, or inherited by fork."""


@dataclass(frozen=True)
class RankEnd:
    """The front-end's ends of what connects it with one engine.

    Args:
        rank, pid: of the engine.
        channel: socket of the pipe to it.
        arena_in: memory that it writes big buffers for this front-end to.
        page: memory of its status page.
        response: what it said when it was ready.
    """

    rank: int
    pid: int
    channel: int
    arena_in: int
    page: int
    response: dict[str, Any]

    def ready_response(self) -> EngineCoreReadyResponse:
        """Return the engine's real capacities."""
        return EngineCoreReadyResponse(**self.response)


class Endpoint:
    """One front-end's access to launched engines; give it as ``client_addresses``.

    Hand it to the front-end's process as an argument of ``multiprocessing.Process``, or start that process with
    ``pass_fds=endpoint.pass_fds`` and let it call ``Endpoint.from_text(text)`` with ``str(endpoint)``.

    Args:
        index: of the front-end.
        count: how many front-ends these engines have.
        arena_out: memory that the front-end writes big buffers to.
        ranks: of the engines.
        launcher_pid: of the process that has made this.
    """

    def __init__(self, index: int, count: int, arena_out: int, ranks: Iterable[RankEnd], launcher_pid: int) -> None:
        self.index = index
        self.count = count
        self.arena_out = arena_out
        self.ranks = tuple(ranks)
        self.launcher_pid = launcher_pid
        self._open = list(self.pass_fds)  # those that are this object's to close
        _mine.add(self)

    def __repr__(self) -> str:
        state = "open" if self._open else "taken or closed"
        return f"<Endpoint {self.index} of {self.count} {state} ranks={[end.rank for end in self.ranks]}>"

    def __del__(self) -> None:
        close_all(getattr(self, "_open", []))

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """Return the descriptors, for ``subprocess.Popen(pass_fds=…)``."""
        return (self.arena_out, *(fd for end in self.ranks for fd in (end.channel, end.arena_in, end.page)))

    def __str__(self) -> str:
        ranks = [asdict(end) for end in self.ranks]
        return json.dumps([self.index, self.count, self.arena_out, ranks, self.launcher_pid])

    @classmethod
    def from_text(cls, text: str, fds: Sequence[int] | None = None) -> Endpoint:
        """Return the endpoint that ``str`` was called on, in a process that has inherited its descriptors.

        Args:
            text: what ``str`` returned.
            fds: the numbers that the descriptors have here, in the order of ``pass_fds``; None: the same.

        Raises:
            ValueError: the text is no endpoint's, or the descriptors were not inherited.
        """
        try:
            index, count, arena_out, ranks, launcher_pid = json.loads(text)
            ends = [RankEnd(**end) for end in ranks]
            fds = fds or [arena_out, *(fd for end in ends for fd in (end.channel, end.arena_in, end.page))]
            for fd in fds:
                os.set_inheritable(fd, False)
            take = iter(fds)
            arena_out = next(take)
            ends = [replace(end, channel=next(take), arena_in=next(take), page=next(take)) for end in ends]
        except OSError as error:
            raise ValueError(
                f"the descriptors of this endpoint were not inherited ({error}): start the process with "
                "pass_fds=endpoint.pass_fds"
            ) from None
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"this is no endpoint's text: {error}") from None
        return cls(index, count, arena_out, ends, launcher_pid)

    def __reduce__(self) -> Any:
        from multiprocessing.context import get_spawning_popen  # noqa: PLC0415  # needed for this alone
        from multiprocessing.reduction import DupFd  # noqa: PLC0415  # as above

        if get_spawning_popen() is None:
            raise TypeError(
                "an endpoint can be pickled only while a process is being started: give it to multiprocessing.Process "
                "as an argument, or start the process with pass_fds=endpoint.pass_fds"
            )
        self._check_open()
        return _rebuild, (str(self), [DupFd(fd) for fd in self.pass_fds])

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"endpoint {self.index} was used or closed already; each front-end needs one of its own")

    def take(self) -> Endpoint:
        """Return copies of the descriptors, whose owner is the caller; this endpoint and all others here are closed.

        A process that was forked has the endpoints of other front-ends, too, which it must not keep open.

        Raises:
            ValueError: it was taken or closed before.
        """
        self._check_open()
        fds, self._open = self._open, []
        if os.getpid() != self.launcher_pid:
            for other in list(_mine):
                other.close()
        return Endpoint.from_text(str(self), fds)

    def disown(self, fd: int) -> int:
        """Return a descriptor that has another owner from now on."""
        self._open.remove(fd)
        return fd

    def close(self) -> None:
        """Close the descriptors; idempotent.  Those of processes that have them stay open."""
        close_all(self._open)


def _rebuild(text: str, passed: list[Any]) -> Endpoint:
    """Make an endpoint in the process that was started."""
    return Endpoint.from_text(text, [above_stdio(each.detach()) for each in passed])
