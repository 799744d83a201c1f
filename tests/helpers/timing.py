"""Time for tests: a unit that slow machines stretch, a limit that only a deadlock reaches, and patience."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from engine_client.testing.leaks import eventually

__all__ = ["DEADLOCK", "MS", "Elapsed", "eventually", "took_at_most"]

SCALE: Final = float(os.environ.get("ENGINE_CLIENT_TEST_SCALE", "1"))
"""Set ``ENGINE_CLIENT_TEST_SCALE=3`` on a machine that is three times too slow."""

MS: Final = 0.001 * SCALE
DEADLOCK: Final = 40.0 * SCALE
"""Seconds after which a wait in a test is a hang, not slowness."""


class Elapsed:
    """Seconds that a block took; zero until it ends."""

    seconds = 0.0


@contextmanager
def took_at_most(seconds: float) -> Iterator[Elapsed]:
    """Fail if the block takes longer; an exception passes through unless it came late."""
    elapsed = Elapsed()
    began = time.monotonic()
    try:
        yield elapsed
    finally:
        elapsed.seconds = time.monotonic() - began
        assert elapsed.seconds <= seconds * SCALE, f"took {elapsed.seconds:.3f} s, bound {seconds * SCALE} s"
