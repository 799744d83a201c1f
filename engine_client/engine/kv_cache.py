"""The KV blocks of requests: got, filled, shared with those of the same prefix, given back.

Threads: the engine's thread only.
"""

from __future__ import annotations

from engine_client.engine.kv_blocks import BlockPool
from engine_client.engine.limits import Limits
from engine_client.engine.request import Request
from engine_client.messages import PrefixCacheStats

__all__ = ["KvCache"]


class KvCache:
    """Gives blocks to requests, and keeps what they computed for others.

    Args:
        limits: size and number of the blocks, and whether prefixes are shared.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self._stats = PrefixCacheStats()

    def __repr__(self) -> str:
        return repr(self.pool)

    def fits(self, num_tokens: int) -> bool:
        """Tell whether a request of this many tokens fits when it is alone."""
        return self.blocks_for(num_tokens) <= self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` need."""
        return -(-num_tokens // self.limits.block_size)

    @property
    def usage(self) -> float:
        """Return the part of the blocks that requests hold, from 0 to 1."""
        return self.pool.num_held / self.pool.num_blocks

    def start(self, request: Request, budget: int) -> int:
        """Give a waiting request its first blocks, if it fits as a whole; return how many tokens it computes, or 0.

        Blocks for all its tokens must be free, though only those of its first chunk are taken: requests that were
        admitted by their first chunk alone would soon preempt each other.
        """
        pool, size, total = self.pool, self.limits.block_size, len(request.tokens)
        found, chain = pool.find(request.tokens, request.space) if request.reads_cache else ([], request.space)
        computed = len(found) * size
        number = self.limits.chunk(total - computed, budget)
        if computed + number < total and not self.limits.chunked_prefill:
            return 0
        if self.blocks_for(total) - len(found) > pool.num_free - pool.num_idle(found):
            return 0
        pool.hold(found)
        request.blocks.extend(found)
        request.blocks.extend(pool.allocate(self.blocks_for(computed + number) - len(found)))
        request.capacity = len(request.blocks) * size
        request.num_computed_tokens = computed
        request.chain = chain
        if request.space is not None:
            request.next_stored = computed + size
        if request.reads_cache:
            self._count(request)
        return number

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks for its first ``num_tokens`` tokens; return whether there were enough."""
        missing = self.blocks_for(num_tokens) - len(request.blocks)
        if missing > self.pool.num_free:
            return False
        request.blocks.extend(self.pool.allocate(missing))
        request.capacity = len(request.blocks) * self.limits.block_size
        return True

    def store(self, request: Request) -> None:
        """Put the blocks that are full by now into the prefix cache."""
        size = self.limits.block_size
        while request.num_computed_tokens >= request.next_stored:
            start = request.next_stored - size
            tokens = request.tokens[start : request.next_stored]
            request.chain = self.pool.store(request.blocks[start // size], tokens, request.chain)
            request.next_stored += size

    def release(self, request: Request) -> None:
        """Take all blocks of a request back."""
        self.pool.release(request.blocks)
        request.blocks.clear()

    def reset(self) -> bool:
        """Forget what is stored; return whether that was possible, which it is while nobody holds a block."""
        done = self.pool.reset()
        self._stats.reset = self._stats.reset or done
        return done

    def take_stats(self) -> PrefixCacheStats:
        """Return what was looked up and found since the last call."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def _count(self, request: Request) -> None:
        stats = self._stats
        if request.was_preempted:
            stats.preempted_requests += 1
            stats.preempted_queries += len(request.tokens)
            stats.preempted_hits += request.num_computed_tokens
        else:
            stats.requests += 1
            stats.queries += len(request.tokens)
            stats.hits += request.num_computed_tokens
