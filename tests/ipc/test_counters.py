"""What an engine counts can be read while it counts."""

from __future__ import annotations

import pytest

from engine_client.ipc.counters import END_TO_END, FIRST_TOKEN, Count, Counters, Reading


def test_new_counters_are_at_zero() -> None:
    """Nobody has counted: everything is zero, and that is said."""
    counters = Counters()
    assert not counters.is_kept
    reading = counters.read()
    assert reading.finished == Reading().finished
    assert (reading.kv_usage, reading.prompt_tokens, sum(reading.first_token[0])) == (0.0, 0, 0)


def test_counts_are_added_up() -> None:
    """Each count has a word of its own."""
    counters = Counters()
    for word in range(1, 16):
        counters.add(word, 10 + word)
        counters.add(word)
    reading = counters.read()
    assert (reading.prompt_tokens, reading.generation_tokens, reading.preemptions) == (12, 13, 14)
    assert (reading.prefix_queries, reading.prefix_hits) == (15, 16)
    assert reading.finished == (17, 18, 19, 20, 21)
    assert reading.kv_usage == 22 / 23
    assert (reading.arena_used, reading.arena_capacity, reading.arena_fallbacks) == (24, 25, 26)
    assert f"prompt_tokens={reading.prompt_tokens}" in repr(counters)


@pytest.mark.parametrize("distribution", [FIRST_TOKEN, END_TO_END])
def test_observations_fall_into_buckets(distribution) -> None:
    """A bucket holds what is at most its limit; the last one what is above all; nothing else changes."""
    counters = Counters()
    limits = distribution.limits
    for seconds in (limits[0] / 2, limits[0], limits[3], limits[-1] * 2):
        counters.observe(distribution, seconds)
    reading = counters.read()
    buckets, total = reading.first_token if distribution is FIRST_TOKEN else reading.end_to_end
    others, _ = reading.end_to_end if distribution is FIRST_TOKEN else reading.first_token
    assert len(buckets) == len(limits) + 1
    assert (buckets[0], buckets[3], buckets[-1], sum(buckets), sum(others)) == (2, 1, 1, 4, 0)
    assert total == pytest.approx(limits[0] * 1.5 + limits[3] + limits[-1] * 2)
    assert list(limits) == sorted(set(limits))


def test_nothing_overlaps() -> None:
    """Counts and distributions have words of their own, within the memory that there is for them."""
    spans = [range(Count.ARENA_FALLBACKS + 1)]
    spans += [range(d.start, d.start + len(d.limits) + 2) for d in (FIRST_TOKEN, END_TO_END)]
    words = [word for span in spans for word in span]
    assert len(set(words)) == len(words)
    assert max(words) < Counters.SIZE // 8
