"""The utilities of an engine as methods, written out so that editors and type checkers know them.

Each one is a call by name of what the engine registers under that name; see ``reference`` semantics in the method's
docstring.  The asyncio twins belong here too, so that the two colours can be read side by side.

Threads: as ``call_utility`` of the class that they are mixed into.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

from engine_client.messages import PauseMode
from engine_client.params import LoRARequest

__all__ = ["AsyncUtilities", "SyncUtilities"]


class SyncUtilities(ABC):
    """The blocking colour.

    Every method raises what ``call_utility`` raises: the engine's own exception, or ``EngineDeadError``.
    """

    @abstractmethod
    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a utility by name and return its result; the one place that the class which mixes this in fills."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks that the engine can do, such as ``("generate",)``."""
        return cast("tuple[str, ...]", self.call_utility("get_supported_tasks"))

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop the engine's profiler."""
        self.call_utility("profile", is_start, profile_prefix)

    def reset_mm_cache(self) -> None:
        """Forget cached multi-modal inputs."""
        self.call_utility("reset_mm_cache")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; return whether that was possible: not while requests run, unless they are reset."""
        return cast("bool", self.call_utility("reset_prefix_cache", reset_running_requests, reset_connector))

    def reset_encoder_cache(self) -> None:
        """Forget cached encoder outputs."""
        self.call_utility("reset_encoder_cache")

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause and free memory: level 0 nothing, 1 the KV cache, 2 the weights too."""
        self.call_utility("sleep", level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Rebuild what ``sleep`` freed (all of it, or what ``tags`` name) and resume."""
        self.call_utility("wake_up", tags)

    def is_sleeping(self) -> bool:
        """Tell whether the engine sleeps or is paused."""
        return cast("bool", self.call_utility("is_sleeping"))

    def execute_dummy_batch(self) -> None:
        """Run the model once on nothing."""
        self.call_utility("execute_dummy_batch")

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter."""
        return cast("bool", self.call_utility("add_lora", lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload a LoRA adapter."""
        return cast("bool", self.call_utility("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded LoRA adapters."""
        return cast("set[int]", self.call_utility("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep a LoRA adapter loaded."""
        return cast("bool", self.call_utility("pin_lora", lora_id))

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Save the weights as each worker holds them; ``max_size`` is bytes per file."""
        self.call_utility("save_sharded_state", path, pattern, max_size)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, or a callable that gets the worker first; return one result per worker."""
        return cast("list[Any]", self.call_utility("collective_rpc", method, timeout, args, kwargs))

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause: ``abort`` what runs, ``wait`` until it has drained, or ``keep`` it frozen."""
        self.call_utility("pause_scheduler", mode, clear_cache)

    def resume_scheduler(self) -> None:
        """Go on after a pause."""
        self.call_utility("resume_scheduler")

    def is_scheduler_paused(self) -> bool:
        """Tell whether the scheduler is paused."""
        return cast("bool", self.call_utility("is_scheduler_paused"))


class AsyncUtilities(ABC):
    """The asyncio colour.

    Every method raises what ``call_utility_async`` raises: the engine's own exception, or ``EngineDeadError``.
    """

    @abstractmethod
    async def call_utility_async(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a utility by name and return its result; the one place that the class which mixes this in fills."""

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Return the tasks that the engine can do, such as ``("generate",)``."""
        return cast("tuple[str, ...]", await self.call_utility_async("get_supported_tasks"))

    async def profile_async(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop the engine's profiler."""
        await self.call_utility_async("profile", is_start, profile_prefix)

    async def reset_mm_cache_async(self) -> None:
        """Forget cached multi-modal inputs."""
        await self.call_utility_async("reset_mm_cache")

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; return whether that was possible: not while requests run, unless they are reset."""
        return cast(
            "bool", await self.call_utility_async("reset_prefix_cache", reset_running_requests, reset_connector)
        )

    async def reset_encoder_cache_async(self) -> None:
        """Forget cached encoder outputs."""
        await self.call_utility_async("reset_encoder_cache")

    async def sleep_async(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause and free memory: level 0 nothing, 1 the KV cache, 2 the weights too."""
        await self.call_utility_async("sleep", level, mode)

    async def wake_up_async(self, tags: list[str] | None = None) -> None:
        """Rebuild what ``sleep`` freed (all of it, or what ``tags`` name) and resume."""
        await self.call_utility_async("wake_up", tags)

    async def is_sleeping_async(self) -> bool:
        """Tell whether the engine sleeps or is paused."""
        return cast("bool", await self.call_utility_async("is_sleeping"))

    async def execute_dummy_batch_async(self) -> None:
        """Run the model once on nothing."""
        await self.call_utility_async("execute_dummy_batch")

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter."""
        return cast("bool", await self.call_utility_async("add_lora", lora_request))

    async def remove_lora_async(self, lora_id: int) -> bool:
        """Unload a LoRA adapter."""
        return cast("bool", await self.call_utility_async("remove_lora", lora_id))

    async def list_loras_async(self) -> set[int]:
        """Return the numbers of the loaded LoRA adapters."""
        return cast("set[int]", await self.call_utility_async("list_loras"))

    async def pin_lora_async(self, lora_id: int) -> bool:
        """Keep a LoRA adapter loaded."""
        return cast("bool", await self.call_utility_async("pin_lora", lora_id))

    async def save_sharded_state_async(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Save the weights as each worker holds them; ``max_size`` is bytes per file."""
        await self.call_utility_async("save_sharded_state", path, pattern, max_size)

    async def collective_rpc_async(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, or a callable that gets the worker first; return one result per worker."""
        return cast("list[Any]", await self.call_utility_async("collective_rpc", method, timeout, args, kwargs))

    async def pause_scheduler_async(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause: ``abort`` what runs, ``wait`` until it has drained, or ``keep`` it frozen."""
        await self.call_utility_async("pause_scheduler", mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        """Go on after a pause."""
        await self.call_utility_async("resume_scheduler")

    async def is_scheduler_paused_async(self) -> bool:
        """Tell whether the scheduler is paused."""
        return cast("bool", await self.call_utility_async("is_scheduler_paused"))
