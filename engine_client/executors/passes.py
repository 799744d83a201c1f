"""How a batch is divided into passes through a model.

Threads: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from engine_client.engine.executor import ScheduledRequest

__all__ = ["passes"]

_MOST_PADDING: Final = 1.5
"""How many times as many tokens a pass may compute, padding included, as it has."""


def passes(requests: Sequence[ScheduledRequest]) -> Iterator[list[ScheduledRequest]]:
    """Divide a batch into forward passes: of one kind, and of like length, so that little of one is padding."""
    ordered = sorted(requests, key=lambda r: (r.pooling_params is not None, r.num_scheduled_tokens))
    current: list[ScheduledRequest] = []
    total = 0
    for request in ordered:
        number = request.num_scheduled_tokens
        is_other = current and (current[0].pooling_params is None) is not (request.pooling_params is None)
        if current and (is_other or number * (len(current) + 1) > _MOST_PADDING * (total + number)):
            yield current
            current, total = [], 0
        current.append(request)
        total += number
    if current:
        yield current
