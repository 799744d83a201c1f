"""This library's side of the benchmark; run by ``driver``.

Threads: the main thread, and those of the clients.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Final

from engine_client import (
    AsyncMPClient,
    ClientOptions,
    EngineConfig,
    EngineCoreRequest,
    ParallelConfig,
    SamplingParams,
    SyncMPClient,
    __version__,
)
from engine_client.bench import floor, growth, stub

__all__ = ["Ours", "make_side"]


class Ours:
    """Clients with an engine process of the stub core, and the workloads that only they have."""

    kinds: Final = MappingProxyType({**floor.KINDS, **growth.KINDS})

    def __init__(self) -> None:
        self._numbers = next((name for name in ("torch", "numpy") if find_spec(name)), "")

    def about(self) -> dict[str, str]:
        """Return what runs here."""
        return {"engine_client": __version__, "tensors": self._numbers or "memoryview"}

    def make_client(self, use_asyncio: bool = False, ranks: int = 1, **options: Any) -> Any:
        """Start engines and return their client; ``options`` are those of ``ClientOptions``."""
        config = EngineConfig(parallel_config=ParallelConfig(data_parallel_size=ranks))
        client_class = AsyncMPClient if use_asyncio else SyncMPClient
        # The stub core needs no executor: any class will do.
        return client_class(config, object, False, options=ClientOptions(engine_target=stub.TARGET, **options))

    def make_request(
        self, request_id: str, max_tokens: int, tensor: Any = None, rank: int | None = None
    ) -> EngineCoreRequest:
        """Return a request with a prompt of 128 tokens."""
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(range(128)),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=max_tokens),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=rank,
            prompt_embeds=tensor,
        )

    def make_tensor(self, nbytes: int, memory: memoryview | None = None) -> Any:
        """Return a tensor of so many bytes, whose memory was written; in ``memory`` if that is given.

        It is torch's, or else numpy's, or else a memoryview.
        """
        if memory is None:
            memory = memoryview(bytearray(b"\1") * nbytes)
        if self._numbers == "torch":
            import torch  # noqa: PLC0415  # only if it is installed

            return torch.frombuffer(memory, dtype=torch.float32)
        if self._numbers == "numpy":
            import numpy  # noqa: PLC0415  # only if it is installed

            return numpy.frombuffer(memory, numpy.float32)
        return memory


def make_side() -> Ours:
    """Return the side."""
    return Ours()
