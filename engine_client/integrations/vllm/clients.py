"""The factories that vLLM's front-ends call instead of their own.

Threads: as the clients that they make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from engine_client import ClientOptions, EngineCoreClient
from engine_client.integrations.vllm.carried import CarriedConfig
from engine_client.integrations.vllm.refusals import unsupported
from engine_client.integrations.vllm.zmq_stub import is_stub, unavailable

__all__ = ["factories"]

TARGET: Final = "engine_client.integrations.vllm.engine:build_engine"

_LISTENERS: Final = ("Nixl", "Mooncake", "MoRIIO")
"""How the names of KV connectors begin that open a socket in a thread, and wait for ever where there is none."""


def factories(
    make_inproc: Callable[..., Any], options: ClientOptions | None = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``make_client`` and ``make_async_mp_client`` with the parameters of vLLM's.

    Args:
        make_inproc: vLLM's own ``make_client``, for engines in the caller's process.
        options: of this library; the engine target is set here.
    """
    values = {} if options is None else vars(options)
    options = ClientOptions(**{**values, "engine_target": TARGET})

    def make_client(
        multiprocess_mode: bool, asyncio_mode: bool, vllm_config: Any, executor_class: Any, log_stats: bool
    ) -> Any:
        """Make the client for these two choices."""
        if not multiprocess_mode:
            return make_inproc(multiprocess_mode, asyncio_mode, vllm_config, executor_class, log_stats)
        return make(asyncio_mode, vllm_config, executor_class, log_stats)

    def make_async_mp_client(  # vLLM's parameters
        vllm_config: Any,
        executor_class: Any,
        log_stats: bool,
        client_addresses: Any = None,
        client_count: int = 1,
        client_index: int = 0,  # vLLM's parameter
    ) -> Any:
        """Make the asyncio client that the configuration asks for."""
        if client_addresses or client_count > 1:  # vLLM passes {} for none
            raise unsupported("several API servers", "their engines are vLLM's; use --api-server-count 1")
        return make(True, vllm_config, executor_class, log_stats)

    def make(asyncio_mode: bool, vllm_config: Any, executor_class: Any, log_stats: bool) -> Any:
        _check(vllm_config)
        carried = CarriedConfig(vllm_config)
        client: Any = EngineCoreClient.make_client(
            True, asyncio_mode, carried, executor_class, log_stats, options=options
        )
        client.vllm_config = vllm_config
        return client

    return make_client, make_async_mp_client


def _check(vllm_config: Any) -> None:
    """Refuse what would start and then not work."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "data_parallel_backend", "mp") == "ray":  # it counts for a single engine, too
        raise unsupported("the data-parallel backend 'ray'", "it starts the processes of its engines by itself")
    if parallel.data_parallel_size > 1:
        if getattr(vllm_config.model_config, "is_moe", False):
            raise unsupported("a mixture of experts with data parallelism", "its ranks need vLLM's coordinator")
        if getattr(parallel, "data_parallel_size_local", parallel.data_parallel_size) < parallel.data_parallel_size:
            raise unsupported("several hosts", "its pipes end at this one")
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is not None and is_stub():
        for name in _connectors(transfer.kv_connector, transfer.kv_connector_extra_config):
            if name.startswith(_LISTENERS):
                raise unavailable(f"the KV connector {name}", "its hosts or processes agree over them")


def _connectors(name: str | None, extra: dict[str, Any] | None) -> Iterator[str]:
    """Yield the name of a KV connector, and of those that a ``MultiConnector`` has."""
    yield name or ""
    for inner in (extra or {}).get("connectors") or ():
        yield from _connectors(inner.get("kv_connector"), inner.get("kv_connector_extra_config"))
