"""Starts ranks again that have died, with a back-off and a limit (``ClientOptions.on_engine_death="restart"``).

Invariants: I6, I10 (a rank that cannot be started again stays dead, and says why).

Threads: ``lost`` is called on the reader's thread.  A ``Restarter`` owns one thread for each rank that is dead and may
come back; the end of the session ends it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final

from engine_client.clients.elastic import Elastic
from engine_client.clients.endings import Ending, name_and_text
from engine_client.clients.session import Session

__all__ = ["Restarter"]

_log = logging.getLogger("engine_client.session")

_STABLE: Final = 60.0
"""Seconds of life after which a rank's earlier failures are forgotten."""


class Restarter:
    """Restarts the ranks of one client.

    Args:
        session: of the client.
        elastic: brings ranks up.
    """

    def __init__(self, session: Session, elastic: Elastic) -> None:
        self._session = session
        self._elastic = elastic
        self._lock = threading.Lock()
        # -- guarded by _lock --
        self._lost: dict[int, Ending] = {}  # one thread is at each of these
        # -- the reader's, and that thread's while it is at the rank --
        self._failures: dict[int, int] = {}
        self._up_since: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<Restarter lost={sorted(self._lost)}>"

    def lost(self, rank: int, ending: Ending) -> None:
        """Have a rank started again that has died."""
        with self._lock:
            is_new = rank not in self._lost
            self._lost[rank] = ending
        if is_new:
            name = f"engine-client-restart-{rank}-{os.getpid()}"
            threading.Thread(target=self._run, args=(rank,), name=name, daemon=True).start()

    def _run(self, rank: int) -> None:
        """Try until the rank lives or stays dead."""
        while True:
            ending = self._lost[rank]
            is_hopeless = self._is_hopeless(rank)
            if is_hopeless or self._restart(rank):
                with self._lock:
                    if self._lost[rank] is ending:  # else it has died once more
                        del self._lost[rank]
                        break
        if is_hopeless and not self._lost:
            self._session.give_up(ending)

    def _is_hopeless(self, rank: int) -> bool:
        """Tell whether a rank stays dead; if it is brought back by other means, it may be started as often again."""
        if time.monotonic() - self._up_since.pop(rank, time.monotonic()) >= _STABLE:
            self._failures.pop(rank, None)
        if self._failures.get(rank, 0) < self._session.options.restart_limit:
            return False
        times = self._failures.pop(rank, 0) + 1
        _log.error("engine core %d has died %d times in a row and is not started again", rank, times)
        return True

    def _restart(self, rank: int) -> bool:
        """Try once; return whether there is nothing more to do for this death."""
        session, failures = self._session, self._failures.get(rank, 0)
        self._failures[rank] = failures + 1
        try:
            if session.await_end(session.options.restart_delay * 2**failures):
                return True
            self._elastic.bring_back(rank)
        except Exception as error:  # noqa: BLE001  # I10: whatever it is, the next try or the limit comes next
            if session.state != "running":
                return True
            _log.warning("engine core %d could not be started again: %s", rank, name_and_text(error))
            return False
        self._up_since[rank] = time.monotonic()
        if rank in session.links and rank not in session.deaths:
            session.restarts[rank] += 1
            _log.warning("engine core %d has been started again", rank)
        return True
