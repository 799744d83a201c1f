"""What is logged is sent, but never by backlog for the client, and never because of itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine_client.engine.log_sender import LogSender
from engine_client.protocol.wire import decode_log


class Channel:
    """Keeps what is sent."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.backlog = 0
        self.sent: list[Any] = []
        self._error = error

    def send(self, frame: Any) -> bool:
        logging.getLogger("engine_client.ipc").error("sending")
        if self._error is not None:
            raise self._error
        self.sent.append(decode_log(frame))
        return True


@pytest.fixture
def root():
    """Give the root logger, which is as before afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_records_are_sent_with_name_level_and_text(root: logging.Logger) -> None:
    """From the level on; with the traceback, if there is one; what sending itself logs is not sent."""
    channel = Channel()
    LogSender(channel, logging.INFO).install()
    log = logging.getLogger("a.b")
    log.debug("no")
    log.info("x=%d", 5)
    try:
        raise ZeroDivisionError("marker")
    except ZeroDivisionError:
        log.exception("failed")
    (first, second) = channel.sent
    assert first == ("a.b", logging.INFO, "x=5")
    assert second[1] == logging.ERROR
    assert second[2].startswith("failed\nTraceback")
    assert second[2].endswith("ZeroDivisionError: marker")


def test_nobody_waits_for_a_log_line(root: logging.Logger) -> None:
    """Where too much waits for the client, or it is gone, the record is dropped."""
    channel = Channel()
    LogSender(channel, logging.INFO).install()
    channel.backlog = 1 << 21
    logging.getLogger("a").error("dropped")
    assert channel.sent == []
    LogSender(Channel(BrokenPipeError()), logging.INFO).install()
    logging.getLogger("a").error("dropped as well")
