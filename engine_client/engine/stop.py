"""When a request's text ends: eos, stop tokens, stop strings, lengths.

Order at one token: eos, stop tokens, stop strings, then the lengths; a token that is both the last one allowed and a
stop is a stop.  Nothing but a length ends a text that is shorter than ``min_tokens``.  The token that completes a stop
is part of the output.

Threads: the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Union

from engine_client.messages import FinishReason

__all__ = ["End", "StopRule", "StopStrings"]

_BYTES_PER_CHARACTER: Final = 4
"""The most tokens that a byte-level model needs for a character."""

_MARGIN: Final = 8
"""Tokens before the longest stop string that are decoded too, since the first ones may be parts of a character."""


class End(NamedTuple):
    """Why a request ends, and the token or string that stopped it."""

    finish_reason: FinishReason
    stop_reason: Union[int, str, None] = None


class StopStrings:
    """Finds stop strings in what a request has generated, token by token; a string may span tokens.

    Only the tail that a stop string can reach is decoded.  A string counts if the newest token completed it: one that
    was there before ``min_tokens`` were reached does not end the text later.

    Args:
        strings: to stop at; of several that one token completes, the first in this order counts.
        decode: turns tokens into text.
    """

    __slots__ = ("_decode", "_reach", "_start", "_strings", "_text")

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings = strings
        self._decode = decode
        self._reach = _BYTES_PER_CHARACTER * max(map(len, strings)) + _MARGIN  # in tokens
        self._start = -1  # of the tail, as an index into the tokens; -1: nothing was decoded yet
        self._text = ""  # of the tail before the newest token

    def found(self, tokens: Sequence[int], first: int) -> str | None:
        """Look at the newest of ``tokens``, whose output begins at ``first``; return the string it completed."""
        if self._start < 0:
            self._start = first
        elif len(tokens) - self._start > 2 * self._reach:
            self._start = len(tokens) - self._reach
            self._text = self._decode(tokens[self._start : -1])
        before = self._text
        self._text = text = self._decode(tokens[self._start :])
        for string in self._strings:
            at = text.find(string)
            while at >= 0:
                if not before.startswith(string, at):
                    return string
                at = text.find(string, at + 1)
        return None


class StopRule:
    """What ends one request.

    Args:
        eos: the end-of-sequence token; None: there is none, or it is ignored.
        tokens: stop tokens.
        strings: finds stop strings, or None.
        first: index of the first output token, which is the length of the prompt.
        min_tokens: output tokens before a stop counts.
        max_len: tokens, prompt included, at which the text has its full length.
    """

    __slots__ = ("_eos", "_first", "_min_len", "_strings", "_tokens", "max_len", "watched")

    def __init__(
        self,
        *,
        eos: int | None,
        tokens: frozenset[int],
        strings: StopStrings | None,
        first: int,
        min_tokens: int,
        max_len: int,
    ) -> None:
        self._eos = eos
        self._tokens = tokens if eos is None else tokens | {eos}
        self._strings = strings
        self._first = first
        self._min_len = first + min_tokens
        self.max_len = max_len
        self.watched = self._tokens if strings is None else None  # tokens to check; None: any may complete a string

    def check(self, tokens: Sequence[int]) -> End | None:
        """Look at the newest of ``tokens`` (the prompt's included); to be called for each token in turn."""
        token = tokens[-1]
        string = self._strings.found(tokens, self._first) if self._strings is not None else None
        if len(tokens) >= self._min_len:
            if token in self._tokens:
                return End(FinishReason.STOP, None if token == self._eos else token)
            if string is not None:
                return End(FinishReason.STOP, string)
        return End(FinishReason.LENGTH) if len(tokens) >= self.max_len else None
