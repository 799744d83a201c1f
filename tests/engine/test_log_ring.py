"""The last log lines of an engine."""

from __future__ import annotations

import io
import logging
import os
import sys

import pytest

from engine_client.engine.log_ring import LogRing
from engine_client.ipc.arena import create_memory
from engine_client.ipc.status_page import StatusReader, StatusWriter


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch):
    """A ring on a root logger without other handlers, and the client's view of it."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    fd = create_memory("test")
    reader = StatusReader(os.dup(fd))
    writer = StatusWriter(fd)
    handler = LogRing(writer)
    handler.install()
    yield handler, reader
    writer.close()
    reader.close()


def test_lines_are_kept_and_warnings_printed(ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody configured logging, a warning is kept and printed as Python itself would."""
    handler, reader = ring
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    logging.getLogger("a.b").warning("marker %d", 5)
    logging.getLogger("engine_client.engine").warning("ours")
    assert reader.log_lines() == ["WARNING a.b: marker 5", "WARNING engine_client.engine: ours"]
    assert sys.stderr.getvalue() == "marker 5\n"


def test_nothing_is_printed_where_somebody_else_logs(ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another handler, or without a stderr, lines are only kept."""
    handler, reader = ring
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(sys, "stderr", None)
    logging.getLogger("a").warning("one")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("a").error("two")
    assert reader.log_lines() == ["WARNING a: one", "ERROR a: two"]
    assert sys.stderr.getvalue() == ""


def test_a_record_that_cannot_be_formatted_harms_nobody(ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong logging call ends as logging itself ends it."""
    handler, reader = ring
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("a").warning("%d %d", 1)  # noqa: PLE1206  # wrong on purpose
    assert reader.log_lines() == []
    handler.close()
