"""What an engine has done since it started, as words of its status page: counted there, read by whoever wants to know.

::

    engine: Counters.add, .observe ── 8-byte stores ──▶ words of the page ──▶ Counters.read: client.metrics(), top

The engine counts whether anybody looks or not, which costs it a few stores per step and per request, and nothing per
token.  As on the rest of the page each word is whole when read, and two of them may be a step apart.

Threads: written by the engine's thread; read from any.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["END_TO_END", "FIRST_TOKEN", "Count", "Counters", "Distribution", "Reading"]


class Count:
    """The word of each count, from the first word of the counters."""

    IS_KEPT: Final = 0
    """1 once the engine counts at all; one that is not ours may not."""
    PROMPT_TOKENS: Final = 1
    GENERATION_TOKENS: Final = 2
    PREEMPTIONS: Final = 3
    PREFIX_QUERIES: Final = 4
    PREFIX_HITS: Final = 5
    FINISHED: Final = 6
    """The first of five, by ``FinishReason``."""
    KV_BLOCKS_HELD: Final = 11
    KV_BLOCKS: Final = 12
    ARENA_USED: Final = 13
    ARENA_CAPACITY: Final = 14
    ARENA_FALLBACKS: Final = 15


_REASONS: Final = 5


@dataclass(frozen=True)
class Distribution:
    """Where a distribution stands among the words, and its limits: a count for each, one for what is above, the sum.

    Args:
        start: its first word.
        limits: upper ends of the buckets, in seconds; those of the reference.
    """

    start: int
    limits: tuple[float, ...]


FIRST_TOKEN: Final = Distribution(
    16,
    (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
)
"""Seconds from a request's arrival in the engine to its first token."""
END_TO_END: Final = Distribution(
    48,
    (
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
        *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
    ),
)
"""Seconds from a request's arrival in the engine to its end."""

_WORDS: Final = 80


@dataclass(frozen=True)
class Reading:
    """What had been counted at one moment.

    Args:
        prompt_tokens, generation_tokens: taken and made.
        preemptions: how often a request lost its KV blocks to others.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found.
        finished: requests by ``FinishReason``.
        kv_usage: the part of the KV blocks that requests hold, from 0 to 1.
        arena_used, arena_capacity: bytes of the memory that results go through.
        arena_fallbacks: buffers that found no room there and went through the pipe.
        first_token, end_to_end: for each bucket how many requests, and the sum of their seconds.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: tuple[int, ...] = (0,) * _REASONS
    kv_usage: float = 0.0
    arena_used: int = 0
    arena_capacity: int = 0
    arena_fallbacks: int = 0
    first_token: tuple[tuple[int, ...], float] = ((), 0.0)
    end_to_end: tuple[tuple[int, ...], float] = ((), 0.0)


class Counters:
    """The counts of one engine.

    Args:
        words: memory for them, as integers of eight bytes; None: private memory.
        times: the same memory as floats; given if ``words`` are.
    """

    SIZE: Final = 8 * _WORDS
    """Bytes of memory."""

    def __init__(self, words: Any = None, times: Any = None) -> None:
        if words is None:
            memory = memoryview(bytearray(self.SIZE))
            words, times = memory.cast("Q"), memory.cast("d")
        self.words: Any = words
        self._times: Any = times

    def __repr__(self) -> str:
        return f"<Counters {self.read()}>"

    def add(self, count: int, number: int = 1) -> None:
        """Add to a count."""
        self.words[count] += number

    def observe(self, distribution: Distribution, seconds: float) -> None:
        """Add one observation."""
        limits = distribution.limits
        self.words[distribution.start + bisect_left(limits, seconds)] += 1
        self._times[distribution.start + len(limits) + 1] += seconds

    @property
    def is_kept(self) -> bool:
        """Tell whether anybody counts here."""
        return bool(self.words[Count.IS_KEPT])

    def read(self) -> Reading:
        """Return what has been counted."""
        words = self.words
        held, blocks = words[Count.KV_BLOCKS_HELD], words[Count.KV_BLOCKS]
        return Reading(
            prompt_tokens=words[Count.PROMPT_TOKENS],
            generation_tokens=words[Count.GENERATION_TOKENS],
            preemptions=words[Count.PREEMPTIONS],
            prefix_queries=words[Count.PREFIX_QUERIES],
            prefix_hits=words[Count.PREFIX_HITS],
            finished=tuple(words[Count.FINISHED : Count.FINISHED + _REASONS]),
            kv_usage=held / blocks if blocks else 0.0,
            arena_used=words[Count.ARENA_USED],
            arena_capacity=words[Count.ARENA_CAPACITY],
            arena_fallbacks=words[Count.ARENA_FALLBACKS],
            first_token=self._distribution(FIRST_TOKEN),
            end_to_end=self._distribution(END_TO_END),
        )

    def _distribution(self, distribution: Distribution) -> tuple[tuple[int, ...], float]:
        start, end = distribution.start, distribution.start + len(distribution.limits) + 1
        return tuple(self.words[start:end]), self._times[end]
