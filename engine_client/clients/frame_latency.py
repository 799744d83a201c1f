"""How long outputs were under way from an engine to its client.

Threads: ``note`` by the reader; reading from any.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Final

__all__ = ["LATENCY_LIMITS", "FrameLatency"]

LATENCY_LIMITS: Final = (
    *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0),
)
"""Upper ends of the buckets, in seconds."""


class FrameLatency:
    """How long one engine's outputs were under way, from the end of its step to the client's reader."""

    def __init__(self) -> None:
        self._buckets = [0] * (len(LATENCY_LIMITS) + 1)
        self._sum = 0.0

    def __repr__(self) -> str:
        return f"<FrameLatency of {sum(self._buckets)} frames>"

    def note(self, sent_at: float) -> None:
        """Count a frame that has just arrived; ``sent_at`` is in monotonic seconds."""
        seconds = max(0.0, time.monotonic() - sent_at)
        self._buckets[bisect_left(LATENCY_LIMITS, seconds)] += 1
        self._sum += seconds

    def read(self) -> tuple[tuple[int, ...], float]:
        """Return how many frames fell into each bucket, and the sum of their seconds."""
        return tuple(self._buckets), self._sum
