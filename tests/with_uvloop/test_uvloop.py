"""The asyncio clients in uvloop's event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from engine_client import ClientOptions, EngineConfig, EngineCoreClient, FinishReason, ParallelConfig
from engine_client.testing.scripted import TARGET
from helpers.clients import make_request


async def use(client: Any, name: str) -> None:
    """Stream, send and take, call, and cancel a wait."""
    outputs = [output async for output in client.stream(make_request(f"{name}-stream", 3))]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    waiting = asyncio.ensure_future(client.get_output_async())
    await asyncio.sleep(0)
    waiting.cancel()
    await client.add_request_async(make_request(f"{name}-request", 3))
    tokens = 0
    while tokens < 3:
        tokens += sum(len(output.new_token_ids) for output in (await client.get_output_async()).outputs)
    assert await client.call_utility_async("echo", name) == name


@pytest.mark.parametrize("size", [1, 2])
def test_uvloop_and_asyncio_in_turn(size: int) -> None:
    """A client works in uvloop's loop, in asyncio's after that, and in another one of uvloop's."""
    config = EngineConfig(parallel_config=ParallelConfig(data_parallel_size=size))
    options = ClientOptions(engine_target=TARGET)
    with EngineCoreClient.make_client(True, True, config, object, False, options=options) as client:
        uvloop.run(use(client, "first"))
        asyncio.run(use(client, "second"))
        uvloop.run(use(client, "third"))


def test_a_loop_that_was_closed_has_its_requests_aborted() -> None:
    """What was asked for in a loop of uvloop's that is closed does not reach the next one."""
    options = ClientOptions(engine_target=TARGET)
    with EngineCoreClient.make_client(True, True, EngineConfig(), object, False, options=options) as client:
        uvloop.run(client.add_request_async(make_request("old", 100_000)))

        async def next_one() -> None:
            await client.add_request_async(make_request("new", 2))
            names = set()
            tokens = 0
            while tokens < 2:
                for output in (await client.get_output_async()).outputs:
                    names.add(output.request_id)
                    tokens += len(output.new_token_ids)
            assert names == {"new"}

        uvloop.run(next_one())
