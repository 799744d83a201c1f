"""How many tokens came, and how fast they come: a few additions for each step, whatever its size.

Threads: ``add`` by one at a time; reading from any.
"""

from __future__ import annotations

import time
from math import exp
from typing import Final

from engine_client.clients.frame_latency import FrameLatency

__all__ = ["TokenMeter"]

_MEMORY: Final = 5.0
"""Seconds in which a step's weight in the rate falls to a third."""


class TokenMeter:
    """Counts tokens; starts at zero."""

    def __init__(self) -> None:
        self.total = 0
        self.latency: FrameLatency | None = None  # measured once somebody has asked
        self._rate = 0.0
        self._counted_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<TokenMeter {self.total} tokens, {self.rate():.1f}/s>"

    def add(self, tokens: int, sent_at: float = 0.0) -> None:
        """Count the tokens of a step, whose frame was sent at this monotonic second."""
        if self.latency is not None:
            self.latency.note(sent_at)
        now = time.monotonic()
        self._rate = self._rate * exp((self._counted_at - now) / _MEMORY) + tokens / _MEMORY
        self._counted_at = now
        self.total += tokens

    def rate(self) -> float:
        """Return tokens per second, averaged over about the last five seconds."""
        return self._rate * exp((self._counted_at - time.monotonic()) / _MEMORY)
