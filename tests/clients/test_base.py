"""The factories, and what each kind of client says of operations that belong to another."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial

import pytest

from engine_client import ClientOptions, EngineConfig, EngineCoreClient, InprocClient, SyncMPClient
from engine_client.clients.aio import AsyncMPClient
from engine_client.clients.data_parallel import DPAsyncMPClient, DPLBAsyncMPClient
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.scripted import TARGET


def test_the_factory_makes_the_blocking_clients() -> None:
    """The two blocking combinations make their clients, usable as context managers."""
    for multiprocess, kind in ((False, InprocClient), (True, SyncMPClient)):
        with EngineCoreClient.make_client(multiprocess, False, EngineConfig(), EchoExecutor, False) as client:
            assert type(client) is kind
            assert client.is_alive


def test_asyncio_in_this_process_is_refused_with_a_sentence() -> None:
    """Asyncio without multiprocessing raises NotImplementedError, which names the alternatives."""
    with pytest.raises(NotImplementedError, match=r"multiprocess_mode.*make_client\(True, True"):
        EngineCoreClient.make_client(False, True, EngineConfig(), EchoExecutor, False)


@pytest.mark.parametrize(
    ("ranks", "external", "kind"),
    [(1, False, AsyncMPClient), (2, True, DPAsyncMPClient), (2, False, DPLBAsyncMPClient)],
)
def test_the_factories_make_the_asyncio_clients(ranks: int, external: bool, kind: type) -> None:
    """One rank, one of several for a balancer outside, all of several: each has its class, from both factories."""
    for make in (partial(EngineCoreClient.make_client, True, True), EngineCoreClient.make_async_mp_client):
        config = EngineConfig()
        config.parallel_config.data_parallel_size = ranks
        config.parallel_config.data_parallel_external_lb = external
        with make(config, None, False, options=ClientOptions(engine_target=TARGET)) as client:
            assert type(client) is kind
            assert client.is_alive
            assert client.core_engines == [b"\0\0", b"\1\0"][: 1 if external else ranks]


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
