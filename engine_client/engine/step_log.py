"""What the log says of a step: its size and time when asked for, and what was in it when it failed.

Threads: the engine's thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from engine_client.engine.batch import Batch

__all__ = ["log_failure", "log_iteration"]

_log = logging.getLogger("engine_client.engine")

_SHOWN: Final = 8
"""Requests that an error report names."""


@contextmanager
def log_failure(batch: Batch, scheduler: Any) -> Iterator[None]:
    """Log what was in the batch, and the state of the scheduler, when the block raises; the exception passes on."""
    try:
        yield
    except Exception:
        names = ", ".join(f"{request.request_id!r:.100}" for request in batch.requests[:_SHOWN])
        _log.error(  # without the traceback, which whoever gets the exception has
            "step %d failed: %d tokens of %d requests (%s%s); %s",
            batch.step,
            batch.total_num_scheduled_tokens,
            len(batch),
            names,
            ", …" if len(batch) > _SHOWN else "",
            scheduler,
        )
        raise


@contextmanager
def log_iteration(batch: Batch | None) -> Iterator[None]:
    """Log the size of a step and how long the block took; None is a dummy batch."""
    begin = time.monotonic()
    yield
    elapsed = (time.monotonic() - begin) * 1e3
    if batch is None:
        _log.info("dummy step: %.2f ms", elapsed)
        return
    prompts = [request for request in batch if request.num_computed_tokens < request.num_prompt_tokens]
    prompt_tokens = sum(request.num_scheduled_tokens for request in prompts)
    _log.info(
        "step %d: %d prompts with %d tokens, %d generations with %d tokens, %.2f ms",
        batch.step,
        len(prompts),
        prompt_tokens,
        len(batch) - len(prompts),
        batch.total_num_scheduled_tokens - prompt_tokens,
        elapsed,
    )
