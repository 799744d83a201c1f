"""A heartbeat of an event loop: how late its tasks are."""

from __future__ import annotations

import asyncio
import time
from statistics import quantiles

from helpers.timing import MS

__all__ = ["Heart"]


class Heart:
    """A task that sleeps 10 ms again and again, and keeps how much longer that took."""

    def __init__(self) -> None:
        self.delays: list[float] = []

    async def beat(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            self.delays.append(time.monotonic() - began - 0.01)

    def check(self) -> str | None:
        """Return what is wrong, if anything is."""
        high, highest = quantiles(self.delays, n=100)[98], max(self.delays)
        if high < 25 * MS and highest < 150 * MS:
            return None
        return f"99th percentile {high * 1e3:.1f} ms, maximum {highest * 1e3:.1f} ms"
