"""Logs again in this process what an engine has logged in its own.

Threads: the one that starts the engine, then the reader's; handlers of the program run there.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

from engine_client.clients.link import EngineLink
from engine_client.protocol.frames import Frame
from engine_client.protocol.wire import decode_log

__all__ = ["relog"]

_log: Final = logging.getLogger(__name__)


def relog(link: EngineLink, frame: Frame) -> None:
    """Hand a record to the logger of the same name, with rank and pid of the engine in front of its text.

    A handler or a filter of the program that raises is no fault of the engine's: it is logged, if that can be.

    Raises:
        Exception: the frame cannot be decoded.
    """
    name, level, text = decode_log(frame)
    try:
        logging.getLogger(name).log(level, "(EngineCore_DP%d pid=%d) %s", link.rank, link.pid, text)
    except Exception:  # noqa: BLE001  # theirs, whatever it is
        with suppress(Exception):  # the same handler, on this record
            _log.exception("a handler or filter of %r failed on what %s has logged: %s", name, link.title, text)
