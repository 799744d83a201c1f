"""What ends a text: stop tokens, stop strings that span tokens, lengths, and their order."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from engine_client.engine.stop import End, StopRule, StopStrings
from engine_client.messages import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def decode(tokens):
    return bytes(tokens).decode("utf-8", "replace")


def rule(*, eos=None, tokens=(), strings=(), first=0, min_tokens=0, max_len=10_000, decode=decode):
    return StopRule(
        eos=eos,
        tokens=frozenset(tokens),
        strings=StopStrings(strings, decode) if strings else None,
        first=first,
        min_tokens=min_tokens,
        max_len=max_len,
    )


def first_end(stop, tokens, first=0):
    """Return the end and the number of tokens at which it came."""
    for number in range(first + 1, len(tokens) + 1):
        end = stop.check(tokens[:number])
        if end is not None:
            return end, number
    return None, len(tokens)


class TestTokens:
    def test_eos_has_no_stop_reason(self):
        """The end-of-sequence token stops without naming itself, also when it is among the stop tokens."""
        assert first_end(rule(eos=9), [1, 9, 2]) == (End(STOP), 2)
        assert first_end(rule(eos=9, tokens=[9]), [1, 9, 2]) == (End(STOP), 2)

    def test_stop_token_is_named(self):
        """A stop token is the stop reason."""
        assert first_end(rule(eos=9, tokens=[4, 5]), [1, 5, 9]) == (End(STOP, 5), 2)

    def test_min_tokens_hold_stops_back(self):
        """Stops before ``min_tokens`` output tokens are passed over; the one at that number counts."""
        assert first_end(rule(eos=9, min_tokens=3, first=1), [9, 9, 9, 9], 1) == (End(STOP), 4)

    def test_length_ends_whatever_the_minimum(self):
        """The length ends a text although ``min_tokens`` were not reached."""
        assert first_end(rule(eos=9, min_tokens=5, max_len=2), [9, 9, 9]) == (End(LENGTH), 2)

    def test_stop_at_the_last_token_is_a_stop(self):
        """A stop at the last token that is allowed is a stop, not a length."""
        assert first_end(rule(tokens=[3], max_len=2), [1, 3]) == (End(STOP, 3), 2)

    def test_watched_tokens(self):
        """Only the watched tokens can end a text before its length; with stop strings any token can."""
        assert rule(eos=1, tokens=[2]).watched == {1, 2}
        assert rule(eos=1, strings=["x"]).watched is None


class TestStrings:
    def test_ends_at_the_token_that_completes_it(self):
        """A stop string that spans tokens ends the text at its last token."""
        assert first_end(rule(strings=["lo w"]), b"hello world") == (End(STOP, "lo w"), 7)

    def test_first_of_the_list_wins(self):
        """Of two that one token completes the first in the list is named."""
        assert first_end(rule(strings=["bc", "abc"]), b"abc") == (End(STOP, "bc"), 3)
        assert first_end(rule(strings=["abc", "bc"]), b"abc") == (End(STOP, "abc"), 3)

    def test_stop_token_goes_before_a_string(self):
        """A token that is a stop by itself is named, though it completes a string."""
        assert first_end(rule(strings=["b"], tokens=[98]), b"ab") == (End(STOP, 98), 2)

    def test_characters_of_several_tokens_are_found(self):
        """A character that is spread over tokens is found when its last byte is there."""
        text = "naïve é 🙂!".encode()
        assert first_end(rule(strings=["🙂"]), text) == (End(STOP, "🙂"), len(text) - 1)
        assert first_end(rule(strings=["é"]), text) == (End(STOP, "é"), text.index("é".encode()) + 2)

    def test_prompt_is_not_searched(self):
        """A stop string in the prompt, or half in it, does not end the text."""
        assert first_end(rule(strings=["ab"], first=3), b"xabb", 3) == (None, 4)
        assert first_end(rule(strings=["ab"], first=1), b"ab", 1) == (None, 2)

    def test_string_before_min_tokens_does_not_count_later(self):
        """A string that was complete before ``min_tokens`` is passed over; the next one counts."""
        assert first_end(rule(strings=["ab"], min_tokens=4), b"ab..ab") == (End(STOP, "ab"), 6)

    def test_one_token_may_hold_it_in_its_middle(self):
        """A token of many characters stops the text although the string is not at its end."""
        words = {0: "Once ", 1: "upon. A time", 2: "!"}
        stop = rule(strings=["."], decode=lambda tokens: "".join(words[token] for token in tokens))
        assert first_end(stop, [0, 0, 1, 2]) == (End(STOP, "."), 3)

    @pytest.mark.parametrize("min_tokens", range(1, 80))
    def test_every_token_may_be_the_one(self, min_tokens):
        """Wherever the tail that is decoded begins, the first token from ``min_tokens`` on that completes it counts."""
        assert first_end(rule(strings=["a"], min_tokens=min_tokens), b"a" * 100) == (End(STOP, "a"), min_tokens)

    def test_looks_at_the_tail_alone(self):
        """However long the text grows, the part that is decoded stays short."""
        longest = 0

        def measured(tokens):
            nonlocal longest
            longest = max(longest, len(tokens))
            return decode(tokens)

        text = b"x" * 5000 + b"stop"
        assert first_end(rule(strings=["stop"], decode=measured), text) == (End(STOP, "stop"), 5004)
        assert longest < 60

    @given(
        text=st.text("aaab🙂", max_size=150),
        strings=st.lists(st.text("ab🙂", min_size=1, max_size=6), min_size=1, max_size=3),
        min_tokens=st.integers(0, 90),
    )
    def test_agrees_with_a_search_of_the_whole_text(self, text, strings, min_tokens):
        """A text ends with the first token from ``min_tokens`` on that completes any of the strings."""
        tokens = text.encode()
        end, number = first_end(rule(strings=strings, min_tokens=min_tokens), tokens)
        ends = [n for n in range(max(1, min_tokens), len(tokens) + 1) if any(completes(tokens, n, s) for s in strings)]
        assert number == (ends[0] if ends else len(tokens))
        assert (end is not None) is bool(ends)
        assert end is None or completes(tokens, number, end.stop_reason)


def completes(tokens, number, string):
    """Tell whether token ``number`` completes an occurrence of the string in the whole text."""
    before, after = decode(tokens[: number - 1]), decode(tokens[:number])
    return any(after.startswith(string, at) and not before.startswith(string, at) for at in range(len(after)))


@pytest.mark.parametrize("reason", list(FinishReason))
def test_end_defaults_to_no_stop_reason(reason):
    """An end needs no more than its finish reason."""
    assert End(reason).stop_reason is None
