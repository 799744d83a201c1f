"""The connections between engines that are launched here and front-ends in other processes.

::

    engine of rank r ◀── channel, results ──▶ endpoint of front-end i ◀── requests (one for all ranks)

Invariants: I5 (every descriptor is this object's until an endpoint has it), I11.

Threads: used by the thread that launches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict

from engine_client.clients.endpoint import Endpoint, RankEnd
from engine_client.clients.link import EngineLink
from engine_client.ipc.arena import create_memory
from engine_client.ipc.descriptors import FrontEndFds, above_stdio, close_all
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
        fd = above_stdio(fd)
        self._open.append(fd)
        return fd

    def connect(self, rank: int) -> tuple[FrontEndFds, ...]:
        """Make the connections of one rank; return its ends, which ``launched`` closes."""
        engine_ends = []
        for index, requests in enumerate(self._requests):
            ours, theirs = pipe_pair()
            self._engine_ends.append(above_stdio(theirs))
            channel = self._own(ours)
            results = self._own(create_memory(f"engine-results-{rank}-{index}"))
            self._ends.setdefault(rank, []).append((channel, results))
            engine_ends.append(FrontEndFds(self._engine_ends[-1], requests, results))
        return tuple(engine_ends)

    def own_fds(self, rank: int) -> list[int]:
        """Return the front-ends' ends of a rank's connections, which the engine must not have."""
        return [channel for channel, _ in self._ends.get(rank, ())]

    def launched(self) -> None:
        """Close the engine's ends: it has copies."""
        close_all(self._engine_ends)

    def endpoints(
        self, links: Mapping[int, EngineLink], responses: Mapping[int, EngineCoreReadyResponse]
    ) -> list[Endpoint]:
        """Return the endpoints, by client index; what was made here is theirs from now on."""
        made = []
        for index, requests in enumerate(self._requests):
            ends = [
                RankEnd(
                    rank,
                    links[rank].pid,
                    self._ends[rank][index][0],
                    self._ends[rank][index][1],
                    self._own(os.dup(links[rank].status.fd)),
                    asdict(responses[rank]),
                )
                for rank in sorted(links)
            ]
            made.append(Endpoint(index, self.count, requests, ends, os.getpid()))
        self._open.clear()
        return made

    def close(self) -> None:
        """Close what no endpoint has; idempotent."""
        self.launched()
        close_all(self._open)


def pipe_pair() -> tuple[int, int]:
    """Return the two descriptors of a duplex ``multiprocessing.Pipe``."""
    from multiprocessing import Pipe  # noqa: PLC0415  # costs 10 ms that a mere import of the package must not

    ours, theirs = Pipe(duplex=True)
    with ours, theirs:
        first = os.dup(ours.fileno())
        try:
            return first, os.dup(theirs.fileno())
        except OSError:
            os.close(first)
            raise
