"""KV blocks: who holds which, and which of the free ones still hold a prefix that somebody may want again.

::

    never used ──allocate──▶ held (count ≥ 1) ──last release──▶ free, without content ──allocate──▶ held
                               ▲                    └─ stored ─▶ free, with content: least recently used first
                               └──────────hold (a hit)──────────────┘        └─ evicted ─▶ allocate

A full block is stored under the key (chain of the block before it, its tokens); its own chain is a number that no other
block ever had.  So a key stands for the whole prefix, comparing two keys compares a few integers, and two different
prefixes can never meet, as they could under a hash.  The first block's chain is whatever separates prompts that must
not share: the adapter, the salt.

A prefix is released last block first, so that eviction shortens prefixes at their end.

Threads: the engine's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Union

__all__ = ["BlockPool", "Chain"]

Chain = Union[int, Hashable]
"""Where a prefix stands: after the block of this number, or at the beginning of a space of its own."""

_Key = tuple[Chain, tuple[int, ...]]


class BlockPool:
    """Counts blocks; what is in them is the executor's.

    Nothing is set up per block before it is used for the first time, so a large pool costs nothing.

    Args:
        num_blocks: how many there are, numbered from 0.
        block_size: tokens that one holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders: list[int] = []  # of each block that was ever used
        self._empty: list[int] = []  # free and without content; the last one released is used first
        self._idle: OrderedDict[int, None] = OrderedDict()  # free with content; the next one to evict first
        self._stored: dict[_Key, tuple[int, int]] = {}  # key → block, chain after it
        self._keys: dict[int, _Key] = {}  # of blocks with content
        self._chains = count(1)

    def __repr__(self) -> str:
        return f"<BlockPool held={self.num_held}/{self.num_blocks} stored={len(self._keys)}>"

    @property
    def num_free(self) -> int:
        """Return how many blocks could be allocated now, stored content notwithstanding."""
        return self.num_blocks - len(self._holders) + len(self._empty) + len(self._idle)

    @property
    def num_held(self) -> int:
        """Return how many blocks are in use."""
        return self.num_blocks - self.num_free

    def allocate(self, number: int) -> list[int]:
        """Return that many blocks, held once; evicts content if need be.  There must be enough (``num_free``)."""
        assert number <= self.num_free
        return [self._take() for _ in range(number)]

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        elif len(self._holders) < self.num_blocks:
            self._holders.append(1)
            return len(self._holders) - 1
        else:
            block = self._idle.popitem(last=False)[0]
            del self._stored[self._keys.pop(block)]
        self._holders[block] = 1
        return block

    def hold(self, blocks: Sequence[int]) -> None:
        """Hold blocks that ``find`` returned, once more."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of the blocks of one request."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._empty.append(block)

    # -- the prefix cache ----------------------------------------------------------------------------------------------

    def find(self, tokens: Sequence[int], chain: Chain) -> tuple[list[int], Chain]:
        """Return the stored blocks of the longest prefix of ``tokens``, and the chain after them.

        The last token is never part of it: something must be left to compute.  The blocks are not held yet.
        """
        found: list[int] = []
        size = self.block_size
        for start in range(0, len(tokens) - size, size):
            entry = self._stored.get((chain, tuple(tokens[start : start + size])))
            if entry is None:
                break
            found.append(entry[0])
            chain = entry[1]
        return found, chain

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Return how many of these are counted in ``num_free``, and would not be once they are held."""
        return sum(self._holders[block] == 0 for block in blocks)

    def store(self, block: int, tokens: Sequence[int], chain: Chain) -> Chain:
        """Note that ``block`` holds these tokens after ``chain``; return the chain after it.

        If another block holds the same already, that one stays the stored one.
        """
        key = (chain, tuple(tokens))
        entry = self._stored.get(key)
        if entry is not None:
            return entry[1]
        after = next(self._chains)
        self._stored[key] = block, after
        self._keys[block] = key
        return after

    def reset(self) -> bool:
        """Forget all content; refuse and return False while any block is held, since its holder may store it."""
        if self.num_held:
            return False
        self._empty.extend(self._idle)
        self._idle.clear()
        self._stored.clear()
        self._keys.clear()
        return True
