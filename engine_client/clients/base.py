"""The client interface of the reference, and its factories.

``EngineCoreClient`` names every operation of every kind of client, so that code written for the reference finds them;
a client implements those of its colour, and the others say which client has them.

Threads: declarations only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from engine_client.config import ClientOptions
from engine_client.messages import EngineCoreOutputs, EngineCoreRequest, PauseMode
from engine_client.params import LoRARequest

__all__ = ["EngineCoreClient"]


class EngineCoreClient(ABC):
    """What every client offers, in both colours."""

    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        asyncio_mode: bool,
        vllm_config: Any,
        executor_class: Callable[..., Any],
        log_stats: bool,
        *,
        options: ClientOptions | None = None,
    ) -> EngineCoreClient:
        """Make the client for these two choices.

        Args:
            multiprocess_mode: run the engine core in a process of its own.
            asyncio_mode: offer coroutines instead of blocking calls; needs ``multiprocess_mode``.
            vllm_config: ``EngineConfig`` or any object with its attributes.
            executor_class: called with ``vllm_config`` where the engine runs.
            log_stats: attach scheduler statistics to outputs.
            options: of this library; None: ``ClientOptions()``.

        Raises:
            NotImplementedError: asyncio without multiprocessing.
            StartupError: the engine did not come up.
        """
        if asyncio_mode and not multiprocess_mode:
            raise NotImplementedError(
                "asyncio_mode needs multiprocess_mode: an engine core in this process would block the event loop in "
                "every step. Use make_client(True, True, …), or make_client(False, False, …) without asyncio."
            )
        if asyncio_mode:
            return EngineCoreClient.make_async_mp_client(vllm_config, executor_class, log_stats, options=options)
        if multiprocess_mode:
            from engine_client.clients.sync import SyncMPClient  # noqa: PLC0415  # sync is built on this module

            return SyncMPClient(vllm_config, executor_class, log_stats, options=options)
        from engine_client.clients.inproc import InprocClient  # noqa: PLC0415  # inproc is built on this module

        return InprocClient(vllm_config, executor_class, log_stats, options=options)

    @staticmethod
    def make_async_mp_client(  # noqa: PLR0913  # the reference's parameters
        vllm_config: Any,
        executor_class: Callable[..., Any],
        log_stats: bool,
        client_addresses: Any = None,
        client_count: int = 1,
        client_index: int = 0,
        *,
        options: ClientOptions | None = None,
    ) -> EngineCoreClient:
        """Make the asyncio client that the configuration asks for.

        One rank: ``AsyncMPClient``; several with ``data_parallel_external_lb``: ``DPAsyncMPClient``, for one of them;
        else ``DPLBAsyncMPClient``, which balances over all of them.

        Args:
            vllm_config, executor_class, log_stats, options: as ``make_client``.
            client_addresses: an endpoint of ``launch_core_engines``; None: launch engines.
            client_count: how many front-ends these engines have.
            client_index: which of them this is.

        Raises:
            StartupError: an engine did not come up.
        """
        from engine_client.clients import aio, data_parallel  # noqa: PLC0415  # they load asyncio, and build on this

        parallel = vllm_config.parallel_config
        kind: type[aio.AsyncMPClient] = aio.AsyncMPClient
        if parallel.data_parallel_size > 1:
            external = getattr(parallel, "data_parallel_external_lb", False)
            kind = data_parallel.DPAsyncMPClient if external else data_parallel.DPLBAsyncMPClient
        return kind(
            vllm_config, executor_class, log_stats, client_addresses, client_count, client_index, options=options
        )

    def _missing(self, operation: str) -> NotImplementedError:
        """Return the error for an operation of another kind of client."""
        return NotImplementedError(f"{type(self).__name__} has no {operation}: it belongs to another kind of client")

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine and release everything; idempotent.  ``timeout``: seconds for the polite end."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Tell, without asking the engine, whether it can still be used."""

    @abstractmethod
    def check_health(self, timeout: float | None = 10.0) -> None:
        """Make sure that the engine answers.

        Raises:
            EngineDeadError: it is dead, or the client is closed.
            EngineStalledError: it did not answer within ``timeout`` seconds.
        """

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the next outputs."""
        raise self._missing("get_output")

    async def get_output_async(self) -> EngineCoreOutputs:
        """Coroutine form of ``get_output``."""
        raise self._missing("get_output_async")

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request."""
        raise self._missing("add_request")

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Coroutine form of ``add_request``."""
        raise self._missing("add_request_async")

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests without further output."""
        raise self._missing("abort_requests")

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Coroutine form of ``abort_requests``."""
        raise self._missing("abort_requests_async")

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that the engine can do, such as ``("generate",)``."""
        raise self._missing("get_supported_tasks")

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Coroutine form of ``get_supported_tasks``."""
        raise self._missing("get_supported_tasks_async")

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop the engine's profiler."""
        raise self._missing("profile")

    async def profile_async(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Coroutine form of ``profile``."""
        raise self._missing("profile_async")

    def reset_mm_cache(self) -> None:
        """Forget cached multi-modal inputs."""
        raise self._missing("reset_mm_cache")

    async def reset_mm_cache_async(self) -> None:
        """Coroutine form of ``reset_mm_cache``."""
        raise self._missing("reset_mm_cache_async")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; return whether that was possible: not while requests run, unless they are reset."""
        raise self._missing("reset_prefix_cache")

    async def reset_prefix_cache_async(
        self,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
    ) -> bool:
        """Coroutine form of ``reset_prefix_cache``."""
        raise self._missing("reset_prefix_cache_async")

    def reset_encoder_cache(self) -> None:
        """Forget cached encoder outputs."""
        raise self._missing("reset_encoder_cache")

    async def reset_encoder_cache_async(self) -> None:
        """Coroutine form of ``reset_encoder_cache``."""
        raise self._missing("reset_encoder_cache_async")

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause and free memory: level 0 nothing, 1 the KV cache, 2 the weights too."""
        raise self._missing("sleep")

    async def sleep_async(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Coroutine form of ``sleep``."""
        raise self._missing("sleep_async")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Rebuild what ``sleep`` freed (all of it, or what ``tags`` name) and resume."""
        raise self._missing("wake_up")

    async def wake_up_async(self, tags: list[str] | None = None) -> None:
        """Coroutine form of ``wake_up``."""
        raise self._missing("wake_up_async")

    def is_sleeping(self) -> bool:
        """Tell whether the engine sleeps or is paused."""
        raise self._missing("is_sleeping")

    async def is_sleeping_async(self) -> bool:
        """Coroutine form of ``is_sleeping``."""
        raise self._missing("is_sleeping_async")

    def execute_dummy_batch(self) -> None:
        """Run the model once on nothing."""
        raise self._missing("execute_dummy_batch")

    async def execute_dummy_batch_async(self) -> None:
        """Coroutine form of ``execute_dummy_batch``."""
        raise self._missing("execute_dummy_batch_async")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter."""
        raise self._missing("add_lora")

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Coroutine form of ``add_lora``."""
        raise self._missing("add_lora_async")

    def remove_lora(self, lora_id: int) -> bool:
        """Unload a LoRA adapter."""
        raise self._missing("remove_lora")

    async def remove_lora_async(self, lora_id: int) -> bool:
        """Coroutine form of ``remove_lora``."""
        raise self._missing("remove_lora_async")

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded LoRA adapters."""
        raise self._missing("list_loras")

    async def list_loras_async(self) -> set[int]:
        """Coroutine form of ``list_loras``."""
        raise self._missing("list_loras_async")

    def pin_lora(self, lora_id: int) -> bool:
        """Keep a LoRA adapter loaded."""
        raise self._missing("pin_lora")

    async def pin_lora_async(self, lora_id: int) -> bool:
        """Coroutine form of ``pin_lora``."""
        raise self._missing("pin_lora_async")

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Save the weights as each worker holds them; ``max_size`` is bytes per file."""
        raise self._missing("save_sharded_state")

    async def save_sharded_state_async(
        self,
        path: str,
        pattern: str | None = None,
        max_size: int | None = None,
    ) -> None:
        """Coroutine form of ``save_sharded_state``."""
        raise self._missing("save_sharded_state_async")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, or a callable that gets the worker first; return one result per worker."""
        raise self._missing("collective_rpc")

    async def collective_rpc_async(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Coroutine form of ``collective_rpc``."""
        raise self._missing("collective_rpc_async")

    async def scale_elastic_ep(self, new_data_parallel_size: int) -> None:
        """Change the number of ranks."""
        raise self._missing("scale_elastic_ep")

    def dp_engines_running(self) -> bool:
        """Tell whether lock-step ranks are in a wave."""
        raise self._missing("dp_engines_running")
