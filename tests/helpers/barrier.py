"""An executor whose steps are collective: no rank ends one before all have begun it, as in a mixture of experts."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

from engine_client.engine.executor import Batch, ModelOutput
from engine_client.testing.executors import EchoExecutor
from helpers.timing import SCALE

__all__ = ["Collective"]

_WORD = 8
_PATIENCE = 2.0 * SCALE


class Collective(EchoExecutor):
    """Meets the other ranks in every step and dummy step; ``additional_config["barrier"]`` is a file of a word each.

    Raises:
        RuntimeError: others did not come within two seconds; the engine ends by it.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        parallel = vllm_config.parallel_config
        self.rank, self.size = parallel.data_parallel_rank, parallel.data_parallel_size
        self.steps = 0
        self.worst = 0.0
        with open(vllm_config.additional_config["barrier"], "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), _WORD * self.size)).cast("Q")

    def meet(self) -> None:
        """Wait until every rank has come here as often as this one."""
        began = time.monotonic()
        self._words[self.rank] += 1
        while min(self._words) < self._words[self.rank]:
            if time.monotonic() - began > _PATIENCE:
                raise RuntimeError(f"rank {self.rank} is left alone at the barrier: {list(self._words)}")
            os.sched_yield()
        self.worst = max(self.worst, time.monotonic() - began)

    def execute_model(self, batch: Batch) -> ModelOutput:
        self.meet()
        self.steps += 1
        return super().execute_model(batch)

    def execute_dummy_batch(self) -> None:
        self.meet()
        self.steps += 1

    def facts(self) -> tuple[int, int, float]:
        """Return how often this rank has met the others, in how many steps, and how long it has waited at most."""
        return self._words[self.rank], self.steps, self.worst
