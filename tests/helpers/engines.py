"""Executors and requests for tests of the engine, and a driver that runs an engine core to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from engine_client.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_client.engine.batch import Batch, ModelOutput, ScheduledRequest
from engine_client.engine.core import EngineCore
from engine_client.engine.executor import Executor
from engine_client.engine.queues import PriorityQueue
from engine_client.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from engine_client.params import SamplingParams

EOS = 0
VOCABULARY = 97


class Recording(Executor):
    """Next token: the last one plus 1, never eos.  Keeps the batches, and what the hooks were told."""

    eos_token_id = EOS

    def __init__(self, vllm_config: Any = None) -> None:
        super().__init__(vllm_config)
        self.batches: list[Batch] = []
        self.ended: list[str] = []
        self.is_shut_down = False

    def execute_model(self, batch: Batch) -> ModelOutput:
        self.batches.append(batch)
        return batch.sample(self.choose)

    def choose(self, request: ScheduledRequest) -> int:
        return request.token_ids[-1] + 1

    def finish_requests(self, request_ids):
        self.ended += request_ids

    def shutdown(self) -> None:
        self.is_shut_down = True


class Scripted(Recording):
    """Answers with the tokens that the prompt names, in turn: prompt ``[5, 6]`` gives 5, then 6, then 5."""

    def choose(self, request: ScheduledRequest) -> int:
        position = len(request.token_ids) - request.num_prompt_tokens
        return request.token_ids[position % request.num_prompt_tokens]

    def decode(self, token_ids):
        return bytes(token_ids).decode("utf-8", "replace")


class Paged(Executor):
    """Keeps what it computes in blocks, and reads its context from there alone; the next token hangs on all of it.

    A block that is handed to two requests, forgotten, or taken for another prefix makes it raise.
    """

    eos_token_id = EOS

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.block_size = vllm_config.cache_config.block_size
        self.slots: dict[tuple[int, int], int] = {}
        self.live_ids: set[str] = set()
        self.most_tokens = 0
        self.most_requests = 0

    def execute_model(self, batch: Batch) -> ModelOutput:
        self.most_tokens = max(self.most_tokens, sum(request.num_scheduled_tokens for request in batch))
        self.most_requests = max(self.most_requests, len(batch))
        self.live_ids.update(request.request_id for request in batch)
        for request in batch:
            for position in range(
                request.num_computed_tokens, request.num_computed_tokens + len(request.new_token_ids)
            ):
                self.slots[self.slot(request, position)] = request.token_ids[position]
        return batch.sample(self.choose)

    def slot(self, request: ScheduledRequest, position: int) -> tuple[int, int]:
        return request.block_ids[position // self.block_size], position % self.block_size

    def choose(self, request: ScheduledRequest) -> int:
        context = [self.slots[self.slot(request, position)] for position in range(len(request.token_ids))]
        assert context == request.token_ids
        return hash(tuple(context)) % VOCABULARY

    def finish_requests(self, request_ids):
        self.live_ids.difference_update(request_ids)


class Pooling(Executor):
    """Returns the sum of the prompt."""

    supported_tasks = ("embed",)

    def execute_model(self, batch: Batch) -> ModelOutput:
        return batch.pool(lambda request: sum(request.token_ids))


def make_config(**settings: Any) -> EngineConfig:
    """Return a configuration with these settings, wherever they belong."""
    config = EngineConfig(ModelConfig(), CacheConfig(), scheduler_config=SchedulerConfig())
    for name, value in settings.items():
        [section] = [s for s in (config.model_config, config.cache_config, config.scheduler_config) if hasattr(s, name)]
        setattr(section, name, value)
    return config


def make_core(
    executor_class: Callable[..., Executor] = Recording, *, log_stats: bool = False, **settings: Any
) -> EngineCore:
    """Return an engine core with these settings."""
    return EngineCore(make_config(**settings), executor_class, log_stats)


def make_request(request_id: str = "a", prompt: Any = (1, 2, 3), **settings: Any) -> EngineCoreRequest:
    """Return a request; settings are fields of ``EngineCoreRequest`` or else of ``SamplingParams``."""
    fields: dict[str, Any] = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    fields["arrival_time"] = 0.0
    names = EngineCoreRequest.__dataclass_fields__
    fields.update({name: value for name, value in settings.items() if name in names})
    params = {name: value for name, value in settings.items() if name not in names}
    if "sampling_params" not in fields:
        fields["sampling_params"] = None if fields["pooling_params"] is not None else SamplingParams(**params)
    prompt = list(prompt) if isinstance(prompt, (tuple, range)) else prompt
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, **fields)


def add(core: EngineCore, request_id: str = "a", prompt: Any = (1, 2, 3), **settings: Any) -> None:
    """Give a request to an engine core as a client does."""
    core.add_request(*core.preprocess_add_request(make_request(request_id, prompt, **settings)))


def step(core: EngineCore) -> list[EngineCoreOutput]:
    """Do one step; return the outputs of client 0."""
    outputs, executed = core.step_fn()
    core.post_step(executed)
    return outputs[0].outputs if outputs and 0 in outputs else []


class Result(SimpleNamespace):
    """What a request got in all: tokens, finish_reason, stop_reason."""

    tokens: list[int]
    finish_reason: FinishReason | None
    stop_reason: Any


def collect(results: dict[str, Result], outputs: Iterable[EngineCoreOutput]) -> None:
    """Add outputs to results."""
    for output in outputs:
        result = results.setdefault(output.request_id, Result(tokens=[], finish_reason=None, stop_reason=None))
        assert result.finish_reason is None, "an output after the last one"
        result.tokens += output.new_token_ids
        result.finish_reason = output.finish_reason
        result.stop_reason = output.stop_reason


def run(core: EngineCore, limit: int = 10_000) -> dict[str, Result]:
    """Step until there is no work; return what each request got."""
    results: dict[str, Result] = {}
    for _ in range(limit):
        if not core.has_work():
            return results
        collect(results, step(core))
    raise AssertionError(f"still at work after {limit} steps: {core!r}")


def num_entries(queue: PriorityQueue) -> int:
    """Return how many entries a queue keeps in memory, dead ones included."""
    return len(queue._heap)
