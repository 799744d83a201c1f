"""How fast tokens come."""

from __future__ import annotations

import pytest

from engine_client.clients import meter
from engine_client.clients.meter import TokenMeter


def test_a_meter_counts_and_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a steady pace the rate comes to be that pace, and it fades within seconds once nothing comes any more."""
    now = 100.0
    monkeypatch.setattr(meter.time, "monotonic", lambda: now)
    found = TokenMeter()
    assert (found.total, found.rate()) == (0, 0.0)
    for _ in range(3000):
        now += 0.01
        found.add(5)
    assert found.total == 15_000
    assert found.rate() == pytest.approx(500, rel=0.01)
    assert "15000 tokens, 49" in repr(found) or "15000 tokens, 50" in repr(found)
    now += 30
    assert found.rate() < 2
