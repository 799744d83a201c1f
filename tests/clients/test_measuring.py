"""What is measured of a session, without asking its engines."""

from __future__ import annotations

import os
import signal

import pytest

from engine_client import EngineConfig, EngineDeadError, SyncMPClient
from engine_client.clients.measuring import measure_session
from helpers.clients import collect, make_request, scripted_client, session_of
from helpers.engines import Recording


def test_what_the_engine_counts_is_read() -> None:
    """Tokens, ends and times of the engine's own count; frames are timed from the first look on."""
    with SyncMPClient(EngineConfig(), Recording, False) as client:
        session = session_of(client)
        assert session.links[0].meter.latency is None
        assert sum(measure_session(session, "m").engines[0].latency[0]) == 0
        for name in ("a", "b"):
            client.add_request(make_request(name, 3, [1, 2, 3, 4]))
        collect(client, 2)
        measured = measure_session(session, "m")
        [engine] = measured.engines
        assert (engine.counted.prompt_tokens, engine.counted.generation_tokens) == (8, 6)
        assert engine.counted.finished == (0, 2, 0, 0, 0)
        assert sum(engine.counted.first_token[0]) == sum(engine.counted.end_to_end[0]) == 2
        assert 0 < engine.counted.first_token[1] <= engine.counted.end_to_end[1]
        assert 1 <= sum(engine.latency[0]) <= 6
        assert (measured.in_flight, measured.pending_calls) == (0, 0)


def test_an_engine_that_does_not_count_is_measured_all_the_same() -> None:
    """An engine of another kind has no counts; its status is there, and what this side knows."""
    with scripted_client() as client:
        [engine] = measure_session(session_of(client), "").engines
        assert engine.counted is None
        assert engine.status.condition == "ready"


def test_the_dead_are_measured_too() -> None:
    """After a death, and after the end, the last that was seen is told."""
    client = SyncMPClient(EngineConfig(), Recording, False)
    client.add_request(make_request("a", 3))
    collect(client, 1)
    os.kill(session_of(client).links[0].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        client.get_output()
    for _ in range(2):
        [engine] = measure_session(session_of(client), "").engines
        assert (engine.status.condition, engine.counted.generation_tokens) == ("dead", 3)
        client.shutdown()
