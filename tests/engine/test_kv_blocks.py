"""The block pool: who holds what, and which prefixes can be found."""

from __future__ import annotations

import tracemalloc

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_client.engine.kv_blocks import BlockPool

SPACE = ("space",)


def stored(pool, tokens, chain=SPACE):
    """Allocate and store the full blocks of a prompt; return them."""
    blocks = []
    for start in range(0, len(tokens) - pool.block_size + 1, pool.block_size):
        [block] = pool.allocate(1)
        chain = pool.store(block, tokens[start : start + pool.block_size], chain)
        blocks.append(block)
    return blocks


class TestBlocks:
    def test_counts_what_is_held(self):
        """Allocated blocks are all different, held, and free again after release."""
        pool = BlockPool(5, 4)
        first, second = pool.allocate(2), pool.allocate(3)
        assert sorted(first + second) == list(range(5))
        assert (pool.num_held, pool.num_free) == (5, 0)
        pool.release(first)
        assert (pool.num_held, pool.num_free) == (3, 2)
        assert repr(pool) == "<BlockPool held=3/5 stored=0>"

    def test_held_twice_is_released_twice(self):
        """A shared block is free when its last holder has let go."""
        pool = BlockPool(2, 4)
        blocks = stored(pool, [1, 2, 3, 4])
        pool.hold(blocks)
        pool.release(blocks)
        assert pool.num_held == 1
        pool.release(blocks)
        assert pool.num_held == 0

    def test_large_pool_costs_nothing(self):
        """A pool of a hundred million blocks takes no memory before they are used."""
        tracemalloc.start()
        try:
            pool = BlockPool(100_000_000, 16)
            pool.allocate(10)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 100_000


class TestPrefixes:
    def test_finds_the_longest_prefix(self):
        """A prompt finds the stored blocks that it begins with."""
        pool = BlockPool(10, 2)
        blocks = stored(pool, [1, 2, 3, 4, 5, 6])
        assert pool.find([1, 2, 3, 4, 9, 9, 9], SPACE)[0] == blocks[:2]
        assert pool.find([9, 2, 3, 4], SPACE)[0] == []

    def test_leaves_a_token_to_compute(self):
        """The last token is never found, even if it completes a stored block."""
        pool = BlockPool(10, 2)
        blocks = stored(pool, [1, 2, 3, 4])
        assert pool.find([1, 2, 3, 4], SPACE)[0] == blocks[:1]
        assert pool.find([1, 2], SPACE)[0] == []

    def test_same_tokens_after_other_prefixes_differ(self):
        """A block is found only behind the very prefix that it was computed with."""
        pool = BlockPool(10, 2)
        stored(pool, [1, 1, 7, 7])
        assert pool.find([2, 2, 7, 7, 0], SPACE)[0] == []
        assert pool.find([7, 7, 0], SPACE)[0] == []

    def test_spaces_are_separate(self):
        """Prompts of another adapter or salt find nothing."""
        pool = BlockPool(10, 2)
        stored(pool, [1, 1])
        assert pool.find([1, 1, 0], ("other",))[0] == []

    def test_second_copy_is_not_stored(self):
        """When two requests compute the same block, the first copy stays the one that is found."""
        pool = BlockPool(10, 2)
        first = stored(pool, [1, 1, 2, 2])
        second = stored(pool, [1, 1, 3, 3])
        assert pool.find([1, 1, 3, 3, 0], SPACE)[0] == [first[0], second[1]]

    def test_evicts_the_least_recently_used_from_its_end(self):
        """When room is needed, the oldest prefix loses its last block first."""
        pool = BlockPool(4, 2)
        old, new = stored(pool, [1, 1, 2, 2]), stored(pool, [3, 3, 4, 4])
        pool.release(old)
        pool.release(new)
        pool.allocate(1)
        assert pool.find([1, 1, 2, 2, 0], SPACE)[0] == old[:1]
        assert pool.find([3, 3, 4, 4, 0], SPACE)[0] == new
        pool.hold(old[:1])
        pool.release(old[:1])  # used again: the other prefix is the older one now
        pool.allocate(1)
        assert pool.find([1, 1, 0], SPACE)[0] == old[:1]
        assert pool.find([3, 3, 4, 4, 0], SPACE)[0] == new[:1]

    def test_empty_blocks_are_used_before_stored_ones(self):
        """Content is evicted only when no block without content is left."""
        pool = BlockPool(3, 2)
        blocks = stored(pool, [1, 1])
        pool.release(blocks)
        plain = pool.allocate(2)
        assert pool.find([1, 1, 0], SPACE)[0] == blocks
        pool.release(plain)
        pool.allocate(2)
        assert pool.find([1, 1, 0], SPACE)[0] == blocks

    def test_idle_blocks_are_told_apart(self):
        """Found blocks that nobody holds count as free until they are held."""
        pool = BlockPool(4, 2)
        blocks = stored(pool, [1, 1, 2, 2])
        pool.release(blocks[1:])
        assert pool.num_idle(blocks) == 1
        pool.hold(blocks)
        assert pool.num_idle(blocks) == 0

    def test_reset_forgets_everything_or_nothing(self):
        """A reset is refused while a block is held, and forgets all prefixes otherwise."""
        pool = BlockPool(4, 2)
        blocks = stored(pool, [1, 1])
        assert not pool.reset()
        assert pool.find([1, 1, 0], SPACE)[0] == blocks
        pool.release(blocks)
        assert pool.reset()
        assert pool.find([1, 1, 0], SPACE)[0] == []
        assert pool.num_free == 4
        assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


class PoolMachine(RuleBasedStateMachine):
    """Requests come, share prefixes, grow and go in any order; blocks are neither lost nor mixed up."""

    @initialize(size=st.integers(1, 3), number=st.integers(1, 12))
    def start(self, size, number):
        self.pool = BlockPool(number, size)
        self.held = []  # (blocks, tokens of the full ones)
        self.content = {}  # block → the whole prefix that it was stored with

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def come(self, tokens):
        pool, size = self.pool, self.pool.block_size
        found, chain = pool.find(tokens, SPACE)
        for index, block in enumerate(found):
            assert self.content[block] == tuple(tokens[: (index + 1) * size])
        needed = -(-len(tokens) // size) - len(found)
        if needed > pool.num_free - pool.num_idle(found):
            return
        pool.hold(found)
        blocks = found + pool.allocate(needed)
        for index in range(len(found), len(tokens) // size):
            self.content[blocks[index]] = tuple(tokens[: (index + 1) * size])
            chain = pool.store(blocks[index], tokens[index * size : (index + 1) * size], chain)
        self.held.append(blocks)

    @rule(choice=st.integers(0, 100))
    def go(self, choice):
        if self.held:
            self.pool.release(self.held.pop(choice % len(self.held)))

    @rule()
    def forget(self):
        assert self.pool.reset() is (not self.held)

    @invariant()
    def nothing_is_lost(self):
        assert self.pool.num_held == len({block for blocks in self.held for block in blocks})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
