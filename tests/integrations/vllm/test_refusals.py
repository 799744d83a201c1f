"""Errors that say what this library does not carry."""

from __future__ import annotations

from engine_client import EngineClientError
from engine_client.integrations.vllm import UnsupportedError
from engine_client.integrations.vllm.refusals import unsupported
from engine_client.integrations.vllm.zmq_stub import ZMQUnavailableError


def test_a_refusal_says_what_why_and_what_to_do():
    """One sentence; without other advice it names vLLM's own client."""
    error = unsupported("x", "it cannot")
    assert str(error) == "engine_client does not carry x: it cannot; use vLLM's own client (with pyzmq) for it"
    assert str(unsupported("x", "it cannot", "do y")).endswith("it cannot; do y")


def test_all_refusals_are_of_one_kind():
    """Whoever catches one catches those for sockets too, and whoever catches this library's errors catches all."""
    assert issubclass(UnsupportedError, EngineClientError)
    assert issubclass(UnsupportedError, RuntimeError)
    assert issubclass(ZMQUnavailableError, UnsupportedError)
