"""Workloads that only this library has: its own memory, its ranks, its scheduler.

Threads: the main thread, and those of the clients.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

from engine_client import (
    Batch,
    CacheConfig,
    EngineConfig,
    EngineCore,
    EngineCoreRequest,
    Executor,
    ModelOutput,
    SamplingParams,
    SchedulerConfig,
)
from engine_client.bench.loops import consume, names
from engine_client.bench.stub import TOKEN, resident_bytes

__all__ = ["KINDS", "StubExecutor", "exchange"]

Figures = dict[str, Any]
_WARM_UP: Final = 5


def allocated(side: Any, mib: list[int], times: int) -> Figures:
    """Time requests that were built in shared memory, at each size in MiB; all sizes in turn, four times over."""
    client = side.make_client()
    seconds: dict[int, list[float]] = {size: [] for size in mib}
    try:
        for _ in range(4):
            for size in mib:
                seconds[size] += _built_in_place(side, client, size << 20, max(1, times // 4))
    finally:
        client.shutdown()
    return {f"us/{size}": statistics.median(taken) * 1e6 for size, taken in seconds.items()}


def _built_in_place(side: Any, client: Any, nbytes: int, times: int) -> list[float]:
    seconds = []
    for i in range(times + _WARM_UP):
        memory = client.allocate(nbytes)
        if i < _WARM_UP:
            memory[::4096] = bytes(nbytes >> 12)  # it is in RAM before the clock runs
        # The rest stays as it is: what filling it does to the caches would be measured, too.
        memory[:4096] = bytes(4096)
        request = side.make_request(names(1)[0], 1, side.make_tensor(nbytes, memory))
        start = time.perf_counter()
        client.add_request(request)
        client.get_output()
        seconds.append(time.perf_counter() - start)
        del memory, request  # the next takes the same place
    return seconds[_WARM_UP:]


def ranks(side: Any, ranks: list[int], batch: int, tokens: int, repeats: int) -> Figures:
    """Take rate and the client's CPU time with several engines, each of which has ``batch`` requests."""
    found: Figures = {}
    for number in ranks:
        client = side.make_client(ranks=number)
        try:
            rates, used = [], []
            for _ in range(repeats):
                rate, cpu = _all_ranks(side, client, number, batch, tokens)
                rates.append(rate)
                used.append(cpu)
        finally:
            client.shutdown()
        found[f"tokens_per_s/{number}"] = statistics.median(rates)
        found[f"client_us_per_token/{number}"] = statistics.median(used) * 1e6
    return found


def _all_ranks(side: Any, client: Any, number: int, batch: int, tokens: int) -> tuple[float, float]:
    requests = [side.make_request(name, tokens, rank=i % number) for i, name in enumerate(names(number * batch))]
    cpu = time.process_time()
    rate = consume(client, requests, tokens)
    return rate, (time.process_time() - cpu) / (tokens * len(requests))


# -- memory ------------------------------------------------------------------------------------------------------------

_AT_ONCE: Final = 16
_TOKENS: Final = 10
_MESSAGES: Final = _AT_ONCE * (1 + _TOKENS) + 2
"""Of one round: the requests, their outputs, a call and its reply."""


def memory(side: Any, messages: int) -> Figures:
    """Take by how many MB both processes grow over the last nine tenths of so many messages."""
    client = side.make_client()
    try:
        exchange(side, client, messages // 10)
        before = _resident(client)
        exchange(side, client, messages - messages // 10)
        after = _resident(client)
    finally:
        client.shutdown()
    client_bytes, engine_bytes = (late - early for early, late in zip(before, after, strict=True))
    return {"client_mb": client_bytes / 1e6, "engine_mb": engine_bytes / 1e6, "messages": messages}


def exchange(side: Any, client: Any, messages: int) -> None:
    """Send and receive about so many messages: requests, outputs, calls and replies."""
    for _ in range(max(1, messages // _MESSAGES)):
        for name in names(_AT_ONCE):
            client.add_request(side.make_request(name, _TOKENS))
        left = _AT_ONCE
        while left:
            left -= sum(output.finish_reason is not None for output in client.get_output().outputs)
        client.call_utility("echo", 1)


def _resident(client: Any) -> tuple[int, int]:
    gc.collect()
    return resident_bytes(), client.call_utility("usage")[2]


# -- the scheduler -----------------------------------------------------------------------------------------------------


class StubExecutor(Executor):
    """Answers with a constant token, and notes how long each batch takes it."""

    seconds = 0.0

    def execute_model(self, batch: Batch) -> ModelOutput:
        """Return one token for each request."""
        start = time.perf_counter()
        output = batch.sample(lambda request: TOKEN)
        self.seconds = time.perf_counter() - start
        return output


def scheduler(side: Any, running: list[int], waiting: list[int], total: int) -> Figures:
    """Time steps of the built-in engine core in this process, without the executor's own time."""
    del side
    found: Figures = {}
    for number in running:
        found[f"us_per_token/{number}"] = _per_token(number, 0, total)
    for number in waiting:
        found[f"waiting_us/{number}"] = _per_token(64, number, total)
    return found


def _per_token(running: int, waiting: int, total: int) -> float:
    """Return the microseconds per scheduled token, as a median over steps."""
    steps = max(20, total // running)
    core = EngineCore(_config(running, steps + 50), StubExecutor, False)
    executor = core.model_executor
    assert isinstance(executor, StubExecutor)
    try:
        for request in _requests(running + waiting, steps + 50):
            core.add_request(*core.preprocess_add_request(request))
        for _ in range(10):  # the prompts are computed
            core.step_fn()
        assert core.counts() == (waiting, running), f"{core.counts()} instead of {(waiting, running)}"

        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            outputs, _ = core.step_fn()
            seconds.append(time.perf_counter() - start - executor.seconds)
            assert outputs is not None
            assert len(outputs[0].outputs) == running
        return statistics.median(seconds) / running * 1e6
    finally:
        core.shutdown()


def _requests(number: int, max_tokens: int) -> Iterator[EngineCoreRequest]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for name in names(number):
        yield EngineCoreRequest(name, [1, 2, 3, 4], None, params, None, 0.0, None, None, None)


def _config(running: int, tokens: int) -> EngineConfig:
    config = EngineConfig(
        scheduler_config=SchedulerConfig(max_num_batched_tokens=max(2048, 8 * running), max_num_seqs=running),
        cache_config=CacheConfig(num_gpu_blocks_override=running * (tokens // 16 + 4)),
    )
    config.model_config.max_model_len = tokens + 100
    return config


KINDS = {function.__name__: function for function in (allocated, ranks, memory, scheduler)}
"""As ``loops.KINDS``."""
