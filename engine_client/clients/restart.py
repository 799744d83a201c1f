"""Starts ranks again that have died, with a back-off and a limit (``ClientOptions.on_engine_death="restart"``).

Invariants: I6, I10 (a rank that cannot be started again stays dead, and says why).

Threads: ``lost`` is called on the reader's thread.  A ``Restarter`` owns one thread, from a death until there is
nothing to start again; the end of the session ends it.
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
        self._lost: dict[int, Ending] = {}
        self._failures: dict[int, list[float]] = {}
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Restarter lost={sorted(self._lost)}>"

    def lost(self, rank: int, ending: Ending) -> None:
        """Have a rank started again that has died."""
        if rank in self._session.leaving:
            return
        with self._lock:
            self._lost[rank] = ending
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"engine-client-restart-{os.getpid()}", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._lost or self._session.state != "running":
                    self._thread = None
                    return
                rank, ending = next(iter(self._lost.items()))
            if self._restart(rank, ending):
                with self._lock:
                    if self._lost.get(rank) is ending:
                        del self._lost[rank]

    def _restart(self, rank: int, ending: Ending) -> bool:
        """Try once; return whether there is nothing more to do for this death."""
        now = time.monotonic()
        failures = [at for at in self._failures.get(rank, ()) if now - at < _STABLE]
        options = self._session.options
        if len(failures) >= options.restart_limit:
            _log.error("engine core %d has died %d times in a row and is not started again", rank, len(failures) + 1)
            self._session.give_up(rank, ending)
            return True
        self._failures[rank] = [*failures, now]
        if self._session.await_end(options.restart_delay * 2 ** len(failures)):
            return True
        try:
            self._elastic.bring_up([rank])
        except Exception as error:  # noqa: BLE001  # I10: whatever it is, the next try or the limit comes next
            if self._session.state == "running":
                _log.warning("engine core %d could not be started again: %s", rank, name_and_text(error))
            return False
        _log.warning("engine core %d has been started again", rank)
        return True
