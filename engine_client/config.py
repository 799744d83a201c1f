"""Configuration: the engine's (the reference's attribute names) and this library's own ``ClientOptions``.

Engine configuration is read by attribute path, such as ``vllm_config.parallel_config.data_parallel_size``; any object
with those attributes serves, the reference's own included.  ``EngineConfig()`` is usable as it is.

Threads: plain data.  A client changes the caller's config only by the READY hand-over (invariant I9).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from engine_client.deadline import check_timeout

__all__ = [
    "CacheConfig",
    "ClientOptions",
    "DeathPolicy",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "StartMethod",
    "ready_timeout",
    "shutdown_grace",
]

StartMethod = Literal["exec", "spawn", "fork", "forkserver"]

DeathPolicy = Literal["shutdown", "continue", "restart"]

KIB = 1024
MIB = 1024 * KIB


@dataclass
class ModelConfig:
    """The model: name or path, longest sequence in tokens, number type, seed, and the kind of runner."""

    model: str = ""
    tokenizer: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int = 4096
    max_logprobs: int = 20
    skip_tokenizer_init: bool = False
    runner_type: str = "generate"
    is_moe: bool = False
    multimodal_config: Any = None


@dataclass
class CacheConfig:
    """The KV cache, in blocks of ``block_size`` tokens; the four None fields are filled in when engines are ready."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    cache_dtype: str = "auto"
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None


@dataclass
class ParallelConfig:
    """How many engines there are, and which of them this process manages."""

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_size_local: int = 1
    data_parallel_rank: int = 0
    data_parallel_rank_local: int | None = None
    data_parallel_index: int = 0
    data_parallel_backend: str = "mp"
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False
    enable_elastic_ep: bool = False
    local_engines_only: bool = False
    world_size: int = 1


