"""The asyncio client behind blocking calls."""

from __future__ import annotations

from engine_client import EngineConfig, EngineCoreClient, EngineCoreRequest, SamplingParams
from engine_client.cli.awaited import Awaited
from engine_client.testing.executors import EchoExecutor


def test_requests_and_calls():
    """Requests, outputs and calls go through the coroutines; the end leaves no descriptor of the loop."""
    client = Awaited(EngineCoreClient.make_client(True, True, EngineConfig(), EchoExecutor, False))
    try:
        request = EngineCoreRequest("a", [7], None, SamplingParams(max_tokens=3), None, 0.0, None, None, None)
        client.add_request(request)
        tokens = []
        while len(tokens) < 3:
            (output,) = client.get_output().outputs
            tokens += output.new_token_ids
        assert tokens == [7, 7, 7]
        assert len(client.collective_rpc("execute_dummy_batch")) == 1
    finally:
        client.shutdown()
