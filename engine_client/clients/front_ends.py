"""The connections between engines that are launched here and front-ends in other processes.

::

    engine of rank r ◀── channel, results ──▶ endpoint of front-end i ◀── requests (one for all ranks)

Invariants: I5 (every descriptor is this object's until an endpoint has it), I11.

Threads: used by the thread that launches.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import asdict

from engine_client.clients.endpoint import Endpoint, RankEnd
from engine_client.clients.link import EngineLink
from engine_client.ipc.arena import create_memory
from engine_client.ipc.descriptors import close_all
from engine_client.ipc.engine_fds import FrontEndFds
from engine_client.ipc.group import Group
from engine_client.ipc.user_main import describe_main
from engine_client.messages import EngineCoreReadyResponse

__all__ = ["FrontEnds", "pipe_pair"]


class FrontEnds:
    """Makes what connects engines with ``count`` front-ends; ends with ``endpoints`` or ``close``.

    Raises:
        OSError: memory or descriptors have run out.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._open: list[int] = []
        self._requests: list[int] = []  # of each front-end
        self._engine_ends: list[int] = []  # of the rank that is being launched
        self._ends: dict[int, list[tuple[int, int]]] = {}  # channel and results of each front-end, by rank
        try:
            for index in range(count):
                self._requests.append(self._own(create_memory(f"engine-requests-{index}")))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<FrontEnds {self.count} ranks={sorted(self._ends)}>"

    def _own(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    def connect(self, rank: int) -> tuple[FrontEndFds, ...]:
        """Make the connections of one rank; return its ends, which ``launched`` closes."""
        engine_ends = []
        for index, requests in enumerate(self._requests):
            ours, theirs = pipe_pair()
            self._engine_ends.append(theirs)
            channel = self._own(ours)
            results = self._own(create_memory(f"engine-results-{rank}-{index}"))
            self._ends.setdefault(rank, []).append((channel, results))
            engine_ends.append(FrontEndFds(theirs, requests, results))
        return tuple(engine_ends)

    def own_fds(self) -> list[int]:
        """Return the front-ends' ends of all connections so far, which an engine must not have but by ``connect``."""
        return list(self._open)

    def launched(self) -> None:
        """Close the engine's ends: it has copies."""
        close_all(self._engine_ends)

    def endpoints(
        self,
        links: Mapping[int, EngineLink],
        responses: Mapping[int, EngineCoreReadyResponse],
        group: Group | None = None,
    ) -> list[Endpoint]:
        """Return the endpoints, by client index; what was made here is theirs from now on.

        Raises:
            OSError: descriptors have run out; everything is still this object's.
        """
        pages = [[self._own(_copy(links[rank].status.fd)) for rank in sorted(links)] for _ in self._requests]
        groups = [None if group is None else self._own(_copy(group.fds.page)) for _ in self._requests]
        made = []
        self._open.clear()
        for index, requests in enumerate(self._requests):
            ends = [
                RankEnd(rank, links[rank].pid, *self._ends[rank][index], page, asdict(responses[rank]))
                for rank, page in zip(sorted(links), pages[index], strict=True)
            ]
            made.append(
                Endpoint(
                    index,
                    self.count,
                    requests,
                    ends,
                    group=groups[index],
                    main=describe_main(),
                    launcher_pid=os.getpid(),
                )
            )
        return made

    def close(self) -> None:
        """Close what no endpoint has; idempotent."""
        self.launched()
        close_all(self._open)


def _copy(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)  # clear of the standard streams, which a host may have closed


def pipe_pair() -> tuple[int, int]:
    """Return the two descriptors of a duplex ``multiprocessing.Pipe``, both 3 or above."""
    from multiprocessing import Pipe  # noqa: PLC0415  # costs 10 ms that a mere import of the package must not

    ours, theirs = Pipe(duplex=True)
    with ours, theirs:
        first = _copy(ours.fileno())
        try:
            return first, _copy(theirs.fileno())
        except OSError:
            os.close(first)
            raise
