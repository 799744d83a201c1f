"""What a client may ask of an engine by name: pause, sleep, caches, adapters, profile, calls to workers.

``EngineCore`` is one of these, with requests and steps.  Names and signatures are the reference's.

A pause is complete when no request runs that it lets end and, for a rank in lock-step, when its group is idle: until
then the others count on this rank's steps, so its memory must not be taken from it.

Invariants: I2 (a pause that waits is answered: when complete, resumed or shut down).

Threads: the engine's thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final, get_args

from engine_client.engine.executor import Executor, has_hook
from engine_client.engine.pause import DrainWaiters
from engine_client.engine.profile import Profiler
from engine_client.engine.scheduler import Scheduler
from engine_client.messages import PauseMode

__all__ = ["UTILITIES", "EngineControl"]

_log = logging.getLogger("engine_client.engine")

UTILITIES: Final = (
    "add_lora",
    "collective_rpc",
    "execute_dummy_batch",
    "get_kv_cache_group_metadata",
    "get_supported_tasks",
    "is_scheduler_paused",
    "is_sleeping",
    "list_loras",
    "pause_scheduler",
    "pin_lora",
    "profile",
    "remove_lora",
    "reset_encoder_cache",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume_scheduler",
    "save_sharded_state",
    "sleep",
    "wake_up",
)
"""The methods that clients may call by name; no other can be."""


class EngineControl:
    """The utilities of an engine.

    Args:
        executor: whose hooks they call; owned by the subclass.
        scheduler: what they pause.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self.model_executor = executor
        self.scheduler = scheduler
        self._tells_ends = has_hook(executor, "finish_requests")
        self.group_is_idle: Callable[[], bool] = _always  # replaced for a rank in lock-step
        self._waiters = DrainWaiters()
        self._profiler = Profiler()

    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        """Return the methods that clients may call by name."""
        return {name: getattr(self, name) for name in UTILITIES}

    def _follow_up(self) -> None:
        """Tell the executor which requests have ended, and answer pauses that are complete."""
        ended = self.scheduler.outbox.take_ended()
        if ended and self._tells_ends:
            self.model_executor.finish_requests(ended)
        if self._waiters:
            self._waiters.answer()

    def _end_control(self) -> None:
        """Fail who still waits, and write a profile that is being taken."""
        self._waiters.give_up("the engine was shut down")
        if self._profiler.is_running:
            self.profile(is_start=False)

    # -- pause and sleep -----------------------------------------------------------------------------------------------

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[Any] | None:
        """Hold new requests back until ``resume_scheduler``.

        Args:
            mode: ``"abort"`` ends requests in flight with reason ABORT, ``"wait"`` lets them end, ``"keep"`` freezes
                them.
            clear_cache: forget cached prefixes and inputs, once paused; what is frozen is computed anew then.

        Returns:
            None when paused, or a future that is done when the last request in flight has ended and ranks in lock-step
            have agreed; it fails if the scheduler is resumed before.

        Raises:
            ValueError: an unknown mode.
            RuntimeError: the engine sleeps, so that waiting would be for ever.
        """
        return self._pause(mode, self._clear_caches if clear_cache else _nothing)

    def _pause(self, mode: PauseMode, then: Callable[[], None]) -> Future[Any] | None:
        if mode not in get_args(PauseMode):
            raise ValueError(f"the pause mode must be 'abort', 'wait' or 'keep', not {mode!r}")
        if mode == "wait" and self.scheduler.has_in_flight():
            self._check_awake()
        self.scheduler.pause(mode)
        self._follow_up()
        is_complete = self._is_drained if mode == "wait" else self.group_is_idle
        if not is_complete():
            return self._waiters.add(is_complete, then)
        then()
        return None

    def _is_drained(self) -> bool:
        return not self.scheduler.has_in_flight() and self.group_is_idle()

    def resume_scheduler(self) -> None:
        """Go on, with what was frozen and what was held back.

        Raises:
            RuntimeError: the executor sleeps.
        """
        self._check_awake()
        self.scheduler.resume()
        self._waiters.give_up("the scheduler was resumed before the pause was complete")

    def _check_awake(self) -> None:
        if self.model_executor.is_sleeping:
            raise RuntimeError(f"the engine sleeps ({sorted(self.model_executor.sleeping_tags)}); call wake_up first")

    def is_scheduler_paused(self) -> bool:
        """Tell whether requests are held back."""
        return self.scheduler.pause_mode is not None

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[Any] | None:
        """Pause, and give memory back until ``wake_up``.

        Args:
            level: 0 only pauses, 1 drops what the KV blocks hold, 2 the weights too.
            mode: as for ``pause_scheduler``.

        Returns:
            None when asleep, or a future that is done when the pause is complete and the engine sleeps.

        Raises:
            ValueError: an unknown level or mode.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"the sleep level must be 0, 1 or 2, not {level!r}")

        def fall_asleep() -> None:
            self._clear_caches()
            self.model_executor.sleep(level)

        return self._pause(mode, fall_asleep if level else _nothing)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what sleeps, and go on once everything is awake.

        Args:
            tags: what to wake up, of ``"weights"``, ``"kv_cache"`` and ``"scheduling"``; None: everything.
        """
        if tags is not None:
            tags = [tag for tag in tags if tag != "scheduling"]
        if tags is None or tags:
            self.model_executor.wake_up(tags)
        if not self.model_executor.is_sleeping:
            self.resume_scheduler()

    def is_sleeping(self) -> bool:
        """Tell whether the engine sleeps at any level, or is paused."""
        return self.is_scheduler_paused() or self.model_executor.is_sleeping

    def pause_state(self) -> tuple[bool, bool]:
        """Return whether the engine sleeps, and whether its scheduler is paused."""
        return self.model_executor.is_sleeping, self.is_scheduler_paused()

    # -- caches --------------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes.

        Args:
            reset_running_requests: preempt requests that hold blocks, so that nothing stands in the way.
            reset_connector: accepted; there is no connector to an outside cache.

        Returns:
            Whether it was done; False if requests hold blocks.
        """
        return self.scheduler.reset_prefix_cache(preempt=reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Forget cached multi-modal inputs."""
        self.model_executor.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """Forget cached encoder outputs."""
        self.model_executor.reset_encoder_cache()

    def _clear_caches(self) -> None:
        self.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.reset_mm_cache()
        self.reset_encoder_cache()

    # -- the executor's ------------------------------------------------------------------------------------------------

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter; a ValueError if the executor has none."""
        return self.model_executor.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter; a ValueError if the executor has none."""
        return self.model_executor.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters; a ValueError if the executor has none."""
        return self.model_executor.list_loras()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded; a ValueError if the executor has none."""
        return self.model_executor.pin_lora(lora_id)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the weights; a ValueError if the executor cannot."""
        self.model_executor.save_sharded_state(path, pattern, max_size)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, by name, or a function with the worker as its first argument."""
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def execute_dummy_batch(self) -> None:
        """Run a step without requests; while the executor sleeps there is nothing to run it with."""
        if not self.model_executor.is_sleeping:
            self.model_executor.execute_dummy_batch()

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop the executor's profiler, or ``cProfile`` if it has none; the log says which file it writes.

        Raises:
            ValueError: started twice, or stopped without a start.
        """
        if has_hook(self.model_executor, "profile"):
            self.model_executor.profile(is_start, profile_prefix)
        elif is_start:
            _log.info("profiling; at its end the profile is written to %s", self._profiler.start(profile_prefix))
        else:
            _log.info("wrote the profile to %s", self._profiler.stop())

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return ``"generate"``, pooling tasks, or both."""
        return tuple(self.model_executor.supported_tasks)

    def get_kv_cache_group_metadata(self) -> list[dict[str, int | str | None]]:
        """Describe the groups of KV blocks; here all layers share one."""
        return [
            {
                "group_idx": 0,
                "kind": "full_attention",
                "block_size": self.scheduler.limits.block_size,
                "sliding_window": None,
            }
        ]


def _always() -> bool:
    """Stand in for a group: an engine on its own is as idle as it is."""
    return True


def _nothing() -> None:
    """Do nothing more once paused."""
