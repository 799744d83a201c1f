"""Clients of scripted engines, requests for them, and what comes of these.

::

    with make_client(Script(step_seconds=0.1)) as client:
        client.add_request(make_request("a", max_tokens=5))
        outputs = collect(client, 1)["a"]

Threads: stateless.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from engine_client.clients.base import EngineCoreClient
from engine_client.config import ClientOptions, EngineConfig
from engine_client.messages import EngineCoreOutput, EngineCoreRequest
from engine_client.params import SamplingParams
from engine_client.testing.scripted import TARGET, Script

__all__ = ["collect", "make_client", "make_request"]


def make_client(
    script: Script | None = None,
    kind: Literal["sync", "async"] = "sync",
    config: EngineConfig | None = None,
    **options: Any,
) -> Any:
    """Return a client of a scripted engine: a ``SyncMPClient``, an ``AsyncMPClient``, or one for several ranks.

    Args:
        script: how the engine behaves; None: it answers at once.
        kind: of client: blocking, or asyncio's.
        config: of the engine; a copy of it gets the script.
        options: fields of ``ClientOptions``.

    Raises:
        StartupError: the engine did not come up, as a script can have it.
    """
    config = config or EngineConfig()
    config = replace(config, additional_config={**config.additional_config, "script": script or Script()})
    given = ClientOptions(**{"engine_target": TARGET, **options})
    executor: Any = None  # a scripted engine needs none
    return EngineCoreClient.make_client(True, kind == "async", config, executor, False, options=given)


def make_request(
    request_id: str, max_tokens: int = 3, prompt: Iterable[int] | None = (1, 2, 3), **fields: Any
) -> EngineCoreRequest:
    """Return a request for ``max_tokens`` tokens; ``fields`` are others of ``EngineCoreRequest``."""
    values: dict[str, Any] = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    values["sampling_params"] = SamplingParams(max_tokens=max_tokens)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=None if prompt is None else list(prompt),
        arrival_time=time.time(),
        **(values | fields),
    )


def collect(client: Any, count: int, timeout: float = 20.0) -> dict[str, list[EngineCoreOutput]]:
    """Read a blocking client's outputs until ``count`` requests have ended; return those of each request, in order.

    Args:
        client: with engines of its own.
        count: of requests.
        timeout: seconds between two outputs.

    Raises:
        TimeoutError: nothing came for so long.
    """
    found: dict[str, list[EngineCoreOutput]] = {}
    ended = 0
    while ended < count:
        for output in client.get_output(timeout=timeout).outputs:
            found.setdefault(output.request_id, []).append(output)
            ended += output.finished
    return found
