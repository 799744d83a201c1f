"""The smallest engine there is."""

from __future__ import annotations

from engine_client import Batch, EngineConfig, ScheduledRequest
from engine_client.cli.probe import ProbeExecutor


def test_probe_answers_with_the_last_token():
    """It repeats the last token, so that any prompt will do."""
    request = ScheduledRequest("r", [1, 2, 3], 3, 0, 3, True, [0])
    assert ProbeExecutor(EngineConfig()).execute_model(Batch([request], 3)).tokens == [[3]]
