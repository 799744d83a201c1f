"""What uvloop keeps for good."""

from __future__ import annotations

import pytest
import uvloop


@pytest.fixture(scope="session", autouse=True)
def first_loop() -> None:
    """Make a loop before anything is counted: libuv makes one pipe for all loops of a process, and never closes it."""
    uvloop.new_event_loop().close()
