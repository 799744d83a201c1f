"""Keeps the last lines that an engine logged where its client can read them after the engine's death.

Threads: ``logging`` serialises calls of a handler.
"""

from __future__ import annotations

import logging
import sys

from engine_client.ipc.status_page import StatusWriter

__all__ = ["LogRing"]


class LogRing(logging.Handler):
    """A logging handler that writes into the status page; installed on the root logger of an engine process.

    With it the root logger has a handler, so ``logging.lastResort`` no longer prints warnings; where nobody else has
    configured logging, this handler prints those of others instead.  Our own warnings are not printed here: what they
    are about reaches the caller in the client's process.
    """

    def __init__(self, status: StatusWriter) -> None:
        super().__init__()
        self._status = status
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def install(self) -> None:
        """Attach to the root logger."""
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; print it where nothing else would."""
        try:
            self._status.log(self.format(record))
            alone = logging.getLogger().handlers == [self] and not record.name.startswith("engine_client.engine")
            if alone and record.levelno >= logging.WARNING and sys.stderr is not None:
                print(record.getMessage(), file=sys.stderr)
        except Exception:  # noqa: BLE001  # a handler never raises; logging's own way to say so
            self.handleError(record)
