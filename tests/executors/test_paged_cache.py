"""Keys and values lie in the scheduler's blocks, and each row of a pass finds its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_client.engine.batch import ScheduledRequest
from engine_client.executors.paged_cache import BlockStore, Rows, make_cache


def row(name: str, tokens: list[int], computed: int, blocks: list[int]) -> ScheduledRequest:
    return ScheduledRequest(name, tokens, len(tokens), computed, len(tokens) - computed, True, blocks)


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(8, 4, torch.device("cpu"))


def test_rows_stand_at_the_right_end(store: BlockStore) -> None:
    """The last column has everybody's newest token; what is padded is written where nobody reads."""
    rows = Rows([row("a", [1, 2, 3, 4, 5, 6], 0, [3, 0]), row("b", [7, 8], 1, [5])], store)
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 8]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1]]
    assert rows.written.tolist() == [[12, 13, 14, 15, 0, 1], [32, 32, 32, 32, 32, 21]]
    assert rows.read.tolist() == [[12, 13, 14, 15, 0, 1], [20, 21, 32, 32, 32, 32]]


def test_a_query_sees_what_was_before_it(store: BlockStore) -> None:
    """Its own position and those before, no more than the window; a padded one sees the first, and is no NaN."""
    rows = Rows([row("a", [1, 2, 3, 4], 0, [0]), row("b", [5, 6], 1, [1])], store)
    seen = rows.mask(torch.float32) == 0
    assert seen.shape == (2, 1, 4, 4)
    assert seen[0, 0].tolist() == [[key <= query for key in range(4)] for query in range(4)]
    assert seen[1, 0].tolist() == [[True, False, False, False]] * 3 + [[True, True, False, False]]
    narrow = rows.mask(torch.float32, 2)[0, 0] == 0
    assert narrow.sum(-1).tolist() == [1, 2, 2, 2]


def test_what_one_pass_writes_the_next_one_reads(store: BlockStore) -> None:
    """A layer returns all keys of each row, those of earlier passes from the blocks, whoever wrote them."""

    def keys(rows: Rows) -> Any:
        new = rows.input_ids[:, None, :, None].float().expand(-1, 2, -1, 3)
        found, values = make_cache(rows, 2).update(new, -new, 1)
        assert torch.equal(found[..., :1], -values[..., :1])
        return found[:, 0, :, 0]

    first = Rows([row("a", [1, 2, 3, 4, 5], 0, [6, 2])], store)
    assert keys(first).tolist() == [[1, 2, 3, 4, 5]]
    second = Rows([row("a", [1, 2, 3, 4, 5, 9], 5, [6, 2]), row("b", [1, 2, 3, 4, 7], 4, [6, 1])], store)
    found = keys(second)
    assert found[0].tolist() == [1, 2, 3, 4, 5, 9]
    assert found[1, :5].tolist() == [1, 2, 3, 4, 7]
    cache = make_cache(second, 2)
    assert cache.get_seq_length() == 5
    assert "slots=32 layers=2" in repr(store)
    store.drop()
    assert "layers=0" in repr(store)
