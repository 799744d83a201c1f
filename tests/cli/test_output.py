"""What is shown: texts, JSON, order, a live text, progress."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, strategies as st

from engine_client.cli.output import (
    Continuation,
    InOrder,
    LiveText,
    as_json,
    as_text,
    cut_at,
    pace_text,
    write,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("one. two", ". ", "one"),
        ("one one", "one", "one "),
        ("one", None, "one"),
        ("one", 101, "one"),
        ("one", "two", "one"),
        ("", "x", ""),
    ],
)
def test_text_ends_before_its_stop_string(text: str, stop: object, left: str):
    """The string that ended a text is not part of it; a token that did has no text to cut."""
    assert cut_at(text, stop) == left


def test_plain_text_is_prompt_and_continuation():
    """A continuation is shown right behind its prompt."""
    assert as_text(Continuation(0, "The", text=" end.\n"), chr) == "The end.\n\n"


def test_logprobs_get_a_line_each():
    """Each token has a line: its text, log-probability, rank, and the best tokens with theirs."""
    continuation = Continuation(0, "a", text="b", logprobs=[(98, -0.5, 1, [(98, -0.5), (99, -1.25)]), (99, -2, 12, [])])
    assert as_text(continuation, chr).splitlines() == [
        "ab",
        "  'b'        -0.500  rank 1     'b' -0.500  'c' -1.250",
        "  'c'        -2.000  rank 12",
    ]


def test_json_is_one_line_of_everything():
    """A JSON line has all fields; those about log-probabilities and errors only where there are some."""
    continuation = Continuation(3, "a\n\udcff", 3, [98], "b", "length")
    line = as_json(continuation)
    assert line.endswith("}\n")
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "index": 3,
        "prompt": "a\n\udcff",
        "text": "b",
        "finish_reason": "length",
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "token_ids": [98],
    }
    continuation.logprobs = [(98, -0.5, 1, [(98, -0.5)])]
    continuation.error = "no"
    fields = json.loads(as_json(continuation))
    assert fields["logprobs"] == [{"token_id": 98, "logprob": -0.5, "rank": 1, "best": [[98, -0.5]]}]
    assert fields["error"] == "no"


@given(st.permutations(range(6)))
def test_finished_texts_come_in_the_order_of_the_prompts(order: list[int]):
    """Whatever finishes first, texts are shown in order, each as soon as those before it are."""
    shown: list[int] = []
    in_order = InOrder(lambda continuation: shown.append(continuation.index))
    for number, index in enumerate(order, 1):
        in_order.add(Continuation(index, ""))
        done = set(order[:number])
        assert shown == [index for index in range(6) if done.issuperset(range(index + 1))]


def live(pieces: list[str], stop: list[str], end: str) -> list[str]:
    shown: list[str] = []
    text = LiveText(stop, shown.append)
    for piece in pieces:
        text.update(piece)
    text.finish(end)
    return shown


def test_live_text_shows_what_is_new():
    """Each update shows what came since the last one."""
    assert live(["a", "ab", "ab", "abcd"], [], "abcde") == ["a", "b", "cd", "e"]


def test_live_text_waits_for_whole_characters():
    """A character whose bytes are not all there is not shown yet; one that never comes is shown at the end."""
    assert live(["a", "a\ufffd", "a\ufffd", "aü", "aü\ufffd"], [], "aü\ufffd") == ["a", "ü", "\ufffd"]


def test_live_text_holds_back_what_may_be_a_stop_string():
    """The beginning of a stop string is shown only when it turns out to be something else."""
    assert live(["a", "a<", "a<e", "a<ex"], ["<end>", "x!"], "a<exy") == ["a", "<e", "xy"]
    assert live(["a", "a<", "a<e", "a<en"], ["<end>"], "a") == ["a"]


@given(st.text("ab<", max_size=20), st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3))
def test_live_text_never_shows_too_much(text: str, stop: list[str]):
    """However a text grows, and wherever a stop string cuts it, the pieces make up exactly the text that is left."""
    grown = []
    left = text
    for length in range(len(text) + 1):
        found = [string for string in stop if text[:length].endswith(string)]
        if found:
            left = text[: length - len(found[0])]
            break
        grown.append(text[:length])
    if len({len(string) for string in stop}) <= 1:  # of unequal ones, one may begin before another that ends first
        assert "".join(live(grown, stop, left)) == left


def test_writing_is_at_once(capsys: pytest.CaptureFixture[str]):
    """What is written is out."""
    write("text")
    assert capsys.readouterr().out == "text"


def test_how_fast_and_how_long_still():
    """The rate is that of all tokens so far, and the time left that of all that may still come."""
    assert pace_text(0, 10, 1.0) == ""
    assert pace_text(100, 6500, 1.0) == "100 tokens/s, at most 1:05 left"
    assert pace_text(3, 0, 2.0) == "2 tokens/s, at most 0:00 left"
