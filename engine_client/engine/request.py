"""A request inside the engine: its tokens, how far they are computed, and the KV blocks that hold them.

::

    WAITING ─▶ RUNNING ─▶ FINISHED        WAITING ─▶ FINISHED (aborted, or it can never fit)
       ▲──────────┘ preempted: its blocks are given back, everything is computed anew

Threads: the engine's thread only; changed by the scheduler alone.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Hashable, Sequence
from typing import Any, Final

from engine_client.engine.batch import IntView, ScheduledRequest
from engine_client.engine.kv_blocks import Chain
from engine_client.engine.stop import End, StopRule
from engine_client.messages import EngineCoreEvent, PrefillStats

__all__ = ["Request", "RequestState"]

_NEVER: Final = sys.maxsize
_new_tuple: Final = tuple.__new__


class RequestState(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One request; ``Intake.read`` makes it from a client's message.

    Args:
        message: the client's message, or any object with its attributes; not changed.
        tokens: the prompt; owned by this object from now on.
        stop: what ends the text; None for pooling.
        rank: orders requests under the priority policy: priority, arrival time, order of arrival.
        space: only requests of the same space share cached prefixes; None keeps this one out of the cache.
        reads_cache: it may use what the cache holds (what it computes is stored either way).
    """

    __slots__ = (
        "_blocks_view",
        "_carried",
        "_tokens_view",
        "abort_immediately",
        "arrived_at",
        "blocks",
        "capacity",
        "chain",
        "client_index",
        "events",
        "has_news",
        "next_stored",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "prefill_stats",
        "rank",
        "reads_cache",
        "request_id",
        "space",
        "state",
        "stop",
        "tokens",
        "trace_headers",
        "was_preempted",
    )

    def __init__(
        self,
        message: Any,
        tokens: list[int],
        stop: StopRule | None,
        *,
        rank: tuple[int, float, int] = (0, 0.0, 0),
        space: Hashable = None,
        reads_cache: bool = True,
    ) -> None:
        # -- set once --
        self.request_id: str = message.request_id
        self.client_index: int = getattr(message, "client_index", 0)
        self.trace_headers = getattr(message, "trace_headers", None)
        self.abort_immediately = bool(getattr(message, "abort_immediately", False))
        self.num_prompt_tokens = len(tokens)
        self.stop = stop
        self.rank = rank
        self.space = space
        self.reads_cache = reads_cache and space is not None
        self._carried = (
            None if stop is None else message.sampling_params,
            message.pooling_params if stop is None else None,
            getattr(message, "lora_request", None),
            getattr(message, "prompt_embeds", None),
            getattr(message, "mm_features", None),
            self.trace_headers,
        )
        # -- where it stands --
        self.arrived_at = 0.0  # in the scheduler; monotonic seconds
        self.state = RequestState.WAITING
        self.tokens = tokens
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.blocks: list[int] = []
        self.capacity = 0  # tokens that the blocks hold
        self.chain: Chain = space
        self.next_stored = _NEVER  # number of computed tokens at which another full block can be stored
        self.was_preempted = False
        # -- to be told with the next output --
        self.events: list[EngineCoreEvent] = []
        self.prefill_stats: PrefillStats | None = None
        self.has_news = self.trace_headers is not None
        self._tokens_view = IntView(tokens)
        self._blocks_view = IntView(self.blocks)

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id!r:.100} {self.state.value} tokens={len(self.tokens)} "
            f"computed={self.num_computed_tokens} blocks={len(self.blocks)}>"
        )

    @property
    def is_pooling(self) -> bool:
        """Tell whether it is pooled rather than continued."""
        return self.stop is None

    def scheduled(self, number: int) -> ScheduledRequest:
        """Note that ``number`` tokens are computed in this step; return what the executor sees."""
        self.num_scheduled_tokens = number
        computed = self.num_computed_tokens
        tokens = self.tokens
        return _new_tuple(  # a third less time than the class's own constructor, for every request in every step
            ScheduledRequest,
            (
                self.request_id,
                self._tokens_view,
                self.num_prompt_tokens,
                computed,
                number,
                computed + number == len(tokens),
                self._blocks_view,
                *self._carried,
            ),
        )

    def accept(self, new: Sequence[int]) -> tuple[list[int], End | None]:
        """Append new tokens up to the one that ends the text; return those, and why it ends, if it does."""
        stop = self.stop
        assert stop is not None
        tokens, watched = self.tokens, stop.watched
        taken: list[int] = []
        for number in new:
            token = number if type(number) is int else int(number)
            tokens.append(token)
            taken.append(token)
            if len(tokens) >= stop.max_len or watched is None or token in watched:
                end = stop.check(tokens)
                if end is not None:
                    return taken, end
        return taken, None

    def restart(self) -> None:
        """Forget what was computed; the blocks must have been released."""
        self.state = RequestState.WAITING
        self.blocks.clear()
        self.capacity = 0
        self.num_computed_tokens = 0
        self.chain = self.space
        self.next_stored = _NEVER
        self.was_preempted = True
