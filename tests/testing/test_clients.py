"""Clients of scripted engines for anybody's tests."""

from __future__ import annotations

import asyncio

import pytest

from engine_client import AsyncMPClient, EngineConfig, StartupError, SyncMPClient, testing
from engine_client.testing.clients import collect, make_client, make_request
from engine_client.testing.scripted import Script


def test_a_blocking_client() -> None:
    """It does what the script says; the configuration that was given is not changed."""
    config = EngineConfig(additional_config={"mine": 1})
    with make_client(Script(token=9, tokens_per_step=2), config=config, shutdown_timeout=1.0) as client:
        assert isinstance(client, SyncMPClient)
        client.add_request(make_request("a", 5, prompt=[4], priority=2))
        outputs = collect(client, 1)["a"]
        assert [output.new_token_ids for output in outputs] == [[9, 9], [9, 9], [9]]
        assert client.call_utility("last_request").priority == 2
        assert client.options.shutdown_timeout == 1.0
        with pytest.raises(TimeoutError):
            collect(client, 1, timeout=0.01)
    assert config.additional_config == {"mine": 1}


def test_an_asyncio_client() -> None:
    """``kind="async"`` makes the other one."""

    async def main() -> list[int]:
        with make_client(kind="async") as client:
            assert isinstance(client, AsyncMPClient)
            return [token async for output in client.stream(make_request("a")) for token in output.new_token_ids]

    assert asyncio.run(main()) == [1, 1, 1]


def test_a_start_that_fails() -> None:
    """What the script has the start raise is the cause of what the constructor raises."""
    with pytest.raises(StartupError) as caught:
        make_client(Script(start_error=KeyError("as the script says")))
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_names_of_the_package() -> None:
    """``engine_client.testing`` has what tests need most, each from its module, and says what it does not have."""
    for name in testing.__all__:
        assert getattr(testing, name) is not None
    assert testing.make_client is make_client
    with pytest.raises(AttributeError, match="'nonsense'"):
        testing.nonsense  # noqa: B018
