"""Frames are counted by how long they were under way."""

from __future__ import annotations

import time

from engine_client.clients.frame_latency import LATENCY_LIMITS, FrameLatency


def test_frames_fall_into_buckets() -> None:
    """The last one is for what is above all limits; a clock that seems to go backwards counts as no time."""
    latency = FrameLatency()
    now = time.monotonic()
    for sent_at in (now + 100, now - 1e6):
        latency.note(sent_at)
    buckets, total = latency.read()
    assert (buckets[0], buckets[-1], sum(buckets), len(buckets)) == (1, 1, 2, len(LATENCY_LIMITS) + 1)
    assert 1e6 <= total < 1e6 + 100
    assert repr(latency) == "<FrameLatency of 2 frames>"
