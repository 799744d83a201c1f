"""Sends what an engine logs to its client, which logs it again (``ClientOptions.forward_logs``).

Threads: any that logs; a channel can be written to by all of them.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from engine_client.ipc.channel import Channel
from engine_client.protocol.wire import encode_log

__all__ = ["LogSender"]

_MOST_WAITING: Final = 1 << 20
"""Bytes that may wait for the client before log records are dropped: they are not what it waits for."""


class LogSender(logging.Handler):
    """A logging handler that sends records; installed on the root logger of an engine process.

    Args:
        channel: to the client that has launched the engine.
        level: the least level that is sent.
    """

    def __init__(self, channel: Channel, level: int) -> None:
        super().__init__(level)
        self._channel = channel
        self._is_sending = threading.local()
        self.setFormatter(logging.Formatter("%(message)s"))  # with a traceback, if there is one

    def install(self) -> None:
        """Attach to the root logger, and let records of this level through."""
        root = logging.getLogger()
        root.addHandler(self)
        root.setLevel(min(root.level, self.level))

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, unless it was logged by sending one, or too much waits."""
        if getattr(self._is_sending, "now", False) or self._channel.backlog > _MOST_WAITING:
            return
        self._is_sending.now = True
        try:
            self._channel.send(encode_log(record.name, record.levelno, self.format(record)))
        except BrokenPipeError:
            pass  # nobody is left to be told
        except Exception:  # noqa: BLE001  # a handler never raises; logging's own way to say so
            self.handleError(record)
        finally:
            self._is_sending.now = False
