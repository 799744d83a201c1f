"""The work itself, the same for every side, and timed where the caller would wait.

A *side* (``ours``, ``peer_vllm``, ``peer_zmq``) offers ``make_client``, ``make_request``, ``make_tensor``; its clients
have the reference's methods.  All engines are stubs: one constant token for each request and step, until
``max_tokens``; the utilities ``echo``, ``set_echo_tensor`` and ``usage``.  The consumer reads every id and token.

This file runs in the interpreter of the peer, too: only the standard library is imported, nothing of the package.

Threads: the main thread.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from itertools import count
from typing import Any

__all__ = ["KINDS", "consume", "memcpy_seconds", "names", "quantiles", "timed"]

Figures = dict[str, Any]
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
_serial = count()


def names(number: int) -> list[str]:
    """Return request ids that were not used before."""
    return [f"request-{next(_serial):08d}" for _ in range(number)]


def quantiles(seconds: list[float]) -> Figures:
    """Return the percentiles of some durations, in microseconds."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {f"p{p:g}_us": ordered[min(int(len(ordered) * p / 100), last)] * 1e6 for p in PERCENTILES}


def timed(function: Callable[[], object], times: int, warmup: int = 100) -> list[float]:
    """Return how long each call took, in seconds, after some that do not count."""
    for _ in range(min(warmup, times)):
        function()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds


def memcpy_seconds(nbytes: int, times: int = 12) -> float:
    """Return the median time of a copy between two buffers that were used before."""
    source, target = memoryview(bytearray(b"\1") * nbytes), memoryview(bytearray(b"\2") * nbytes)

    def copy() -> None:
        target[:] = source

    return statistics.median(timed(copy, times, warmup=3))


# -- one message at a time ---------------------------------------------------------------------------------------------


def utility(side: Any, times: int, options: dict[str, Any] | None = None) -> Figures:
    """Time a call and its reply."""
    client = side.make_client(**(options or {}))
    try:
        return quantiles(timed(lambda: client.call_utility("echo", 1), times))
    finally:
        client.shutdown()


def first_token(side: Any, times: int, options: dict[str, Any] | None = None) -> Figures:
    """Time a request, from making it to its only token."""
    client = side.make_client(**(options or {}))

    def once() -> None:
        client.add_request(side.make_request(names(1)[0], 1))
        client.get_output()

    try:
        return quantiles(timed(once, times))
    finally:
        client.shutdown()


def async_first_token(side: Any, times: int) -> Figures:
    """Time a request that is there, in an event loop."""

    async def run() -> Figures:
        client = side.make_client(use_asyncio=True)
        seconds = []
        try:
            for i in range(times + 100):
                request = side.make_request(names(1)[0], 1)
                start = time.perf_counter()
                await client.add_request_async(request)
                await client.get_output_async()
                if i >= 100:
                    seconds.append(time.perf_counter() - start)
        finally:
            client.shutdown()
        return quantiles(seconds)

    return asyncio.run(run())


# -- many tokens -------------------------------------------------------------------------------------------------------


class _Cpu:
    """The CPU time that both processes use while something runs."""

    def __init__(self, engine_seconds: float) -> None:
        self._client = time.process_time()
        self._engine = engine_seconds

    def per(self, number: int, engine_seconds: float) -> Figures:
        return {
            "client_us_per_token": (time.process_time() - self._client) / number * 1e6,
            "engine_us_per_token": (engine_seconds - self._engine) / number * 1e6,
        }


def consume(client: Any, requests: list[Any], tokens: int) -> float:
    """Send requests and read all they get; return the tokens per second."""
    received = {request.request_id: 0 for request in requests}
    left = len(requests)
    start = time.perf_counter()
    for request in requests:
        client.add_request(request)
    while left:
        for output in client.get_output().outputs:
            received[output.request_id] += len(output.new_token_ids)
            left -= output.finish_reason is not None
    rate = sum(received.values()) / (time.perf_counter() - start)
    assert set(received.values()) == {tokens}, "tokens were lost"
    return rate


def _stream_on(side: Any, client: Any, batch: int, tokens: int, repeats: int) -> Figures:
    cpu = _Cpu(client.call_utility("usage")[1])
    rates = [
        consume(client, [side.make_request(name, tokens) for name in names(batch)], tokens) for _ in range(repeats)
    ]
    used = cpu.per(repeats * batch * tokens, client.call_utility("usage")[1])
    return {"tokens_per_s": statistics.median(rates), **used}


def stream(side: Any, batch: int, tokens: int, repeats: int) -> Figures:
    """Time ``batch`` requests at once, of ``tokens`` tokens each."""
    client = side.make_client()
    try:
        return _stream_on(side, client, batch, tokens, repeats)
    finally:
        client.shutdown()


