"""What a session's memory says of its engines, for metrics; no engine is asked.

Threads: any.
"""

from __future__ import annotations

from engine_client.clients.conditions import conditions
from engine_client.clients.frame_latency import FrameLatency
from engine_client.clients.metrics import EngineReading, Measurements
from engine_client.clients.session import Session

__all__ = ["measure_session"]


def measure_session(session: Session, model: str) -> Measurements:
    """Return how things are; from the first call on, frames are timed."""
    session.refuse_copies()
    readings = []
    for status, _ in conditions(session):
        link = session.links.get(status.rank)
        if link is None:
            continue  # it has left meanwhile
        if link.meter.latency is None:
            link.meter.latency = FrameLatency()
        counters = link.status.counters
        readings.append(
            EngineReading(
                status,
                counters.read() if counters.is_kept else None,
                link.meter.latency.read(),
                session.restarts[status.rank],
            )
        )
    writer = session.writer
    arena = None if writer is None else (writer.used, writer.capacity, writer.fallbacks)
    return Measurements(model, readings, arena, len(session.in_flight), len(session.calls))
