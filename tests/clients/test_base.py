"""The factories, and what each kind of client says of operations that belong to another."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from engine_client import EngineConfig, EngineCoreClient, InprocClient, SyncMPClient
from engine_client.testing.executors import EchoExecutor


def test_the_factory_makes_the_blocking_clients() -> None:
    """The two blocking combinations make their clients, usable as context managers."""
    for multiprocess, kind in ((False, InprocClient), (True, SyncMPClient)):
        with EngineCoreClient.make_client(multiprocess, False, EngineConfig(), EchoExecutor, False) as client:
            assert type(client) is kind
            assert client.is_alive


def test_asyncio_is_refused_with_a_sentence() -> None:
    """Asyncio without multiprocessing names the alternative; asyncio clients say what to use instead."""
    with pytest.raises(NotImplementedError, match=r"multiprocess_mode.*make_client\(True, True"):
        EngineCoreClient.make_client(False, True, EngineConfig(), EchoExecutor, False)
    with pytest.raises(NotImplementedError, match="to_thread"):
        EngineCoreClient.make_client(True, True, EngineConfig(), EchoExecutor, False)
    with pytest.raises(NotImplementedError, match="to_thread"):
        EngineCoreClient.make_async_mp_client(EngineConfig(), EchoExecutor, False)


ASYNC = [n for n, f in vars(EngineCoreClient).items() if inspect.iscoroutinefunction(f)]


@pytest.mark.parametrize("name", ASYNC)
def test_a_blocking_client_names_itself_when_a_coroutine_is_called(name: str) -> None:
    """Every coroutine of the interface raises NotImplementedError that names the client and the operation."""
    with InprocClient(EngineConfig(), EchoExecutor, False) as client:
        method = getattr(client, name)
        count = len(inspect.signature(method).parameters)
        required = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        assert len(required) <= count
        with pytest.raises(NotImplementedError, match=f"InprocClient has no {name}"):
            asyncio.run(method(*[None] * len(required)))


class Bare(EngineCoreClient):
    """Implements what is abstract, and nothing else."""

    is_alive = False

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing."""

    def check_health(self, timeout: float | None = 10.0) -> None:
        """Do nothing."""


SYNC = [
    name
    for name, function in vars(EngineCoreClient).items()
    if inspect.isfunction(function) and not inspect.iscoroutinefunction(function) and not name.startswith("_")
    if name not in ("shutdown", "check_health")
]


@pytest.mark.parametrize("name", SYNC)
def test_the_interface_itself_implements_nothing(name: str) -> None:
    """Every blocking operation that a client leaves out raises NotImplementedError."""
    method = getattr(Bare(), name)
    required = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    with pytest.raises(NotImplementedError, match=f"Bare has no {name}"):
        method(*[None] * len(required))
