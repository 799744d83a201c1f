"""Functions for ``collective_rpc`` that look at the engine's front-ends from inside, or make them misbehave."""

from __future__ import annotations

import gc
import os
from typing import Any

__all__ = ["answer_twice", "tables", "write_garbage"]


def _front_ends() -> list[Any]:
    from engine_client.engine.front_end import FrontEnd

    return [found for found in gc.get_objects() if isinstance(found, FrontEnd) and not found.gone]


def write_garbage(worker: object) -> None:
    """Have the engine write what is no frame, right after what it has sent so far."""
    del worker
    for front_end in _front_ends():
        os.write(front_end.channel.fileno(), b"this is no frame at all" * 10)


def answer_twice(worker: object) -> None:
    """Have the engine answer every call twice from now on."""
    from engine_client.engine.front_end import FrontEnd

    del worker
    once = FrontEnd.send_result

    def twice(self: Any, call_id: int, result: Any) -> None:
        once(self, call_id, result)
        once(self, call_id, "again")

    FrontEnd.send_result = twice  # type: ignore[method-assign]


def tables(worker: object) -> tuple[int, bool]:
    """Return how many entries the engine's tables of requests have, and whether its scheduler has work."""
    from engine_client.engine.core import EngineCore

    (core,) = [found for found in gc.get_objects() if isinstance(found, EngineCore) and found.model_executor is worker]
    return sum(core.counts()) + sum(len(f._keys) + len(f._ids) for f in _front_ends()), core.has_work()
