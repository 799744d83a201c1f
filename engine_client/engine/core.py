"""The engine core: one executor, one scheduler, and everything that a client may ask of them.

::

    message ─▶ preprocess_add_request ─▶ add_request ─▶ Scheduler
    step:  Scheduler.schedule ─▶ Executor.execute_model ─▶ check_output ─▶ Scheduler.update ─▶ outputs, by client

Names and signatures are the reference's.  The same class serves inside of the client's process and in a process of its
own: whoever drives it calls ``step_fn`` and ``post_step`` while ``has_work``, and ``take_outputs`` after anything else.

An exception of ``preprocess_add_request`` or ``add_request`` belongs to that request, one of a utility to that call;
one of a step is the engine's end.

Threads: all calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Union

import engine_client
from engine_client.engine.batch import Batch, check_output
from engine_client.engine.control import EngineControl
from engine_client.engine.executor import Executor
from engine_client.engine.intake import Intake
from engine_client.engine.limits import read_limits
from engine_client.engine.request import Request
from engine_client.engine.scheduler import Scheduler
from engine_client.engine.step_log import log_failure, log_iteration
from engine_client.ipc.counters import Counters
from engine_client.messages import EngineCoreOutputs, EngineCoreReadyResponse

__all__ = ["EngineCore"]

StepOutputs = tuple[Union[dict[int, EngineCoreOutputs], None], bool]


class EngineCore(EngineControl):
    """Drives an executor for any number of front-ends; ``shutdown`` ends it.

    Args:
        vllm_config: ``EngineConfig``, or any object with its attributes; not changed.
        executor_class: builds the executor, from the configuration alone.
        log_stats: record events of requests and statistics of steps, and send them.
        executor_fail_callback: called, from any thread, when an executor's own workers have failed.
        include_finished_set: name the requests that ended in ``EngineCoreOutputs.finished_requests``.
        counters: where what is done is counted; None: memory of its own.

    Raises:
        TypeError, ValueError: the configuration cannot work, or ``executor_class`` builds something else.
        Exception: what the executor's constructor raised.
    """

    def __init__(
        self,
        vllm_config: Any,
        executor_class: Callable[..., Any],
        log_stats: bool,
        executor_fail_callback: Callable[[], None] | None = None,
        include_finished_set: bool = False,
        *,
        counters: Counters | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.log_stats = log_stats
        executor = _build(executor_class, vllm_config)
        try:
            if executor_fail_callback is not None:
                executor.register_failure_callback(executor_fail_callback)
            self.limits = read_limits(vllm_config, executor)
        except BaseException:
            executor.shutdown()
            raise
        self.counters = Counters() if counters is None else counters
        scheduler = Scheduler(
            self.limits, log_stats=log_stats, include_finished_set=include_finished_set, counters=self.counters
        )
        super().__init__(executor, scheduler)
        self.step_fn: Callable[[], StepOutputs] = self.step
        self._intake = Intake(executor, self.limits)
        self._logs_iterations = bool(_section(vllm_config, "observability_config", "enable_logging_iteration_details"))
        self._is_shut_down = False

    def __repr__(self) -> str:
        state = "shut down" if self._is_shut_down else "sleeping" if self.is_sleeping() else "serving"
        return f"<EngineCore {state} {self.model_executor!r} {self.scheduler!r}>"

    # -- requests ------------------------------------------------------------------------------------------------------

    def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
        """Check a client's message; return the engine's own form of it, and its wave.

        Raises:
            TypeError, ValueError: it cannot be served; the text says why and what to do.
        """
        return self._intake.read(request), getattr(request, "current_wave", 0)

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        """Queue a request that ``preprocess_add_request`` returned; the wave matters to lock-step groups only.

        Raises:
            TypeError: it is a client's message.
            ValueError: a request of this id is in flight.
        """
        if not isinstance(request, Request):
            raise TypeError(f"add_request needs what preprocess_add_request returns, not {type(request).__name__}")
        self.scheduler.add(request)
        if request.abort_immediately:
            self.abort_requests([request.request_id])

    def abort_requests(self, request_ids: list[str] | str) -> None:
        """End requests without further output; unknown and finished ids are ignored."""
        self.scheduler.abort((request_ids,) if isinstance(request_ids, str) else request_ids)
        self._follow_up()

    def abort_all(self) -> None:
        """End every request with reason ABORT; ``take_outputs`` returns the outputs that say so."""
        self.scheduler.abort_all()
        self._follow_up()

    def start_over(self) -> None:
        """End every request without output, for whoever was interrupted in a call; may itself be interrupted."""
        self.scheduler.start_over()
        self._follow_up()

    def has_work(self) -> bool:
        """Tell whether a step would do anything."""
        return self.scheduler.has_work()

    def counts(self) -> tuple[int, int]:
        """Return how many requests are waiting and running."""
        return self.scheduler.counts()

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        """Return, once, the outputs that came about outside of a step, by client."""
        return self.scheduler.outbox.take_outputs()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> StepOutputs:
        """Schedule, execute, and make outputs (those that came about before the step are among them).

        Returns:
            The outputs by client, and whether the model ran.

        Raises:
            Exception: what the executor raised, or why its answer does not fit.
        """
        if not self.scheduler.has_work():
            return self.take_outputs(), False
        batch = self.scheduler.schedule()
        if batch.requests:
            with self.log_error_detail(batch), self.log_iteration_details(batch):
                output = self.model_executor.execute_model(batch)
                check_output(batch, output)
            self.scheduler.update(output)
        return self.scheduler.outbox.take_outputs(self.scheduler.make_stats()), bool(batch.requests)

    def step_with_batch_queue(self) -> StepOutputs:
        """Do a step: an executor here returns when a batch is done, so there is nothing to queue."""
        return self.step()

    def post_step(self, model_executed: bool) -> None:
        """Tell the executor which requests have ended, and answer pauses that are complete.

        To be called after each step, and when a wave of lock-step ranks is complete.
        The futures it answers are to be replied to after the step's outputs.
        """
        self._follow_up()

    def log_error_detail(self, scheduler_output: Batch) -> AbstractContextManager[None]:
        """Return a block that logs what was in the batch when it raises; the exception passes on."""
        return log_failure(scheduler_output, self.scheduler)

    def log_iteration_details(self, scheduler_output: Batch | None) -> AbstractContextManager[None]:
        """Return a block whose duration and batch are logged, None being a dummy batch.

        Only if ``observability_config.enable_logging_iteration_details`` is set.
        """
        return log_iteration(scheduler_output) if self._logs_iterations else nullcontext()

    def execute_dummy_batch(self) -> None:
        """Run a step without requests."""
        with self.log_iteration_details(None):
            super().execute_dummy_batch()

    # -- from start to end ---------------------------------------------------------------------------------------------

    def ready_response(self) -> EngineCoreReadyResponse:
        """Return the engine's real capacities."""
        limits = self.limits
        num_tokens = limits.num_blocks * limits.block_size
        return EngineCoreReadyResponse(
            max_model_len=limits.max_model_len,
            num_gpu_blocks=limits.num_blocks,
            block_size=limits.block_size,
            dp_stats_address=None,
            dtype=str(_section(self.vllm_config, "model_config", "dtype") or "auto"),
            vllm_version=engine_client.__version__,
            world_size=_section(self.vllm_config, "parallel_config", "world_size") or 1,
            data_parallel_size=_section(self.vllm_config, "parallel_config", "data_parallel_size") or 1,
            kv_cache_size_tokens=num_tokens,
            kv_cache_max_concurrency=num_tokens / limits.max_model_len,
        )

    def shutdown(self) -> None:
        """End all requests without output, and release everything; does nothing the second time."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self.step_fn = _no_step  # also ends the cycle of references through the bound method
        try:
            self._end_control()
            self.abort_all()
            self.take_outputs()
        finally:
            self.model_executor.shutdown()


def _build(executor_class: Callable[..., Any], vllm_config: Any) -> Executor:
    executor = executor_class(vllm_config)
    if not isinstance(executor, Executor):
        raise TypeError(
            f"executor_class must build an engine_client Executor; {executor_class!r} built {type(executor).__name__}"
        )
    return executor


def _section(vllm_config: Any, section: str, name: str) -> Any:
    return getattr(getattr(vllm_config, section, None), name, None)


def _no_step() -> StepOutputs:
    """Stand in for ``step`` after the end."""
    return {}, False
