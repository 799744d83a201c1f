"""The messages between a client and an engine, under the reference's names.

Fields, order and defaults are those of vLLM 0.25.1 (``vllm/v1/engine/__init__.py``); a test compares them with a
recorded copy of that surface.  They are plain, mutable dataclasses without ``__slots__``: defaults stay class
attributes, so that the hot path can create an output by setting only the columns that are not empty.

Nothing here does I/O, and only the standard library is imported.

Threads: plain data.  A message is not changed after it was handed to a client (invariant I9).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Union

from engine_client.params import LoRARequest, PoolingParams, SamplingParams

__all__ = [
    "EEP_NOTIFICATION_CALL_ID",
    "FINISH_REASON_STRINGS",
    "EEPNotificationType",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreReadyResponse",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "FinishReason",
    "LogprobsLists",
    "PauseMode",
    "PrefillStats",
    "PrefixCacheStats",
    "ReconfigureDistributedRequest",
    "ReconfigureRankType",
    "SchedulerStats",
    "UtilityOutput",
    "UtilityResult",
]

PauseMode = Literal["abort", "wait", "keep"]
"""``abort``: finish what runs with reason ABORT; ``wait``: let it drain; ``keep``: freeze it until resume."""

FINISH_REASON_STRINGS = ("stop", "length", "abort", "error", "repetition")
EEP_NOTIFICATION_CALL_ID = -1


class EEPNotificationType(enum.Enum):
    """What a rank reports while an elastic group changes its size."""

    NEW_CORE_ENGINES_INIT_READY = "NEW_CORE_ENGINES_INIT_READY"
    NEW_CORE_ENGINES_WEIGHTS_INIT_READY = "NEW_CORE_ENGINES_WEIGHTS_INIT_READY"
    RECONFIGURE_FINISHED = "RECONFIGURE_FINISHED"
    SHUTDOWN_COMPLETE = "SHUTDOWN_COMPLETE"


class FinishReason(enum.IntEnum):
    """Why a request ended.  ``STOP`` is 0, so false: ask ``is None``, or ``EngineCoreOutput.finished``."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return FINISH_REASON_STRINGS[self.value]


class EngineCoreEventType(enum.IntEnum):
    """What happened to a request inside the engine."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreRequestType(enum.Enum):
    """Kinds of client messages, with the reference's values."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"


class ReconfigureRankType(enum.IntEnum):
    """Special ranks in a ``ReconfigureDistributedRequest``."""

    KEEP_CURRENT_RANK = -1
    SHUTDOWN_CURRENT_RANK = -2


@dataclass
class EngineCoreReadyResponse:
    """What an engine reports when it is ready: its real capacities, which may differ from what was configured."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: str | None
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None


@dataclass
class EngineCoreRequest:
    """One request: a prompt (``prompt_token_ids`` or ``prompt_embeds``) and how to continue or pool it.

    ``arrival_time`` is in seconds of the wall clock; ``priority`` counts downwards (lower runs first).
    """

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    arrival_time: float
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False

    @property
    def params(self) -> SamplingParams | PoolingParams:
        """Return the sampling parameters, or else the pooling parameters.

        Raises:
            ValueError: the request has neither.
        """
        params = self.sampling_params if self.sampling_params is not None else self.pooling_params
        if params is None:
            raise ValueError(f"request {self.request_id!r:.100} has neither sampling_params nor pooling_params")
        return params


@dataclass
class EngineCoreEvent:
    """A time-stamped event (monotonic seconds of the engine's process; compare only with its own kind)."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(cls, event_type: EngineCoreEventType, timestamp: float | None = None) -> EngineCoreEvent:
        """Make an event that happened at ``timestamp``, or now."""
        return cls(event_type, time.monotonic() if timestamp is None else timestamp)


class LogprobsLists(NamedTuple):
    """Log-probabilities of one request's new tokens: a row per token, the sampled token first in its row."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class PrefillStats:
    """How a prompt was prefilled, in tokens."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


@dataclass(init=False)
class EngineCoreOutput:
    """What one step produced for one request; ``finish_reason`` is set on the last one.

    ``stop_reason`` is the token id or string that stopped it; after ``FinishReason.ERROR`` it is the error's text.
    An instance's ``__dict__`` holds only what differs from the defaults: a step makes hundreds of these, and both the
    constructor and the codec then touch two fields instead of thirteen.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: Union[int, str, None] = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0

    def __init__(  # noqa: C901, PLR0913, PLR0917  # the reference's thirteen fields, each a plain if
        self,
        request_id: str,
        new_token_ids: list[int],
        new_logprobs: LogprobsLists | None = None,
        new_prompt_logprobs_tensors: Any = None,
        pooling_output: Any = None,
        finish_reason: FinishReason | None = None,
        stop_reason: Union[int, str, None] = None,
        events: list[EngineCoreEvent] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prefill_stats: PrefillStats | None = None,
        routed_experts: Any = None,
        num_nans_in_logits: int = 0,
    ) -> None:
        self.request_id = request_id
        self.new_token_ids = new_token_ids
        if finish_reason is not None:
            self.finish_reason = finish_reason
        if stop_reason is not None:
            self.stop_reason = stop_reason
        if new_logprobs is not None:
            self.new_logprobs = new_logprobs
        if new_prompt_logprobs_tensors is not None:
            self.new_prompt_logprobs_tensors = new_prompt_logprobs_tensors
        if pooling_output is not None:
            self.pooling_output = pooling_output
        if events is not None:
            self.events = events
        if kv_transfer_params is not None:
            self.kv_transfer_params = kv_transfer_params
        if trace_headers is not None:
            self.trace_headers = trace_headers
        if prefill_stats is not None:
            self.prefill_stats = prefill_stats
        if routed_experts is not None:
            self.routed_experts = routed_experts
        if num_nans_in_logits:
            self.num_nans_in_logits = num_nans_in_logits

    @property
    def finished(self) -> bool:
        """Tell whether this is the request's last output."""
        return self.finish_reason is not None


@dataclass
class UtilityResult:
    """The value that a utility returned."""

    result: Any = None


@dataclass
class UtilityOutput:
    """Reply to a utility call; ``failure_message`` is None on success."""

    call_id: int
    failure_message: str | None = None
    result: UtilityResult | None = None


@dataclass
class PrefixCacheStats:
    """Prefix cache use since the last report: requests seen, tokens asked for, tokens found."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


@dataclass
class SchedulerStats:
    """State of the scheduler after a step; ``kv_cache_usage`` is a fraction of 1."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    running_lora_adapters: dict[str, int] = field(default_factory=dict)


@dataclass
class EngineCoreOutputs:
    """The outputs of one step for one front-end; ``timestamp`` is monotonic seconds, filled in when 0."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


@dataclass
class ReconfigureDistributedRequest:
    """Tells a rank of an elastic group its new place."""

    new_data_parallel_size: int
    new_data_parallel_rank: int
    new_data_parallel_rank_local: int
    new_data_parallel_master_ip: str
    new_data_parallel_master_port: int
    new_data_parallel_master_port_list: list[int]
    coord_store_port: int
