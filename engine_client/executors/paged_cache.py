"""The KV blocks of a transformers model: one pool of slots for all requests, and the cache that a forward pass sees.

::

    scheduler's block_ids ─▶ Rows: slots to write, slots to read, positions, mask ─▶ one forward pass
                                     └─▶ a layer of the cache: write what is new, return what each row has so far

A token at position ``p`` lies in slot ``block_ids[p // block_size] * block_size + p % block_size``, so a block that
requests share, or that comes from the prefix cache, is simply read by all of them, and preemption has nothing to free.

Queries stand at the right end of their row, so that the last column is everybody's newest token; keys stand at their
position.  What a padded query computes is written into a slot of its own, which nobody reads.

Threads: the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_client.engine.executor import ScheduledRequest

__all__ = ["BlockStore", "Rows", "make_cache"]


class BlockStore:
    """The keys and values of all blocks, layer by layer; memory is taken as it is first written.

    Args:
        num_blocks: how many blocks there are.
        block_size: tokens that one holds.
        device: where they are.
    """

    def __init__(self, num_blocks: int, block_size: int, device: Any) -> None:
        self.block_size = block_size
        self.trash = num_blocks * block_size
        self.device = device
        self._layers: list[tuple[Any, Any] | None] = []

    def __repr__(self) -> str:
        return f"<BlockStore slots={self.trash} layers={len(self._layers)}>"

    def layer(self, index: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Return keys and values of a layer: ``[slots, heads, size]``, of the shape and type that the model uses."""
        while len(self._layers) <= index:
            self._layers.append(None)
        pair = self._layers[index]
        if pair is None:
            pair = self._layers[index] = self._make(keys), self._make(values)
        return pair

    def _make(self, like: Any) -> Any:
        import torch  # noqa: PLC0415  # optional

        # Not set to zero, which would take all the memory now: but for the last slot, only what was written is read.
        made = torch.empty((self.trash + 1, like.shape[1], like.shape[3]), dtype=like.dtype, device=self.device)
        made[self.trash] = 0
        return made

    def drop(self) -> None:
        """Give the memory back; what was in the blocks is gone."""
        self._layers.clear()


class Rows:
    """What one forward pass computes, and where everything lies.

    Args:
        requests: a row each.
        store: of the blocks.
    """

    def __init__(self, requests: Sequence[ScheduledRequest], store: BlockStore) -> None:
        import torch  # noqa: PLC0415  # optional

        counts = [request.num_scheduled_tokens for request in requests]
        ends = [request.num_computed_tokens + count for request, count in zip(requests, counts, strict=True)]
        width, length = max(counts), max(ends)
        self.store = store
        tokens, positions, written, read = [], [], [], []
        for request, count, end in zip(requests, counts, ends, strict=True):
            slots = _slots(request.block_ids, store.block_size, end)
            padding = width - count
            tokens.append([0] * padding + list(request.new_token_ids))
            positions.append([0] * padding + list(range(end - count, end)))
            written.append([store.trash] * padding + slots[end - count :])
            read.append(slots + [store.trash] * (length - end))
        device = store.device
        self.input_ids = torch.tensor(tokens, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.written = torch.tensor(written, device=device)
        self.read = torch.tensor(read, device=device)
        # A query sees the keys up to its own position; a padded one sees the first, so that it is not nowhere.
        self._keys = torch.arange(length, device=device)
        self._is_seen = self._keys <= self.positions[..., None]

    def mask(self, dtype: Any, window: int | None = None) -> Any:
        """Return what is added to the attention's scores: ``[rows, 1, queries, keys]``.

        Args:
            dtype: of the model.
            window: how many keys a query sees at most, its own included; None: all.
        """
        import torch  # noqa: PLC0415  # optional

        seen = self._is_seen
        if window is not None:
            seen = seen & (self._keys > self.positions[..., None] - window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def _slots(block_ids: Sequence[int], size: int, end: int) -> list[int]:
    """Return the slots of the first ``end`` tokens."""
    blocks = -(-end // size)
    return [block * size + offset for block in block_ids[:blocks] for offset in range(size)][:end]


def make_cache(rows: Rows, num_layers: int) -> Any:
    """Return the cache for one forward pass of ``rows``, in the form that transformers' models take."""
    from transformers.cache_utils import Cache, DynamicLayer  # noqa: PLC0415  # optional

    class PagedLayer(DynamicLayer):  # type: ignore[misc,unused-ignore]  # without transformers it is Any
        """Writes into the blocks, and returns what every row has so far."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self._index = index

        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
            """Take ``[rows, heads, queries, size]``; return the same with as many keys as the longest row has."""
            found = []
            for new, kept in zip(
                (key_states, value_states), rows.store.layer(self._index, key_states, value_states), strict=True
            ):
                kept[rows.written] = new.transpose(1, 2)
                found.append(kept[rows.read].transpose(1, 2))
            return found[0], found[1]

        def get_seq_length(self, *_: Any) -> int:
            """Return how many keys there were before."""
            return int(rows.read.shape[1] - rows.input_ids.shape[1])

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            """Return the number of keys, and where they begin."""
            return int(rows.read.shape[1]), 0

    return Cache(layers=[PagedLayer(index) for index in range(num_layers)])
