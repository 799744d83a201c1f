"""The engine of the chaos run: scripted, and every token tells whose it is and which.

Threads: as ``ScriptedCore``.
"""

from __future__ import annotations

from typing import Any

from engine_client.interfaces import EngineContext
from engine_client.testing.scripted import ScriptedCore
from helpers.payloads import results_used

__all__ = ["TARGET", "NumberedCore", "build_engine", "check_memory", "token_of"]

TARGET = "chaos.engine:build_engine"
_MOST_TOKENS = 1000


def token_of(number: int, position: int) -> int:
    """Return the token at a position of what a request of this number gets."""
    return number * _MOST_TOKENS + position


class NumberedCore(ScriptedCore):
    """Takes a request's number from its prompt."""

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        super().add_request(request, request_wave)
        self._last_request = None  # it would keep the client's memory

    def advance(self, running: Any) -> tuple[int, Any]:
        before = running.remaining
        index, output = super().advance(running)
        request = running.request
        if request.pooling_params is None:
            first = request.sampling_params.max_tokens - before
            number = request.prompt_token_ids[0]
            output.new_token_ids = [token_of(number, first + step) for step in range(len(output.new_token_ids))]
        return index, output


def build_engine(vllm_config: Any, executor_class: Any, log_stats: bool, context: EngineContext) -> NumberedCore:
    """Build the engine."""
    del executor_class
    return NumberedCore(vllm_config, log_stats, context)


def check_memory(core: NumberedCore) -> int:
    """Return, from an engine, how many bytes of what it has sent are not given back."""
    return results_used(core)