def batch(side: Any, batches: list[int], total: int, most: int) -> Figures:
    """Take the CPU time per token of each number of requests at once, without that of the requests themselves.

    Args:
        total: about so many tokens for each size.
        most: at most so many for each request.
    """
    client = side.make_client()
    found: Figures = {}
    try:
        for size in batches:
            long = min(most, max(64, total // size))
            short = long // 4
            few, many = (_stream_on(side, client, size, tokens, 1) for tokens in (short, long))
            found[f"tokens_per_s/{size}"] = many["tokens_per_s"]
            for name in ("client_us_per_token", "engine_us_per_token"):
                found[f"{name}/{size}"] = (many[name] * long - few[name] * short) / (long - short)
    finally:
        client.shutdown()
    return found


async def consume_async(client: Any, requests: list[Any], tokens: int) -> float:
    """Do the same as ``consume``, in an event loop."""
    received = {request.request_id: 0 for request in requests}
    left = len(requests)
    start = time.perf_counter()
    for request in requests:
        await client.add_request_async(request)
    while left:
        for output in (await client.get_output_async()).outputs:
            received[output.request_id] += len(output.new_token_ids)
            left -= output.finish_reason is not None
    rate = sum(received.values()) / (time.perf_counter() - start)
    assert set(received.values()) == {tokens}, "tokens were lost"
    return rate


def async_stream(side: Any, batch: int, tokens: int, repeats: int) -> Figures:
    """Do the same as ``stream`` in an event loop."""

    async def run() -> Figures:
        client = side.make_client(use_asyncio=True)
        try:
            cpu = _Cpu((await client.call_utility_async("usage"))[1])
            rates = []
            for _ in range(repeats):
                requests = [side.make_request(name, tokens) for name in names(batch)]
                rates.append(await consume_async(client, requests, tokens))
            used = cpu.per(repeats * batch * tokens, (await client.call_utility_async("usage"))[1])
        finally:
            client.shutdown()
        return {"tokens_per_s": statistics.median(rates), **used}

    return asyncio.run(run())


def ingest(side: Any, count: int, repeats: int) -> Figures:
    """Time many requests of one token each, sent as quickly as they are taken."""
    client = side.make_client()
    try:
        rates = []
        for _ in range(repeats):
            requests = [side.make_request(name, 1) for name in names(count)]
            left = len(requests)
            start = time.perf_counter()
            for request in requests:
                client.add_request(request)
            while left:
                left -= len(client.get_output().outputs)
            rates.append(len(requests) / (time.perf_counter() - start))
        return {"requests_per_s": statistics.median(rates)}
    finally:
        client.shutdown()


# -- large buffers -----------------------------------------------------------------------------------------------------


def _tensor_on(side: Any, client: Any, tensor: Any, times: int) -> list[float]:
    """Time requests that carry a tensor, which the last output brings back if the engine was told so."""
    last: list[Any] = [None]

    def once() -> None:
        client.add_request(side.make_request(names(1)[0], 1, tensor))
        last[0] = client.get_output()

    seconds = timed(once, times)
    back = last[0].outputs[0].pooling_output
    assert back is None or back.nbytes == tensor.nbytes, "the tensor changed its size"
    return seconds


def tensor(side: Any, nbytes: int, back: bool, times: int) -> Figures:
    """Time a tensor to the engine, and back, once processors and memory have come to rest."""
    client = side.make_client()
    try:
        client.call_utility("set_echo_tensor", back)
        seconds = statistics.median(_tensor_on(side, client, side.make_tensor(nbytes), times))
    finally:
        client.shutdown()
    found = {"ms": seconds * 1e3, "gib_per_s": (2 if back else 1) * nbytes / 2**30 / seconds}
    if not back:
        copying = memcpy_seconds(nbytes)
        found |= {"memcpy_gib_per_s": nbytes / 2**30 / copying, "of_memcpy": copying / seconds}
    return found


def payload(side: Any, sizes: list[int], budget: int) -> Figures:
    """Time tensors of growing size to the engine, and plain copies; ``budget``: about how many bytes of each size."""
    client = side.make_client()
    found: Figures = {}
    try:
        for nbytes in sizes:
            times = max(7, min(300, budget // nbytes))
            seconds = statistics.median(_tensor_on(side, client, side.make_tensor(nbytes), times))
            found[f"us/{nbytes // 1024}"] = seconds * 1e6
            found[f"copy_us/{nbytes // 1024}"] = memcpy_seconds(nbytes) * 1e6
    finally:
        client.shutdown()
    return found


KINDS = {
    function.__name__: function
    for function in (
        utility,
        first_token,
        async_first_token,
        stream,
        async_stream,
        batch,
        ingest,
        tensor,
        payload,
    )
}
"""The functions by the name of their kind; each takes a side and the workload's parameters, and returns figures."""
