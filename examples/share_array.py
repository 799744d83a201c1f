"""Hand a large array to the engine and get one back, without copying it through a pipe.

What ``allocate`` returns lies in memory that both processes see: it is filled in place and read in place.  Anything
else with a buffer (bytes, numpy arrays, torch tensors) goes the same way, with one copy into that memory.
"""

from __future__ import annotations

import time
from array import array

from engine_client import Batch, EngineConfig, Executor, ModelOutput, SyncMPClient

COUNT = 4_000_000


class Calculator(Executor):
    """An executor whose methods take and return arrays."""

    def execute_model(self, batch: Batch) -> ModelOutput:
        """Answer requests, of which there are none here."""
        return batch.sample(lambda request: 0)

    def largest(self, numbers: memoryview) -> float:
        """Return the largest number."""
        return max(numbers.cast("B").cast("d"))

    def zeros(self, count: int) -> array[float]:
        """Return a large array."""
        return array("d", bytes(8 * count))


with SyncMPClient(EngineConfig(), Calculator, log_stats=False) as client:
    numbers = client.allocate(8 * COUNT).cast("d")
    numbers[:] = array("d", range(COUNT))  # or whatever else fills a buffer, such as a file's readinto
    began = time.perf_counter()
    [largest] = client.collective_rpc("largest", args=(numbers,))
    print(f"the largest of {COUNT} numbers is {largest:.0f}: {1e3 * (time.perf_counter() - began):.0f} ms, and no copy")
    began = time.perf_counter()
    [zeros] = client.collective_rpc("zeros", args=(COUNT,))
    print(f"{zeros.itemsize * len(zeros) >> 20} MiB came back in {1e3 * (time.perf_counter() - began):.0f} ms")
    numbers.release()