@dataclass
class SchedulerConfig:
    """The scheduler: token budget of a step, most requests that run at once, order of the queue."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"


@dataclass
class EngineConfig:
    """Everything an engine is told at its start.

    Args:
        shutdown_timeout: seconds that requests in flight may take to finish at shutdown; 0 aborts them.
        additional_config: anything an executor of your own wants to read.
    """

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    shutdown_timeout: float = 0
    additional_config: dict[str, Any] = field(default_factory=dict)


_CHOICES: Final = {
    "start_method": ("exec", "spawn", "fork", "forkserver"),
    "codec": ("pickle", "restricted"),
    "on_engine_death": ("shutdown", "continue", "restart"),
}


@dataclass(frozen=True)
class ClientOptions:
    """What the reference has no place for.  All fields are keyword arguments.

    Args:
        start_method: ``"exec"`` starts a fresh interpreter and needs no ``__main__`` guard; the others are
            ``multiprocessing``'s, with their own limits.
        ready_timeout: seconds for the whole start; None: ``VLLM_ENGINE_READY_TIMEOUT_S``, default 600.
        shutdown_timeout: seconds for the polite end of engines; None: ``VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS``,
            default 5.
        stall_timeout: seconds in one step or call after which the engine counts as stalled; None: never.
        stall_limit: seconds in one step or call after which the engine is ended, with the Python stacks of its threads
            in the ``EngineDeadError``; more than the longest that is in order, loading weights and compiling included.
            None: never.
        kill_unresponsive: kill an engine that leaves ``check_health`` unanswered, so that it is dead and no more waited
            for; False: only say so.
        arena_limit: most bytes of shared memory per direction; 0 sends everything through the pipe.
        arena_threshold: buffers of this many bytes and more travel through shared memory.
        high_water: bytes queued for a slow engine at which senders start to wait.
        backlog_limit: bytes queued in the engine for a front-end, beyond which the engine makes no more steps until
            some were read; a front-end that does not read at all is then cut off, if there are others.
        spin_us: microseconds for which an idle engine, and the client's reader while a caller waits, poll before they
            sleep; 0 sleeps at once.  It buys latency with processor time, and wants a core for each side.  None: half a
            millisecond where the last waits, of callers for answers and of the engine for work, were all shorter.
        codec: ``"pickle"`` trusts the engines as parts of this program; ``"restricted"`` decodes of what they send only
            plain data, arrays, and types that are registered (``engine_client.register_type``), and is slower.
        engine_target: ``"module:function"`` that the engine process imports and runs.
        on_engine_death: what becomes of a client with several independent engines when one of them dies: ``"shutdown"``
            ends it, as the reference does; ``"continue"`` fails the dead one's requests with ``EngineDeadError`` and
            sends new ones to the others; ``"restart"`` also starts the dead one again.  Ranks in lock-step always end
            together.
        restart_limit: how often in a row a rank is started again that does not stay up for a minute.
        restart_delay: seconds before the first of these, doubled each time.
        forward_logs: level from which on what engines log is logged again here, by loggers of the same names, with rank
            and pid in front; on the thread that reads what engines send, so handlers must be quick.  None: not at all.
        on_progress: called as ``on_progress(phase, done, total)`` while engines start, on the thread that starts them:
            what their executors tell by ``report_progress``, the numbers of several engines added up, and at last
            ``("ready", n, n)``.  ``total`` is 0 where it is not known.  ``ProgressBar()`` is one.  An exception of it
            gives the whole start up, of which nothing is left, and is the cause of the ``StartupError``.

    Raises:
        TypeError, ValueError: a field has a value that cannot work.
    """

    start_method: StartMethod = "exec"
    ready_timeout: float | None = None
    shutdown_timeout: float | None = None
    stall_timeout: float | None = None
    stall_limit: float | None = None
    kill_unresponsive: bool = False
    arena_limit: int = 8 * 1024 * MIB
    arena_threshold: int = 64 * KIB
    high_water: int = 32 * MIB
    backlog_limit: int = 64 * MIB
    spin_us: float | None = None
    codec: Literal["pickle", "restricted"] = "pickle"
    engine_target: str = "engine_client.engine.main:build_engine"
    on_engine_death: DeathPolicy = "shutdown"
    restart_limit: int = 3
    restart_delay: float = 0.1
    forward_logs: int | None = None
    on_progress: Callable[[str, int, int], None] | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}")
        for name in ("ready_timeout", "shutdown_timeout", "stall_timeout", "stall_limit", "spin_us", "restart_delay"):
            check_timeout(getattr(self, name), name)
        if self.spin_us == math.inf:
            raise ValueError("spin_us must be a number of microseconds, or None, not inf")
        if self.stall_limit == 0:
            raise ValueError("stall_limit must be more than zero seconds, or None for no limit")
        for name in ("arena_limit", "arena_threshold", "high_water", "backlog_limit", "restart_limit"):
            value = getattr(self, name)
            what = "times" if name == "restart_limit" else "bytes"
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a number of {what}, not {value!r}")
            if value < 0:
                raise ValueError(f"{name} must be zero or more {what}, not {value!r}")
        self._check_listeners()

    def _check_listeners(self) -> None:
        if self.on_progress is not None and not callable(self.on_progress):
            raise TypeError(f"on_progress must be callable, not {self.on_progress!r}")
        level = self.forward_logs
        if level is not None and (isinstance(level, bool) or not isinstance(level, int)):
            raise TypeError(f"forward_logs must be a level such as logging.INFO, not {level!r}")

    def for_engine(self) -> dict[str, Any]:
        """Return the fields that an engine process needs (everything but the callbacks)."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "on_progress"}


def _seconds_from_environment(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        seconds = check_timeout(float(text), variable)
    except ValueError:
        raise ValueError(f"the environment variable {variable} must be a number of seconds, not {text!r}") from None
    return default if seconds is None else seconds


def ready_timeout(options: ClientOptions) -> float:
    """Return the seconds that the whole start may take (``VLLM_ENGINE_READY_TIMEOUT_S``, default 600)."""
    if options.ready_timeout is not None:
        return options.ready_timeout
    return _seconds_from_environment("VLLM_ENGINE_READY_TIMEOUT_S", 600.0)


def shutdown_grace(options: ClientOptions, timeout: float | None = None) -> float:
    """Return the seconds of the polite end (``VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS``, default 5)."""
    for value in (check_timeout(timeout), options.shutdown_timeout):
        if value is not None:
            return value
    return _seconds_from_environment("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", 5.0)
