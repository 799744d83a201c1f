"""The blocks of requests: first ones, further ones, shared ones."""

from __future__ import annotations

import pytest

from engine_client.engine.kv_cache import KvCache
from engine_client.engine.limits import Limits
from engine_client.engine.request import Request
from helpers.engines import make_request


def cache_of(num_blocks=8, **limits):
    return KvCache(Limits(num_blocks=num_blocks, block_size=2, **limits))


def request(tokens, *, space=("space",), reads_cache=True):
    return Request(make_request("a"), list(tokens), None, space=space, reads_cache=reads_cache)


def computed(cache, tokens, **settings):
    """Return a request whose tokens are all computed and stored."""
    member = request(tokens, **settings)
    assert cache.start(member, 100)
    member.num_computed_tokens = len(tokens)
    cache.store(member)
    return member


class TestStart:
    def test_gives_blocks_for_the_first_chunk_alone(self):
        """A prompt that is computed in chunks gets blocks for its first chunk."""
        cache = cache_of()
        member = request(range(10))
        assert cache.start(member, 3) == 3
        assert (len(member.blocks), member.capacity) == (2, 4)
        assert cache.usage == 2 / 8

    def test_refuses_what_does_not_fit_as_a_whole(self):
        """A prompt starts only if blocks for all of it are free."""
        cache = cache_of()
        computed(cache, range(8))
        member = request(range(50, 60))
        assert cache.start(member, 3) == 0
        assert member.blocks == []
        assert cache.pool.num_held == 4

    def test_refuses_a_part_without_chunks(self):
        """Without chunked prefill a prompt waits for a step that has room for all of it."""
        cache = cache_of(chunked_prefill=False)
        assert cache.start(request(range(5)), 4) == 0
        assert cache.start(request(range(5)), 5) == 5

    def test_threshold_limits_a_chunk(self):
        """A long prompt gets no more than the threshold in a step, unless chunks are off."""
        assert cache_of(long_prefill_token_threshold=3).start(request(range(8)), 100) == 3
        assert cache_of(long_prefill_token_threshold=3, chunked_prefill=False).start(request(range(8)), 100) == 8

    def test_starts_behind_a_stored_prefix(self):
        """What another request has computed is shared, not computed again."""
        cache = cache_of()
        first = computed(cache, [1, 2, 3, 4, 5])
        second = request([1, 2, 3, 4, 6])
        assert cache.start(second, 100) == 1
        assert second.blocks[:2] == first.blocks[:2]
        assert second.num_computed_tokens == 4
        assert cache.pool.num_held == 4

    def test_stored_prefix_that_nobody_holds_is_not_counted_twice(self):
        """Blocks that are found among the free ones cannot also be the room for the rest."""
        cache = cache_of(4)
        cache.release(computed(cache, [1, 2, 3, 4, 5]))
        blocker = computed(cache, [8, 8])
        assert cache.start(request([1, 2, 3, 4, 5, 6, 7, 8]), 100) == 0
        cache.release(blocker)
        assert cache.start(request([1, 2, 3, 4, 5, 6, 7, 8]), 100) == 4

    @pytest.mark.parametrize("settings", [{"space": None}, {"reads_cache": False}, {"space": ("other",)}])
    def test_stays_out_of_the_cache(self, settings):
        """A request that is not to share computes everything itself."""
        cache = cache_of()
        computed(cache, [1, 2, 3])
        assert cache.start(request([1, 2, 3], **settings), 100) == 3

    def test_what_may_not_read_is_stored(self):
        """A request that must not read the cache still stores what it computes, one without a space does not."""
        cache = cache_of()
        computed(cache, [1, 2, 3], reads_cache=False)
        computed(cache, [5, 6, 7], space=None)
        assert cache.start(request([1, 2, 3]), 100) == 1
        assert cache.start(request([5, 6, 7]), 100) == 3


def test_grows_until_nothing_is_left():
    """A running request gets blocks while there are some; a refusal changes nothing."""
    cache = cache_of(3)
    member = computed(cache, [1, 2])
    assert cache.grow(member, 5)
    assert (len(member.blocks), member.capacity) == (3, 6)
    assert not cache.grow(member, 7)
    assert len(member.blocks) == 3
    assert cache.fits(6)
    assert not cache.fits(7)


def test_release_gives_all_back():
    """After release nothing is held, and what was stored can still be found."""
    cache = cache_of()
    member = computed(cache, [1, 2, 3])
    cache.release(member)
    assert (member.blocks, cache.usage) == ([], 0)
    assert cache.start(request([1, 2, 3]), 100) == 1


def test_stores_blocks_as_they_fill():
    """Generated tokens are stored too, block by block."""
    cache = cache_of()
    member = request([1, 2, 3])
    cache.start(member, 100)
    for token in (4, 5, 6):
        member.num_computed_tokens = len(member.tokens)
        cache.store(member)
        member.tokens.append(token)
        cache.grow(member, len(member.tokens))
    assert cache.start(request([1, 2, 3, 4, 5, 6]), 100) == 2


def test_statistics_since_the_last_call():
    """Lookups and hits are counted in tokens, those of preempted requests apart, and reported once."""
    cache = cache_of()
    cache.release(computed(cache, [1, 2, 3]))
    again = request([1, 2, 3])
    again.was_preempted = True
    cache.start(again, 100)
    assert not cache.reset()
    cache.release(again)
    assert cache.reset()
    stats = cache.take_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 3, 0)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 3, 2)
    assert stats.reset
    assert cache.take_stats().requests == 0
    assert repr(cache).startswith("<BlockPool")
