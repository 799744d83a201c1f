"""vLLM 0.25.1's side of the benchmark: its own clients and engine process, ZeroMQ and msgpack, without a model.

Run by ``driver`` with an interpreter that has vLLM; nothing of this package is imported.  Its front-end and its engine
process are as installed; only what computes is replaced, by the stub that every side has.  The engine process is a
fork, so that it has the replacement, too.

Threads: the main thread, and those of the clients.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["PeerVllm", "make_side"]

_TOKEN = 17


class _Requests:
    """Stands for the scheduler: knows what is in flight, schedules nothing."""

    def __init__(self) -> None:
        self.in_flight: dict[str, list[Any]] = {}

    def has_requests(self) -> bool:
        return bool(self.in_flight)

    def has_unfinished_requests(self) -> bool:
        return bool(self.in_flight)

    def get_num_unfinished_requests(self) -> int:
        return len(self.in_flight)

    def finish_requests(self, request_ids: Any, status: Any) -> list[Any]:
        self.in_flight.clear()
        return []


class _Core:
    """Methods that take the place of those of the engine core."""

    scheduler: _Requests
    engine: Any  # the module of the messages; set by make_side

    def __init__(self, vllm_config: Any, *_: Any, **__: Any) -> None:
        self.vllm_config = vllm_config
        self.scheduler = _Requests()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()
        self.batch_queue = None
        self.per_step_hooks: set[Any] = set()
        self._idle_state_callbacks: list[Any] = []
        self.echoes_tensor = False
        self.step_fn = self.step

    def preprocess_add_request(self, request: Any) -> tuple[Any, int]:
        return request, 0

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.in_flight[request.request_id] = [request.sampling_params.max_tokens, request]

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.scheduler.in_flight.pop(request_id, None)

    def step(self) -> tuple[dict[int, Any], bool]:
        engine, in_flight = _Core.engine, self.scheduler.in_flight
        output_class, length = engine.EngineCoreOutput, engine.FinishReason.LENGTH
        outputs, ended = [], []
        for request_id, state in in_flight.items():
            state[0] -= 1
            if state[0] > 0:
                outputs.append(output_class(request_id, [_TOKEN]))
            else:
                tensor = state[1].prompt_embeds if self.echoes_tensor else None
                outputs.append(output_class(request_id, [_TOKEN], pooling_output=tensor, finish_reason=length))
                ended.append(request_id)
        for request_id in ended:
            del in_flight[request_id]
        return {0: engine.EngineCoreOutputs(outputs=outputs)}, True

    def post_step(self, model_executed: bool) -> None:
        pass

    def shutdown(self) -> None:
        pass

    # Utilities: any method of a core can be called by its name.

    def echo(self, value: Any = None) -> Any:
        return value

    def set_echo_tensor(self, value: bool) -> None:
        self.echoes_tensor = value

    def usage(self) -> list[Any]:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return [os.getpid(), time.process_time(), pages * os.sysconf("SC_PAGE_SIZE")]


def _config() -> Any:
    """Return as much of a configuration as clients and engine process read."""
    off = dict.fromkeys(
        (
            *("data_parallel_hybrid_lb", "data_parallel_external_lb", "local_engines_only", "enable_elastic_ep"),
            *("numa_bind", "use_ray"),
        ),
        False,
    )
    one = dict.fromkeys(("data_parallel_size", "data_parallel_size_local", "world_size", "local_world_size"), 1)
    zero = dict.fromkeys(("data_parallel_rank", "data_parallel_index", "data_parallel_rpc_port"), 0)
    unset = dict.fromkeys(("data_parallel_rank_local", "assigned_physical_gpu_ids"))
    place = {"data_parallel_master_ip": "127.0.0.1", "data_parallel_backend": "mp"}
    return SimpleNamespace(
        __post_init__=lambda: None,
        parallel_config=SimpleNamespace(**off, **one, **zero, **unset, **place),
        model_config=SimpleNamespace(max_model_len=4096, dtype="float32", is_moe=False, multimodal_config=None),
        cache_config=SimpleNamespace(
            block_size=16, num_gpu_blocks=100, kv_cache_size_tokens=1600, kv_cache_max_concurrency=1.0
        ),
        scheduler_config=SimpleNamespace(),
        kv_transfer_config=None,
        needs_dp_coordinator=False,
        shutdown_timeout=0,
    )


class PeerVllm:
    """Makes vLLM's clients, requests and tensors.

    Args:
        versions: for ``about``.
        clients: the class of the blocking client, and of the one for asyncio.
        request_class, params_class: of a request, and how it is sampled.
        zeros: makes a tensor of so many float32 numbers.
    """

    def __init__(
        self,
        versions: dict[str, str],
        clients: tuple[Any, Any],
        request_class: Any,
        params_class: Any,
        zeros: Callable[[int], Any],
    ) -> None:
        self._versions = versions
        self._clients = clients
        self._request_class = request_class
        self._params_class = params_class
        self._zeros = zeros

    def about(self) -> dict[str, str]:
        """Return what runs here."""
        return self._versions

    def make_client(self, use_asyncio: bool = False, **_: Any) -> Any:
        """Start an engine and return its client; options of other clients do not count."""
        return self._clients[use_asyncio](_config(), object, False)

    def make_request(self, request_id: str, max_tokens: int, tensor: Any = None) -> Any:
        """Return a request with a prompt of 128 tokens."""
        return self._request_class(
            request_id=request_id,
            prompt_token_ids=list(range(128)),
            mm_features=None,
            sampling_params=self._params_class(max_tokens=max_tokens),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            prompt_embeds=tensor,
        )

    def make_tensor(self, nbytes: int) -> Any:
        """Return a tensor of so many bytes."""
        return self._zeros(nbytes // 4)


def make_side() -> PeerVllm:
    """Load vLLM, replace what computes, and return the side."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.pop("ENGINE_CLIENT_VLLM", None)  # with it, vLLM would run on what it is to be compared with
    import torch  # noqa: PLC0415  # as the others here: where vLLM is
    import vllm  # noqa: PLC0415  # as above
    import zmq  # noqa: PLC0415  # as above
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415  # as above
    from vllm.v1 import engine  # noqa: PLC0415  # as above
    from vllm.v1.engine import core, core_client  # noqa: PLC0415  # as above

    _Core.engine = engine
    for name, member in vars(_Core).items():
        if callable(member):
            setattr(core.EngineCore, name, member)
    return PeerVllm(
        {"vllm": vllm.__version__, "pyzmq": zmq.__version__, "tensors": f"torch {torch.__version__}"},
        (core_client.SyncMPClient, core_client.AsyncMPClient),
        engine.EngineCoreRequest,
        SamplingParams,
        lambda number: torch.ones(number, dtype=torch.float32),
    )
