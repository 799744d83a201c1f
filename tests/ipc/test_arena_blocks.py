"""Blocks never overlap, are reused warm, and grow together again."""

from __future__ import annotations

from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_client.ipc.arena_blocks import PAGE, FreeBlocks, size_class, whole_pages


@given(st.integers(1, 1 << 40))
def test_size_classes_are_tight_and_few(nbytes):
    """A class holds its buffer, wastes less than a quarter beyond whole pages, and is its own class."""
    size = size_class(nbytes)
    assert nbytes <= whole_pages(nbytes) <= size
    assert size < nbytes * 1.25 + PAGE
    assert size % PAGE == 0
    assert size_class(size) == size
    assert size_class(nbytes + 1) >= size


def test_there_are_four_classes_per_doubling():
    """Sizes between one and two gigabytes fall into four classes."""
    assert len({size_class((1 << 30) + n * 1_000_003) for n in range(1, 1024)}) == 4
    assert size_class(1) == size_class(PAGE) == whole_pages(0) == PAGE
    assert size_class(PAGE + 1) == 2 * PAGE


def test_an_empty_area_has_nothing_to_give():
    """Before the area has grown nothing fits, and all of a block is missing."""
    blocks = FreeBlocks()
    assert blocks.take(PAGE) is None
    assert blocks.missing(3 * PAGE) == 3 * PAGE


def test_the_block_freed_last_is_taken_first():
    """Among free blocks of one size the warmest is reused."""
    blocks = FreeBlocks()
    blocks.extend(4 * PAGE)
    starts = [blocks.take(PAGE) for _ in range(4)]
    for start in (starts[2], starts[0], starts[3]):
        blocks.give(start, PAGE)
    assert [blocks.take(PAGE) for _ in range(3)] == [starts[3], starts[0], starts[2]]
    assert blocks.used == blocks.capacity == 4 * PAGE
    assert repr(blocks) == "<FreeBlocks used=16384 capacity=16384>"


def test_a_larger_block_is_split_and_put_together_again():
    """A size that is not free is cut from a larger block; when all parts are back the large one fits again."""
    blocks = FreeBlocks()
    blocks.extend(8 * PAGE)
    parts = [blocks.take(2 * PAGE) for _ in range(4)]
    assert sorted(parts) == [0, 2 * PAGE, 4 * PAGE, 6 * PAGE]
    assert blocks.take(PAGE) is None
    for part in parts:
        blocks.give(part, 2 * PAGE)
    assert blocks.take(8 * PAGE) == 0


def test_only_what_is_missing_at_the_end_is_added():
    """A free block at the end counts when the area grows for a larger one."""
    blocks = FreeBlocks()
    blocks.extend(4 * PAGE)
    first = blocks.take(3 * PAGE)
    assert blocks.missing(5 * PAGE) == 4 * PAGE
    blocks.extend(8 * PAGE)
    assert blocks.take(5 * PAGE) == 3 * PAGE
    assert first == 0
    assert blocks.missing(PAGE) == PAGE


class Model(RuleBasedStateMachine):
    """Any sequence of take, give and growth, against a list of the live blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = FreeBlocks()
        self.live = []

    @rule(pages=st.integers(1, 9))
    def take(self, pages):
        size = pages * PAGE
        start = self.blocks.take(size)
        if start is None:
            missing = self.blocks.missing(size)
            assert 0 < missing <= size
            self.blocks.extend(self.blocks.capacity + missing)
            start = self.blocks.take(size)
            assert start is not None
        self.live.append((start, size))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def give(self, data):
        self.blocks.give(*self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @rule(pages=st.integers(1, 4))
    def grow(self, pages):
        self.blocks.extend(self.blocks.capacity + pages * PAGE)

    @invariant()
    def live_blocks_lie_apart_inside_the_area(self):
        end = 0
        for start, size in sorted(self.live):
            assert start >= end
            end = start + size
        assert end <= self.blocks.capacity
        assert self.blocks.used == sum(size for _, size in self.live)

    def teardown(self):
        for block in self.live:
            self.blocks.give(*block)
        assert self.blocks.used == 0
        if self.blocks.capacity:
            assert self.blocks.take(self.blocks.capacity) == 0


TestModel = Model.TestCase


def test_all_but_the_named_blocks_can_be_made_free():
    """What is live stays, what lies between becomes free in one piece each, and the end too."""
    blocks = FreeBlocks()
    blocks.extend(10 * PAGE)
    for _ in range(10):
        blocks.take(PAGE)
    blocks.keep_only([(7 * PAGE, PAGE), (0, 2 * PAGE)])
    assert blocks.used == 3 * PAGE
    assert blocks.take(5 * PAGE) == 2 * PAGE
    assert blocks.take(2 * PAGE) == 8 * PAGE
    assert blocks.take(PAGE) is None
    blocks.keep_only([])
    assert blocks.take(10 * PAGE) == 0
