"""vLLM's ``EngineCore`` behind this library's busy loop; loaded in the engine process only.

``VllmEngine`` does what vLLM's ``EngineCoreProc`` adds to its ``EngineCore``, less the sockets, threads and queues: the
outputs of aborts, and pauses that wait for the engine to be idle.

Threads: the busy loop's thread only.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Final

from engine_client import EngineCoreReadyResponse
from engine_client.interfaces import EngineContext

__all__ = ["VllmEngine", "build_engine"]

_UTILITIES: Final = (
    *("add_lora", "collective_rpc", "execute_dummy_batch", "get_kv_cache_group_metadata", "get_supported_tasks"),
    *("is_scheduler_paused", "is_sleeping", "list_loras", "pause_scheduler", "pin_lora", "profile", "remove_lora"),
    *("reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache", "resume_scheduler", "save_sharded_state"),
    *("sleep", "wake_up"),
)
"""The methods of vLLM's engine core that clients may call by name."""


def build_engine(vllm_config: Any, executor_class: Any, log_stats: bool, context: EngineContext) -> VllmEngine:
    """Build vLLM's engine core; the target that the clients of this integration name."""
    from vllm.utils.system_utils import decorate_logs  # noqa: PLC0415  # it takes seconds, and needs the stub
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415  # as above

    decorate_logs(_be_independent(vllm_config, context.rank))
    executor_class = _without_queue(vllm_config, executor_class)
    context.progress("loading the model", 0, 0)
    return VllmEngine(EngineCore(vllm_config, executor_class, log_stats, context.executor_failed))


def _be_independent(vllm_config: Any, rank: int) -> str:
    """Make a rank of a dense model an engine of its own, as vLLM does, with its own indices and name in transfers.

    Returns:
        What vLLM calls the process, in its log.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if parallel.data_parallel_size == 1 and rank == 0:
        return "EngineCore"
    if parallel.data_parallel_rank_local is None:  # else its user has several engines on this host
        parallel.data_parallel_rank_local = 0 if parallel.data_parallel_external_lb else rank
    if transfer is not None:
        transfer.engine_id = f"{transfer.engine_id}_dp{rank}"
    parallel.data_parallel_index = rank
    parallel.data_parallel_size = parallel.data_parallel_size_local = 1
    parallel.data_parallel_rank = 0
    return f"EngineCore_DP{rank}"


def _without_queue(vllm_config: Any, executor_class: Any) -> Any:
    """Return an executor that needs no ZMQ, where vLLM took one only for the sake of its environment variables.

    On a CPU vLLM turns ``uni`` into ``mp``, so that a worker process can start with OpenMP's variables set.  The engine
    process is such a process already.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415  # as above

    parallel = vllm_config.parallel_config
    if parallel.world_size != 1 or parallel.distributed_executor_backend != "mp" or not current_platform.is_cpu():
        return executor_class
    from vllm.v1.executor.abstract import Executor  # noqa: PLC0415  # as above

    parallel.distributed_executor_backend = "uni"
    return Executor.get_class(vllm_config)


def _own(features: Iterable[Any]) -> None:
    """Copy multimodal inputs out of shared memory, which the engine's cache of them would hold for hours.

    Args:
        features: vLLM's ``MultiModalFeatureSpec``; those without data are in that cache already.
    """
    for feature in features:
        for element in (feature.data or {}).values():
            element.data = _copied(element.data)


