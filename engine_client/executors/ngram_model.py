"""A byte-level back-off n-gram language model: interpolated Kneser-Ney over a sorted text.

The model is its training text and one permutation: the positions of the text, sorted by the bytes *before* them,
read backwards.  All occurrences of a context are then one span of the permutation, the span of a longer context lies
inside that of a shorter one, and the counts of a context are the counts of one slice.  No table of n-grams is kept, so
memory is about ten bytes per byte of text, and the order costs nothing until it is used.

A token is a byte (0 to 254; 255 occurs in no UTF-8 text) or ``EOS`` (256), the end of a document.

Each order is discounted and mixed with the next lower one; the longest order counts occurrences, lower ones count in
how many different places a token can stand (its left neighbours), and below all of them lies the uniform distribution,
so that probabilities are positive and sum to 1.  Equal contexts give bit-identical probabilities in every process.

Threads: after construction only caches change, by single dictionary stores; the engine uses one thread.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from engine_client.executors.corpus import DOCUMENT_END

__all__ = ["EOS", "VOCABULARY", "NGramModel"]

EOS: Final = 256
VOCABULARY: Final = 257

ORDER: Final = 12  # longest context in bytes: held-out perplexity is flat from here on, and words come out whole
DISCOUNT: Final = 0.8  # taken from every count, and
STRENGTH: Final = 1.0  # added to every total, for the next lower order
LARGE: Final = 128

_END: Final = DOCUMENT_END[0]


class NGramModel:
    """Next-token probabilities counted in ``text``, a corpus in the sense of ``executors.corpus``.

    Args:
        text: the training text.
        order: the longest context in bytes.
        progress: called as ``progress(done, total)`` in bytes of text, often enough for a progress bar.

    Raises:
        ValueError: the text is empty, or ``order`` is below 1.
    """

    def __init__(
        self, text: bytes, order: int = ORDER, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        if not text:
            raise ValueError("an n-gram model needs some text")
        if order < 1:
            raise ValueError(f"the order must be at least 1, not {order}")
        self.order = order
        self._size = len(text)
        self._large = max(LARGE, self._size >> 11)  # bounds what is kept: order x 2048 distributions of 2 KiB
        # Latin-1 strings rather than bytes: list.sort compares those without the general protocol (1.5 times faster).
        self._backwards = text[::-1].decode("latin-1")
        self._padded = text[::-1] + DOCUMENT_END * (order + 1)
        self._positions, self._starts = self._sort(progress)
        # Position p of the backward text is a context that ends there; what followed it stands at p - 1.
        self._followers = bytes(map(self._padded.__getitem__, map((-1).__add__, self._positions)))
        self._kept: dict[tuple[int, int], array[float]] = {}
        self._keep(0, 0, self._size, [1 / VOCABULARY] * VOCABULARY)

    def __repr__(self) -> str:
        return f"<NGramModel of order {self.order}, {self._size} bytes of text>"

    def probabilities(self, context: Sequence[int]) -> list[float]:
        """Return the probability of each token (0 to 256) after ``context``, given as tokens.

        Only its last ``order`` tokens matter, and of these what follows the last one that no text can hold.
        """
        spans = self._spans(self._key(context))
        depth = len(spans) - 1
        weight = 1.0
        parts = []
        base = None
        while base is None:
            low, high = spans[depth]
            base = self._kept.get((depth, low))
            if base is None:
                counts = self._count(depth, low, high)
                scale = weight / (sum(counts.values()) + STRENGTH)
                parts.append((scale, counts))
                weight = scale * (STRENGTH + DISCOUNT * len(counts))
                depth -= 1
        result = [weight * probability for probability in base]
        for scale, counts in parts:
            for token, count in counts.items():
                result[token] += scale * (count - DISCOUNT)
        # In the text the end of a document is the byte 255, outside it is token 256.
        result[_END], result[EOS] = result[EOS], result[_END]
        return result

    def perplexity(self, text: bytes) -> float:
        """Return the perplexity per byte of another text: 2 to the mean number of bits that a byte needs."""
        tokens = [EOS if byte == _END else byte for byte in text]
        bits = 0.0
        for position, token in enumerate(tokens):
            bits -= math.log2(self.probabilities(tokens[max(0, position - self.order) : position])[token])
        return float(2 ** (bits / max(1, len(tokens))))

    def _sort(self, progress: Callable[[int, int], None]) -> tuple[array[int], list[int]]:
        """Return the sorted positions, and where those start that have each byte before them.

        They are sorted byte by byte, so that the sort keys of one byte are all that is in memory at once.
        """
        backwards, order = self._backwards, self.order
        buckets = [array("I") for _ in range(256)]
        for position in range(1, self._size):
            buckets[self._padded[position]].append(position)
        positions = array("I", [self._size])  # the context of the first byte: nothing
        starts = [1]
        for bucket in buckets:
            positions.extend(sorted(bucket, key=lambda p: backwards[p : p + order]))
            starts.append(len(positions))
            if bucket:
                progress(len(positions), self._size)
        return positions, starts

    def _key(self, context: Sequence[int]) -> str:
        """Return the part of ``context`` that counts, backwards, in the text's own bytes."""
        key = bytearray()
        for token in reversed(context[-self.order :]):
            if token == EOS:
                key.append(_END)
            elif 0 <= token < _END:
                key.append(token)
            else:
                break
        return key.decode("latin-1")

    def _spans(self, key: str) -> list[tuple[int, int]]:
        """Return the spans of the contexts of length 0, 1, … up to the longest one that the text has."""
        spans = [(0, self._size)]
        if key:
            span = self._starts[ord(key[0])], self._starts[ord(key[0]) + 1]
            while span[0] < span[1]:
                spans.append(span)
                depth = len(spans) - 1
                if depth == len(key):
                    break
                span = self._narrow(span, depth, key[depth])
        return spans

    def _narrow(self, span: tuple[int, int], depth: int, byte: str) -> tuple[int, int]:
        """Return the part of a span of contexts of length ``depth`` before which ``byte`` stands."""
        backwards, positions = self._backwards, self._positions

        def before(position: int) -> str:
            return backwards[position + depth : position + depth + 1]

        low = bisect_left(positions, byte, *span, key=before)
        return low, bisect_right(positions, byte, low, span[1], key=before)

    def _count(self, depth: int, low: int, high: int) -> dict[int, int]:
        """Return how often each token follows a context: occurrences at the full order, else different left bytes."""
        followers = self._followers
        if high - low == 1:
            return {followers[low]: 1}
        if depth == self.order:
            return Counter(followers[low:high])
        lefts = map(self._padded.__getitem__, map(depth.__add__, self._positions[low:high]))
        return Counter([token for _, token in set(zip(lefts, followers[low:high], strict=True))])

    def _keep(self, depth: int, low: int, high: int, lower: Sequence[float]) -> None:
        """Compute the distributions of a context and of all longer ones that are large, and keep them."""
        counts = self._count(depth, low, high)
        scale = 1 / (sum(counts.values()) + STRENGTH)
        weight = scale * (STRENGTH + DISCOUNT * len(counts))
        kept = self._kept[depth, low] = array("d", [weight * probability for probability in lower])
        for token, count in counts.items():
            kept[token] += scale * (count - DISCOUNT)
        while depth < self.order and low < high:
            first = self._positions[low] + depth
            low, end = self._narrow((low, high), depth, self._backwards[first : first + 1])
            if end - low >= self._large:
                self._keep(depth + 1, low, end, kept)
            low = end
