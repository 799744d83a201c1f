"""Logs again in this process what an engine has logged in its own.

Threads: the one that starts the engine, then the reader's; handlers of the program run there.
"""

from __future__ import annotations

import logging

from engine_client.clients.link import EngineLink
from engine_client.protocol.frames import Frame
from engine_client.protocol.wire import decode_log

__all__ = ["relog"]


def relog(link: EngineLink, frame: Frame) -> None:
    """Hand a record to the logger of the same name, with rank and pid of the engine in front of its text.

    Raises:
        Exception: the frame cannot be decoded.
    """
    name, level, text = decode_log(frame)
    logging.getLogger(name).log(level, "(EngineCore_DP%d pid=%d) %s", link.rank, link.pid, text)
