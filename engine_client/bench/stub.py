"""An engine core without a model and without a scheduler: every request gets one constant token a step.

Threads: as every engine core, one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from engine_client import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
)
from engine_client.interfaces import EngineContext

__all__ = ["TARGET", "TOKEN", "StubCore", "build_engine", "resident_bytes"]

TARGET: Final = "engine_client.bench.stub:build_engine"
"""For ``ClientOptions(engine_target=TARGET)``."""

TOKEN: Final = 17


def build_engine(vllm_config: Any, executor_class: Any, log_stats: bool, context: EngineContext) -> StubCore:
    """Build the engine; the target that ``TARGET`` names.  Only the context's rank is used."""
    del vllm_config, executor_class, log_stats
    return StubCore(context.rank)


def resident_bytes() -> int:
    """Return how much memory this process has in RAM, in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # pathlib is slow to load, at each start
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class StubCore:
    """The engine; satisfies ``interfaces.EngineCore``."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.step_fn = self.step
        self._running: dict[str, list[Any]] = {}  # tokens that are left, and the request
        self._echo_tensor = False

    def __repr__(self) -> str:
        return f"<StubCore rank={self.rank} requests={len(self._running)}>"

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[EngineCoreRequest, int]:
        """Take it as it is."""
        return request, 0

    def add_request(self, request: EngineCoreRequest, request_wave: int = 0) -> None:
        """Take a request."""
        del request_wave
        assert request.sampling_params is not None  # the workloads have no others
        self._running[request.request_id] = [request.sampling_params.max_tokens, request]

    def abort_requests(self, request_ids: list[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def abort_all(self) -> None:
        """Forget all requests."""
        self._running.clear()

    def step(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        """Give every request one token."""
        outputs, finished = [], []
        for request_id, state in self._running.items():
            state[0] -= 1
            if state[0] > 0:
                outputs.append(EngineCoreOutput(request_id, [TOKEN]))
                continue
            tensor = state[1].prompt_embeds if self._echo_tensor else None
            last = EngineCoreOutput(request_id, [TOKEN], pooling_output=tensor, finish_reason=FinishReason.LENGTH)
            outputs.append(last)
            finished.append(request_id)
        for request_id in finished:
            del self._running[request_id]
        return {0: EngineCoreOutputs(self.rank, outputs)}, True

    def post_step(self, model_executed: bool) -> None:
        """Do nothing."""

    def has_work(self) -> bool:
        """Tell whether there are requests."""
        return bool(self._running)

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        """Return nothing: outputs come from steps alone."""
        return {}

    def counts(self) -> tuple[int, int]:
        """Return that all requests run."""
        return 0, len(self._running)

    def ready_response(self) -> EngineCoreReadyResponse:
        """Return small capacities."""
        return EngineCoreReadyResponse(4096, 100, 16, None, "float32", "bench", 1, 1)

    def shutdown(self) -> None:
        """Do nothing."""

    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        """Return what the workloads call."""
        return {"echo": lambda value=None: value, "set_echo_tensor": self._set_echo_tensor, "usage": usage}

    def _set_echo_tensor(self, value: bool) -> None:
        self._echo_tensor = value


def usage() -> list[Any]:
    """Return this process's id, its CPU time in seconds, and its memory in bytes."""
    return [os.getpid(), time.process_time(), resident_bytes()]