def _copied(value: Any) -> Any:
    """Return a copy of tensors, nested in lists and tuples as they are."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value.clone() if hasattr(value, "clone") else value


class VllmEngine:
    """Drives vLLM's engine core; an ``engine_client.interfaces.EngineCore``.

    Args:
        core: a ``vllm.v1.engine.core.EngineCore``; owned by this object.
    """

    def __init__(self, core: Any) -> None:
        self.core = core
        self.step_fn: Callable[[], tuple[dict[int, Any] | None, bool]] = core.step_fn
        self._aborted: dict[int, list[str]] = {}
        self._when_idle: list[Callable[[], None]] = []
        core.pause_scheduler = self.pause_scheduler  # the core's own cannot wait, and its sleep() calls it

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        """Return vLLM's own form of a request, and its wave."""
        if self.core.mm_receiver_cache is not None:
            _own(request.mm_features or ())
        prepared: tuple[Any, int] = self.core.preprocess_add_request(request)
        return prepared

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        """Hand a preprocessed request to the scheduler."""
        self.core.add_request(request, request_wave)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests without further output."""
        if request_ids:
            self.core.abort_requests(request_ids)

    def abort_all(self) -> None:
        """End every request with reason ABORT; ``take_outputs`` says so."""
        from vllm.v1.request import RequestStatus  # noqa: PLC0415  # as above

        aborted = self.core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        for request_id, client_index in aborted or ():
            self._aborted.setdefault(client_index, []).append(request_id)

    def post_step(self, model_executed: bool) -> None:
        """Follow up on a step, and answer pauses that are complete."""
        self.core.post_step(model_executed)
        if self._when_idle and not self.has_work():
            actions, self._when_idle = self._when_idle, []
            for action in actions:
                action()

    def has_work(self) -> bool:
        """Tell whether there is anything to schedule, or a batch under way."""
        return self.core.scheduler.has_requests() or bool(self.core.batch_queue)

    def take_outputs(self) -> dict[int, Any]:
        """Return, once, the outputs of what was aborted as a whole."""
        if not self._aborted:
            return {}
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason  # noqa: PLC0415  # as above

        aborted, self._aborted = self._aborted, {}
        return {
            index: EngineCoreOutputs(
                outputs=[EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT) for request_id in ids]
            )
            for index, ids in aborted.items()
        }

    def counts(self) -> tuple[int, int]:
        """Return how many requests are waiting and running."""
        running, waiting = self.core.scheduler.get_request_counts()
        return waiting, running

    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        """Return the methods of vLLM's engine core that clients may call by name."""
        return {name: getattr(self.core, name) for name in _UTILITIES if hasattr(self.core, name)}

    def pause_state(self) -> tuple[bool, bool]:
        """Return whether the engine sleeps, and whether its scheduler is paused."""
        return bool(self.core.model_executor.is_sleeping), bool(self.core.is_scheduler_paused())

    def ready_response(self) -> EngineCoreReadyResponse:
        """Return the engine's real capacities."""
        import vllm  # noqa: PLC0415  # as above

        config = self.core.vllm_config
        cache = config.cache_config
        return EngineCoreReadyResponse(
            max_model_len=config.model_config.max_model_len,
            num_gpu_blocks=cache.num_gpu_blocks or 0,
            block_size=cache.block_size,
            dp_stats_address=None,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            vllm_version=vllm.__version__,
            world_size=config.parallel_config.world_size,
            data_parallel_size=config.parallel_config.data_parallel_size,
            kv_cache_size_tokens=cache.kv_cache_size_tokens,
            kv_cache_max_concurrency=cache.kv_cache_max_concurrency,
        )

    def shutdown(self) -> None:
        """Release everything; the process ends next.

        What is left need not be searched for garbage once more: with all of torch loaded that takes a second.
        """
        self.core.shutdown()
        gc.freeze()

    # -- pause ---------------------------------------------------------------------------------------------------------

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Future[Any] | None:
        """Hold new requests back until ``resume_scheduler``; in vLLM's three modes.

        Args:
            mode: ``"abort"`` ends requests in flight with reason ABORT, ``"wait"`` lets them end, ``"keep"`` freezes
                them.
            clear_cache: forget cached prefixes and inputs, once paused.

        Returns:
            None when paused, or a future that is done when the engine is idle.

        Raises:
            ValueError: an unknown mode.
        """
        from vllm.v1.core.sched.interface import PauseState  # noqa: PLC0415  # as above

        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"the pause mode must be 'abort', 'wait' or 'keep', not {mode!r}")
        if mode == "abort":
            self.abort_all()
        self.core.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        future: Future[Any] = Future()

        def complete() -> None:
            try:
                if clear_cache:
                    self.core._reset_caches()  # noqa: SLF001  # as vLLM's own subclass does
            except Exception as error:  # noqa: BLE001  # the answer of the call that waits
                future.set_exception(error)
            else:
                future.set_result(None)

        if self.has_work():
            self._when_idle.append(complete)
            return future
        complete()
        future.result()  # raises what the caches have raised
        return None
